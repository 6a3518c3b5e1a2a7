"""Everything a run depends on, typed and validated. The defaults are the paper's.

A config is made of layers, later ones win: defaults, the method's variant, the file or preset, what the caller sets.
So a variant never overrides what the user wrote, and a complete ``config.toml`` reads back as itself.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.config import JsonDict

from fedfa.algorithms.registry import build_algorithm, build_components, option_names
from fedfa.channel.config import ChannelConfig
from fedfa.data import Columns, PartitionSpec, Standardise, number_of_clients, parse_partition
from fedfa.data.validation import parse_validation
from fedfa.diagnostics.observer import LAST_ROUND
from fedfa.error_messages import nearest, validation_message
from fedfa.errors import ConfigError, DataError
from fedfa.experiment.layers import DEFAULT_ALGORITHM, stack
from fedfa.fleet.config import FleetConfig
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.cohort import Selection
from fedfa.learning.context import LocalTraining
from fedfa.learning.device import DeviceName
from fedfa.learning.metrics import is_own, metric
from fedfa.protection.settings import AggregationConfig, AttackConfig, PrivacyConfig
from fedfa.stacking.choice import Execution

OWN = "own"
"""Stands for the name of a network or data set that was given in Python, or that sites bring."""


_NO_EFFECT: JsonDict = {"affects_result": False}
"""Metadata of keys that cannot change a result; see :func:`affects_result`."""


class Section(BaseModel):
    """Base of the sections: frozen; unknown keys, infinities and NaN refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class DataConfig(Section):
    """Which data, and how they are spread over the clients."""

    name: str = "fashion-mnist"
    """A data set of fedfa, or the path of your own (.npz, .csv, .parquet, class folders)."""
    clients: int | None = Field(None, ge=1)
    """Number of clients; left out: 100, or as many as the data have with ``partition = "natural"``."""
    partition: PartitionSpec = Field(default_factory=lambda: parse_partition("shards:2"))
    """How samples are assigned to clients, e.g. ``"shards:2"`` or ``"dirichlet:0.1"``; see docs/data.md."""
    seed: int = Field(1, ge=0)
    """Seed of the split; the training has its own."""
    normalise: Literal["dataset", "authors"] = "dataset"
    """Input statistics: the data set's own, or those of the paper's published code."""
    standardise: Standardise = "none"
    """Float inputs with mean 0 and deviation 1, fitted on training samples: of all clients, or of each client by
    itself; test samples then use those of all."""
    augment: Literal["none", "crop-flip"] = "none"
    """Random changes of training batches: a crop of the image padded by 4 pixels and a flip, as usual for CIFAR."""
    label: str | None = None
    """Column of the labels in your own table; left out, the one named label, target, class or y."""
    inputs: tuple[str, ...] | None = None
    """Columns of the inputs; left out, all others."""
    client_column: str | None = None
    """Column that names the client of each sample; with ``partition = "natural"`` each of them is a client."""
    domain_column: str | None = None
    """Column that names the domain of each sample."""
    validation: str | None = None
    """Samples for choosing (best round, early stopping, tuning): ``"server:0.1"`` or ``"clients:0.1"`` hold out a share
    of the training samples at the server or on each client, a path names a set of your own; left out, there are none
    and rounds are evaluated on the test set. See docs/evaluation.md."""
    dir: str | None = Field(None, json_schema_extra=_NO_EFFECT)
    """Data directory; left out: FEDFA_DATA, else the user's cache."""
    offline: bool = Field(False, json_schema_extra=_NO_EFFECT)
    """Never use the network."""

    @property
    def columns(self) -> Columns:
        """Which columns of a table are what."""
        return Columns(self.label, self.inputs, self.client_column, self.domain_column)

    @model_validator(mode="after")
    def _clients_are_used(self) -> DataConfig:
        if self.client_column is not None and self.partition.kind != "natural":
            raise ValueError(
                f'data.client_column = {self.client_column!r} names the clients: set data.partition = "natural" '
                f"(now {self.partition.kind})"
            )
        return self

    @property
    def number_of_clients(self) -> int | None:
        """Clients to split over; None where the data decide."""
        return number_of_clients(self.partition, self.clients)

    @field_validator("validation")
    @classmethod
    def _validation(cls, text: str | None) -> str | None:
        if text is not None:
            parse_validation(text)
        return text

    @model_validator(mode="before")
    @classmethod
    def _short_partition(cls, values: Any) -> Any:
        """Let ``partition = "shards:2"`` stand for the table."""
        if isinstance(values, dict) and isinstance(values.get("partition"), str):
            try:
                return {**values, "partition": parse_partition(values["partition"])}
            except DataError as error:
                raise ConfigError(f"data.partition: {error}") from None
        return values


class ModelConfig(Section):
    """Which network."""

    name: str = "cnn-fmnist"
    """A network of fedfa, or one of your own as ``file.py:Class``."""
    head: str | None = None
    """Name of the linear classifier, where it cannot be found by itself."""
    buffers: Literal["average", "local"] = "average"
    """BatchNorm's running statistics: averaged like weights, or local to each client."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the network, e.g. ``model.options.weight_standardisation = true``."""


class AlgorithmConfig(BaseModel):
    """The algorithm and the options of its components, each in a table named after the component."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    name: str = DEFAULT_ALGORITHM
    """The algorithm expression: methods joined by ``+``."""
    variant: str | None = None
    """A named set of config values of the method; see ``fedfa algorithms NAME``."""

    @property
    def options(self) -> dict[str, dict[str, Any]]:
        """The options by component."""
        return dict(self.__pydantic_extra__ or {})


class CohortConfig(Section):
    """The clients of a round."""

    clients: int | None = Field(None, ge=1)
    """How many; left out, ``rate`` decides."""
    rate: float = Field(0.1, gt=0, le=1)
    """Share of all clients."""
    selection: Selection = "uniform"
    """Drawn evenly, in proportion to their samples (``"size"``), as the reference code does (``"authors"``), each with
    the same probability (``"poisson"``), or by what is known of them: ``"power-of-choice"`` takes those with the
    highest losses among ``candidates``, ``"oort"`` weighs loss, samples and, with a clock, speed; see docs/fleet.md."""
    candidates: float | None = Field(None, ge=1)
    """With ``"power-of-choice"``: candidates, times the clients of a round; left out, 2."""
    rounding: Literal["nearest", "down"] | None = None
    """How ``rate`` times the number of clients becomes a whole number; left out, to the nearest. ``"down"`` is what the
    reference code does. It is recorded only where it matters."""

    @model_validator(mode="after")
    def _candidates(self) -> CohortConfig:
        if self.candidates is not None and self.selection != "power-of-choice":
            raise ValueError(
                f'cohort.candidates belongs to cohort.selection = "power-of-choice", not "{self.selection}"'
            )
        return self

    def count(self, num_clients: int) -> int:
        """Clients per round."""
        share = self.rate * num_clients
        return self.clients or max(1, int(share) if self.rounding == "down" else round(share))

    def without_idle_rounding(self, num_clients: int | None) -> CohortConfig:
        """The same, without a rounding that makes no difference for this number of clients."""
        nearest, down = (self.model_copy(update={"rounding": name}) for name in (None, "down"))
        same = self.clients is not None or (num_clients and nearest.count(num_clients) == down.count(num_clients))
        return nearest if same else self


class EvaluationConfig(Section):
    """When and how models are evaluated; see docs/evaluation.md."""

    every: int = Field(1, ge=1)
    """Rounds between evaluations; the last round is always evaluated."""
    batch_size: int = Field(500, ge=1)
    """Test samples at a time; it affects memory and speed."""
    metrics: tuple[str, ...] = ()
    """What is computed besides accuracy and loss: ``balanced_accuracy``, ``macro_f1``, ``auroc``,
    ``average_precision``, ``calibration_error``, ``top:K``, ``confusion_matrix``, or your own ``FILE.py:FUNCTION`` of
    labels and scores."""
    clients: Literal["none", "cohort", "all"] | None = None
    """Whose own test distribution is evaluated too, with the client's own model where it has one: that of the round's
    clients, or of all. Left out: ``"cohort"`` where clients have models of their own, else ``"none"``."""
    monitor: str = "accuracy"
    """What the best round, early stopping and tuning go by, on the validation samples: ``accuracy``, ``loss``, one of
    ``metrics``, or ``own_data`` (the mean over clients on their own distributions)."""
    choose: Literal["best", "last"] | None = None
    """Whose round's model is tested, with ``data.validation``: that of the best validation, or the last. Left out: the
    best; the last where clients keep tensors of their own."""
    patience: int | None = Field(None, ge=1)
    """Stop after this many evaluations in a row without a better one on the validation samples."""

    @field_validator("metrics")
    @classmethod
    def _metrics(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not is_own(name):  # a file is read when it is needed
                metric(name)
        if len(set(names)) < len(names):
            raise ValueError("a metric is named twice; name each once")
        return names

    def check_monitor(self) -> None:
        """Refuse to go by something that is not computed.

        Raises:
            ConfigError: The monitored value is not known.
        """
        allowed = ["accuracy", "loss", "own_data", *(name for name in self.metrics if name != "confusion_matrix")]
        if self.monitor not in allowed:
            raise ConfigError(
                f"evaluation.monitor = {self.monitor!r}{nearest(self.monitor, allowed)}: one of {', '.join(allowed)} "
                "(metrics are those of evaluation.metrics)"
            )


class DiagnosticsConfig(Section):
    """When and how diagnostics are measured. Nothing here changes a result; see docs/diagnostics.md."""

    every: int = Field(0, ge=0)
    """Rounds between measurements, 0 for none; the last round is measured too."""
    samples: int = Field(500, ge=1)
    """Size of the probe: test samples, the same in every run with this ``data.seed``, even over domains and classes."""
    clients: int = Field(10, ge=1)
    """How many of a round's clients are compared, pair by pair."""
    features: tuple[int, ...] = ()
    """Rounds whose probe features are stored, e.g. for t-SNE; -1 is the last round."""

    @field_validator("features")
    @classmethod
    def _rounds(cls, rounds: tuple[int, ...]) -> tuple[int, ...]:
        if wrong := [round for round in rounds if round < 1 and round != LAST_ROUND]:
            raise ValueError(f"rounds are counted from 1, and -1 is the last; not {wrong[0]}")
        return rounds

    @property
    def on(self) -> bool:
        """Whether anything is measured."""
        return self.every > 0 or bool(self.features)


class CheckpointConfig(Section):
    """When the run is saved."""

    every: int = Field(1, ge=1, json_schema_extra=_NO_EFFECT)
    """Rounds between checkpoints."""


class EngineConfig(Section):
    """How clients are trained. Nothing here changes a result, except where requested stacking warns of it."""

    kind: Literal["local", "ray"] = Field("local", json_schema_extra=_NO_EFFECT)
    """``"local"``: this machine; ``"ray"``: the nodes of a Ray cluster."""
    address: str | None = Field(None, json_schema_extra=_NO_EFFECT)
    """With ``kind = "ray"``, the cluster's HOST:PORT, ``"local"`` for one of its own on this machine, or ``"auto"``;
    left out: RAY_ADDRESS, else the cluster that this machine belongs to."""
    workers: int | Literal["auto"] = Field("auto", json_schema_extra=_NO_EFFECT)
    """Processes that train clients; ``"auto"``: one per core where that pays, 1: this process. On a cluster: at most so
    many, ``"auto"``: one per core."""

    execution: Execution = Field("auto", json_schema_extra=_NO_EFFECT)
    """``"stacked"``: clients of equal size train as one network with a client axis; much faster for small
    networks. ``"each"``: one by one. ``"auto"``: stacked where a trial is faster and gives the same bits."""

    @field_validator("workers", mode="plain")
    @classmethod
    def _number_or_auto(cls, value: object) -> int | Literal["auto"]:
        if value == "auto":
            return "auto"
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        raise ValueError('must be a positive integer or "auto"')


class Config(Section):
    """One run, completely."""

    rounds: int = Field(200, ge=1)
    """Number of rounds."""
    seed: int = Field(1, ge=0)
    """Seed of the training: initial weights, cohorts, shuffling."""
    device: DeviceName = "auto"
    """Where to compute; ``"auto"``: CUDA, else MPS, else the processor."""
    data: DataConfig = Field(default_factory=DataConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    cohort: CohortConfig = Field(default_factory=CohortConfig)
    local: LocalTraining = Field(default_factory=LocalTraining)
    fleet: FleetConfig = Field(default_factory=FleetConfig)
    channel: ChannelConfig = Field(default_factory=ChannelConfig)
    aggregation: AggregationConfig = Field(default_factory=AggregationConfig)
    attack: AttackConfig = Field(default_factory=AttackConfig)
    privacy: PrivacyConfig = Field(default_factory=PrivacyConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    diagnostics: DiagnosticsConfig = Field(default_factory=DiagnosticsConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)

    @classmethod
    def resolve(cls, *layers: Mapping[str, Any]) -> Config:
        """A config from layers of nested dictionaries (later ones win), completed by variant and defaults.

        Raises:
            ConfigError: Names the key, what is allowed and the nearest right spelling.

        Example:
            >>> Config.resolve({"rounds": 3}, {"local": {"lr": 0.1}}).local.lr
            0.1
        """
        complete = stack(layers, cls().to_dict())
        expression, name = complete["algorithm"]["name"], complete["algorithm"].get("variant")
        try:
            config = cls.model_validate(complete)
        except ValidationError as error:
            raise ConfigError(validation_message(error, cls)) from None
        for component, options in config.algorithm.options.items():
            if not isinstance(options, Mapping):
                components = build_components(expression, {})
                if component in components:
                    names = ", ".join(option_names(type(components[component]))) or "(it has none)"
                    raise ConfigError(
                        f"algorithm.{component} = {options!r}: this is a table; write algorithm.{component}.OPTION = "
                        f"VALUE, with one of the options {names}"
                    )
                allowed = [*AlgorithmConfig.model_fields, *components]
                raise ConfigError(
                    f"unknown key algorithm.{component}{nearest(component, allowed)}; allowed here: "
                    f"{', '.join(allowed)}"
                )
        config.check_choosing()
        built = build_components(expression, config.algorithm.options)
        dumped = {name: c.model_dump(mode="json", by_alias=True, exclude_none=True) for name, c in built.items()}
        filled = {"name": expression, "variant": name, **{c: values for c, values in dumped.items() if values}}
        cohort = config.cohort.without_idle_rounding(config.data.number_of_clients)
        return config.model_copy(update={"algorithm": AlgorithmConfig(**filled), "cohort": cohort})

    @classmethod
    def preset(cls, name: str, *layers: Mapping[str, Any]) -> Config:
        """The config of a preset, with further layers on top.

        Example:
            >>> Config.preset("digits-c2", {"rounds": 2}).data.name
            'digits'
        """
        return cls.resolve(preset_layer(name), *layers)

    @classmethod
    def from_file(cls, path: Path | str, *layers: Mapping[str, Any]) -> Config:
        """The config of a TOML file, with further layers on top."""
        return cls.resolve(read_toml(Path(path)), *layers)

    def to_dict(self) -> dict[str, Any]:
        """Complete, as plain values; what is not set is left out."""
        return self.model_dump(mode="json", exclude_none=True)

    def to_toml(self) -> str:
        """Complete, as TOML."""
        return tomli_w.dumps(self.to_dict())

    def check_choosing(self) -> None:
        """Refuse to choose without validation samples: it would be on the test set.

        Raises:
            ConfigError: With what to set.
        """
        self.evaluation.check_monitor()
        asked = {"patience": self.evaluation.patience, "choose": self.evaluation.choose}
        for key, value in asked.items():
            if value is not None and self.data.validation is None:
                raise ConfigError(
                    f"evaluation.{key} = {value!r} goes by validation samples, and there are none: set "
                    'data.validation, e.g. to "clients:0.1"'
                )

    @property
    def uses_horizon(self) -> bool:
        """Whether a round depends on how many are planned: such a run cannot be extended afterwards."""
        return self.local.uses_horizon or self.build_algorithm().uses_horizon

    def build_algorithm(self) -> Algorithm:
        """The algorithm of this config."""
        return build_algorithm(self.algorithm.name, self.algorithm.options)


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as nested dictionaries."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no configuration file {path}; `fedfa presets` lists what exists by name") from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a directory; name a TOML file, such as the config.toml in a run directory"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


@cache
def _preset_files() -> dict[str, str]:
    files = resources.files("fedfa.experiment").joinpath("presets").iterdir()
    texts = {file.name.removesuffix(".toml"): file.read_text("utf-8") for file in files if file.name.endswith(".toml")}
    return dict(sorted(texts.items()))


def presets() -> dict[str, str]:
    """Every preset's name and its first comment line."""
    return {name: text.partition("\n")[0].lstrip("# ") for name, text in _preset_files().items()}


def preset_layer(name: str) -> dict[str, Any]:
    """A preset's own lines."""
    known = _preset_files()
    if name not in known:
        raise ConfigError(f"unknown preset {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    return tomllib.loads(known[name])


@cache
def affects_result(key: str) -> bool:
    """Whether a config key, given with dots, can change the result of a run; the rest may differ on resume.

    Example:
        >>> affects_result("local.lr"), affects_result("engine.workers")
        (True, False)
    """
    kind: Any = Config
    metadata: Any = None
    for step in key.split("."):
        if not (isinstance(kind, type) and issubclass(kind, BaseModel) and step in kind.model_fields):
            return True
        metadata, kind = kind.model_fields[step].json_schema_extra, kind.model_fields[step].annotation
    return not isinstance(metadata, dict) or bool(metadata.get("affects_result", True))
