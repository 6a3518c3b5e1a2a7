"""Everything a run depends on, typed and checked. The defaults are the paper's settings.

Settings come in layers, later ones win: defaults, the method's variant, the file or preset, what the caller sets. So a
variant never overrides what somebody wrote, and a complete ``config.toml`` reads back as itself.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedfa.algorithms.registry import build_recipe, validate_options
from fedfa.data import PartitionSpec, parse_partition
from fedfa.engines.execution import Execution
from fedfa.errors import DataError, SettingsError
from fedfa.insight.observer import LAST_ROUND
from fedfa.learning.cohort import Selection
from fedfa.learning.device import DeviceName
from fedfa.learning.part import LocalTraining, Precision
from fedfa.learning.recipe import Recipe
from fedfa.messages import nearest, validation_message
from fedfa.studies.layers import DEFAULT_RECIPE, stack

OWN = "own"
"""Stands for the name of a network or data set that was given in Python, or that sites bring."""


class Section(BaseModel):
    """Base of the sections: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DataSettings(Section):
    """Which data, and how they are spread over the clients."""

    name: str = "fashion-mnist"
    """A known data set, or the path of your own (.npz, folder of class folders)."""
    clients: int | None = Field(None, ge=1)
    """Number of clients; left out: 100, or as many as the data have with ``partition = "natural"``."""
    partition: PartitionSpec = Field(default_factory=lambda: parse_partition("shards:2"))
    seed: int = Field(1, ge=0)
    """Seed of the split; the training has its own."""
    normalise: Literal["dataset", "authors"] = "dataset"
    """Input statistics: the data set's own, or those of the paper's published code."""
    dir: str | None = None
    """Data directory; left out: FEDFA_DATA, else the user's cache."""
    offline: bool = False
    """Never use the network."""

    @property
    def number_of_clients(self) -> int | None:
        """Clients to split over; None where the data decide."""
        return self.clients if self.clients or self.partition.kind == "natural" else 100

    @model_validator(mode="before")
    @classmethod
    def _short_partition(cls, values: Any) -> Any:
        """Let ``partition = "shards:2"`` stand for the table."""
        if isinstance(values, dict) and isinstance(values.get("partition"), str):
            try:
                return {**values, "partition": parse_partition(values["partition"])}
            except DataError as error:
                raise SettingsError(f"data.partition: {error}") from None
        return values


class ModelSettings(Section):
    """Which network."""

    name: str = "cnn-fmnist"
    head: str | None = None
    """Name of the linear classifier, where it cannot be found by itself."""
    buffers: Literal["average", "local"] = "average"
    """BatchNorm's running statistics: averaged like weights, or kept by each client."""
    options: dict[str, Any] = Field(default_factory=dict)


class AlgorithmSettings(BaseModel):
    """The recipe and the options of its parts, each in a table named after the part."""

    model_config = ConfigDict(frozen=True, extra="allow")

    recipe: str = DEFAULT_RECIPE
    """Methods joined by ``+``."""
    variant: str | None = None
    """A named set of settings of the method; see ``fedfa algorithms NAME``."""

    @property
    def options(self) -> dict[str, dict[str, Any]]:
        """The parts' options by part."""
        return dict(self.__pydantic_extra__ or {})


class CohortSettings(Section):
    """Which clients take part in a round."""

    clients: int | None = Field(None, ge=1)
    """How many; left out, ``rate`` decides."""
    rate: float = Field(0.1, gt=0, le=1)
    """Share of all clients."""
    selection: Selection = "uniform"

    def count(self, num_clients: int) -> int:
        """Clients per round."""
        return self.clients or max(1, round(self.rate * num_clients))


class LocalSettings(Section):
    """How a client trains."""

    epochs: int = Field(5, ge=1)
    batch_size: int = Field(64, ge=1)
    lr: float = Field(0.01, gt=0)
    lr_decay: float = Field(1.0, gt=0, le=1)
    """The learning rate of round t (from 0) is ``lr · lr_decay^t``."""
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.001, ge=0)
    drop_last: bool = False
    """Leave out an incomplete last batch (BatchNorm cannot train on a single sample)."""
    precision: Precision = "float32"
    """``"bfloat16"``: networks compute in numbers of 8 bits' precision while they train. Faster where the processor
    knows them, and another result: compare only runs of one precision. Weights, sums, evaluations stay float32."""

    def in_round(self, round: int) -> LocalTraining:
        """The values of one round, counted from 0."""
        return LocalTraining(
            epochs=self.epochs, batch_size=self.batch_size, lr=self.lr * self.lr_decay**round,
            momentum=self.momentum, weight_decay=self.weight_decay, drop_last=self.drop_last,
            precision=self.precision,
        )  # fmt: skip


class EvaluationSettings(Section):
    """When and how the global model is evaluated."""

    every: int = Field(1, ge=1)
    """Rounds between evaluations; the last round is always evaluated."""
    batch_size: int = Field(500, ge=1)


class InsightSettings(Section):
    """When and how the training is looked into. Nothing here changes a result; see docs/insight.md."""

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


class CheckpointSettings(Section):
    """When the run is saved."""

    every: int = Field(1, ge=1)
    """Rounds between checkpoints."""


class EngineSettings(Section):
    """How the work is carried. Nothing here changes a result, unless stacking that was asked for warns of it."""

    kind: Literal["local", "ray"] = "local"
    """``"local"``: this machine; ``"ray"``: the nodes of a Ray cluster."""
    address: str | None = None
    """With ``kind = "ray"``, the cluster's HOST:PORT, ``"local"`` for one of its own on this machine, or ``"auto"``;
    left out: RAY_ADDRESS, else the cluster that this machine belongs to."""
    workers: int | Literal["auto"] = "auto"
    """Processes that train clients; ``"auto"``: one per core where that pays, 1: this process. On a cluster: at most so
    many, ``"auto"``: one per core."""

    execution: Execution = "auto"
    """``"stacked"``: clients of equal size train side by side, as one network with a client axis; much faster for small
    networks. ``"each"``: one by one. ``"auto"``: stacked where a trial is faster and gives the same bits."""

    @field_validator("workers", mode="plain")
    @classmethod
    def _number_or_auto(cls, value: object) -> int | Literal["auto"]:
        if value == "auto":
            return "auto"
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        raise ValueError('say how many processes, or "auto"')


class Settings(Section):
    """One run, completely."""

    rounds: int = Field(200, ge=1)
    seed: int = Field(1, ge=0)
    """Seed of the training: initial weights, cohorts, shuffling."""
    device: DeviceName = "auto"
    data: DataSettings = Field(default_factory=DataSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    algorithm: AlgorithmSettings = Field(default_factory=AlgorithmSettings)
    cohort: CohortSettings = Field(default_factory=CohortSettings)
    local: LocalSettings = Field(default_factory=LocalSettings)
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings)
    insight: InsightSettings = Field(default_factory=InsightSettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)

    @classmethod
    def resolve(cls, *layers: Mapping[str, Any]) -> Settings:
        """Settings from layers of nested dictionaries (later ones win), completed by variant and defaults.

        Raises:
            SettingsError: Names the key, what is allowed and the nearest right spelling.

        Example:
            >>> Settings.resolve({"rounds": 3}, {"local": {"lr": 0.1}}).local.lr
            0.1
        """
        complete = stack(layers, cls().to_dict())
        recipe, name = complete["algorithm"]["recipe"], complete["algorithm"].get("variant")
        try:
            settings = cls.model_validate(complete)
        except ValidationError as error:
            raise SettingsError(validation_message(error, cls)) from None
        for part, options in settings.algorithm.options.items():
            if not isinstance(options, Mapping):
                parts = validate_options(recipe, {})
                if part in parts:
                    raise SettingsError(
                        f"algorithm.{part} = {options!r}: this is a table; write algorithm.{part}.OPTION = VALUE, "
                        f"with one of the options {', '.join(type(parts[part]).model_fields) or '(it has none)'}"
                    )
                allowed = [*AlgorithmSettings.model_fields, *parts]
                raise SettingsError(
                    f"unknown key algorithm.{part}{nearest(part, allowed)}; allowed here: {', '.join(allowed)}"
                )
        typed = validate_options(recipe, settings.algorithm.options)
        dumped = {part: options.model_dump(exclude_none=True) for part, options in typed.items()}
        filled = {"recipe": recipe, "variant": name, **{part: values for part, values in dumped.items() if values}}
        return settings.model_copy(update={"algorithm": AlgorithmSettings(**filled)})

    @classmethod
    def preset(cls, name: str, *layers: Mapping[str, Any]) -> Settings:
        """The settings of a preset, with further layers on top.

        Example:
            >>> Settings.preset("digits-c2", {"rounds": 2}).data.name
            'digits'
        """
        return cls.resolve(preset_layer(name), *layers)

    @classmethod
    def from_file(cls, path: Path | str, *layers: Mapping[str, Any]) -> Settings:
        """The settings of a TOML file, with further layers on top."""
        return cls.resolve(read_toml(Path(path)), *layers)

    def with_own(self, *, network: bool, data: bool) -> Settings:
        """The settings of a run whose network or data are given in Python: they name nothing that is not used.

        Example:
            >>> Settings.preset("digits-c2").with_own(network=True, data=False).model.name
            'own'
        """
        changed: dict[str, Any] = {}
        if network:
            changed["model"] = self.model.model_copy(update={"name": OWN, "options": {}})
        if data:
            changed["data"] = self.data.model_copy(update={"name": OWN})
        return self.model_copy(update=changed)

    def to_dict(self) -> dict[str, Any]:
        """Complete, as plain values; what is not set is left out."""
        return self.model_dump(mode="json", exclude_none=True)

    def to_toml(self) -> str:
        """Complete, as TOML."""
        return tomli_w.dumps(self.to_dict())

    def recipe(self) -> Recipe:
        """The recipe, ready to use."""
        return build_recipe(self.algorithm.recipe, self.algorithm.options)


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as nested dictionaries."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"no configuration file {path}; `fedfa presets` lists what exists by name") from None
    except IsADirectoryError:
        raise SettingsError(f"{path} is a folder; name a TOML file, such as the config.toml in a run folder") from None
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None


def presets() -> dict[str, str]:
    """Every preset's name and its first comment line."""
    found = {}
    for file in sorted(resources.files("fedfa.studies").joinpath("presets").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml"):
            found[file.name.removesuffix(".toml")] = file.read_text("utf-8").partition("\n")[0].lstrip("# ")
    return found


def preset_layer(name: str) -> dict[str, Any]:
    """A preset's own lines."""
    known = presets()
    if name not in known:
        raise SettingsError(f"unknown preset {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    return tomllib.loads(resources.files("fedfa.studies").joinpath("presets", f"{name}.toml").read_text("utf-8"))
