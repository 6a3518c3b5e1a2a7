"""An experiment: an algorithm trained on a federation, one round at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedfa.algorithms.registry import expression_of
from fedfa.arguments import checks_arguments
from fedfa.data import Federation
from fedfa.diagnostics.observer import Observation, Observer
from fedfa.engines.engine import Engine
from fedfa.engines.local import scores_of
from fedfa.errors import AlgorithmError, ConfigError, DataError, RunError
from fedfa.experiment.build import (
    DataSource,
    ModelSource,
    build_engine,
    evaluation_layer,
    single_thread,
)
from fedfa.experiment.choosing import Choice
from fedfa.experiment.config import Config
from fedfa.experiment.evaluating import evaluate_round, own_model
from fedfa.experiment.health import check_work, warn_of_round
from fedfa.experiment.layers import expression_and_variant
from fedfa.experiment.progress import Rounds, show_progress
from fedfa.experiment.record import RoundRecord, evaluation_values
from fedfa.experiment.setup import ExperimentSetup
from fedfa.fleet.informed import KnownClients
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.cohort import INFORMED
from fedfa.learning.component import Component
from fedfa.learning.context import LocalTraining
from fedfa.learning.evaluate import EvaluatedOn
from fedfa.learning.metrics import Function
from fedfa.learning.round import ClientStates, ClientStatesInMemory, RoundStatistics, ServerState, TrainClients
from fedfa.learning.tensors import Tensors
from fedfa.trees import pieces_of, to_device

log = logging.getLogger(__name__)

Callback = Callable[["Experiment", RoundRecord], Mapping[str, Any] | None]
"""Called after each round with the experiment and the round's record; values it returns are added to the record."""


ELSEWHERE = {
    **{name: f"it belongs to local=fedfa.LocalTraining({name}=…)" for name in LocalTraining.model_fields},
    "learning_rate": "it belongs to local=fedfa.LocalTraining(lr=…)",
    "clients": "the data know their clients, data=dataset.split(…, clients=…); clients per round are cohort=…",
    "partition": "the data are split before, data=dataset.split('shards:2', clients=…)",
}
"""Where values belong that users look for among the arguments of an experiment."""
_ROUNDS_AND_SEEDS = {
    "rounds": "how many rounds to train is given to experiment.rounds(…)",
    "seeds": "an experiment has one seed=…; fedfa.compare takes several",
}


class Experiment(ExperimentSetup):
    """An algorithm, a federation and a network, trained round by round. Nothing is written unless asked for.

    Args:
        algorithm: A typed object (``FedFA(mu=0.1) + FedAdam()``), a component of your own, or an expression such as
            ``"fedfa+fedadam"`` or ``"fedfa@plus"``.
        data: The clients: ``fedfa.data.load("fashion-mnist").split("shards:2", clients=100)``.
        model: A network class or function, an ``nn.Module`` (its weights are the initial ones), or the name of a
            network of fedfa.
        cohort: Clients per round: a number, or a share of all clients as a float.
        local: How clients train.
        seed: Seed of the training: initial weights, cohorts, shuffling.
        planned_rounds: The planned number of rounds, for algorithms that follow a schedule over all rounds.
        evaluate_every: Rounds between evaluations; the last round is always evaluated.
        metrics: What evaluations compute besides accuracy and loss: names (``"macro_f1"``) and your own functions of
            ``(labels, scores)``; see docs/evaluation.md.
        validation: Samples for choosing, so that the test set is left alone: ``"server:0.1"``, ``"clients:0.1"``, or a
            set of your own ``(inputs, labels)``. Rounds are then evaluated on these; :meth:`test` on the test set.
        callbacks: Called after each round with the experiment and the record.
        workers: Processes that train clients; results do not depend on it. ``"auto"``: one per core where that pays.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"mps"``.
        settings: Further config values by section, e.g. ``{"diagnostics": {"every": 5}}``.

    Example:
        >>> import fedfa
        >>> data = fedfa.data.load("digits").split("shards:2", clients=10, seed=0)
        >>> experiment = Experiment(algorithm="fedavg", data=data, model="mlp", cohort=5)
        >>> [record.round for record in experiment.rounds(2)]
        [1, 2]
    """

    @checks_arguments("Experiment", {**ELSEWHERE, **_ROUNDS_AND_SEEDS})
    def __init__(
        self,
        algorithm: str | Algorithm | Component = "fedfa",
        *,
        data: Federation,
        model: str | ModelSource,
        cohort: int | float = 0.1,
        local: LocalTraining | None = None,
        seed: int = 1,
        planned_rounds: int | None = None,
        evaluate_every: int = 1,
        metrics: Sequence[str | Function] = (),
        validation: Any = None,
        callbacks: Sequence[Callback] = (),
        workers: int | str = "auto",
        device: str = "auto",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(data, Federation):
            raise DataError(
                f"data is a {type(data).__name__}; give a federation: fedfa.data.load(NAME).split('shards:2', "
                "clients=…), or for your own arrays fedfa.data.dataset_from((x, y)).split(…)"
            )
        if isinstance(cohort, bool | str):
            raise ConfigError(f"cohort = {cohort!r}: give a number of clients, or a share of all clients as a float")
        layer: dict[str, Any] = {
            "seed": seed,
            "device": device,
            "cohort": {"rate": cohort} if isinstance(cohort, float) else {"clients": cohort},
            "evaluation": {"every": evaluate_every},
            "engine": {"workers": workers},
        }
        if isinstance(algorithm, str):
            layer["algorithm"] = expression_and_variant(algorithm)
        elif not isinstance(algorithm, Algorithm | Component):
            raise AlgorithmError(
                f"algorithm is {algorithm!r}; give an expression such as 'fedfa+fedadam' or an object such as FedProx()"
            )
        else:
            expression, options = expression_of(algorithm)
            layer["algorithm"] = {"name": expression, **options}
        if local is not None:
            layer["local"] = _local_training(local).model_dump(exclude_none=True)
        if isinstance(model, str):
            layer["model"] = {"name": model}
        if planned_rounds is not None:
            layer["rounds"] = planned_rounds
        config = Config.resolve(layer, evaluation_layer(metrics, validation), settings or {})
        if config.privacy.on and config.privacy.noise is None and planned_rounds is None:
            raise ConfigError("privacy.epsilon is a budget for all rounds; give their number: planned_rounds=…")
        own = None if isinstance(validation, str) else validation
        self._setup(config, None if isinstance(model, str) else model, data, callbacks, metrics, own)
        self._rounds_are_planned = planned_rounds is not None
        # Whatever does not fit together is reported now, not in the first round.
        _ = self.state, self.cohort(0), self.clock

    @classmethod
    @checks_arguments("Experiment.from_config")
    def from_config(
        cls,
        config: Config,
        *,
        model: ModelSource | None = None,
        data: DataSource | None = None,
        callbacks: Sequence[Callback] = (),
        extra: Sequence[Component] = (),
        metrics: Sequence[str | Function] = (),
        validation: Any = None,
    ) -> Experiment:
        """The experiment of a config.

        Args:
            config: What to do.
            model: Your own network, instead of ``config.model.name``.
            data: Your own data, instead of ``config.data.name``; split as the config says unless it is a federation.
            callbacks: Called after each round.
            extra: Components that only measure, beside those of the algorithm.
            metrics: Functions that the config names but that were given in Python.
            validation: Your own validation samples, instead of ``config.data.validation``.
        """
        experiment = cls.__new__(cls)
        experiment._setup(config, model, data, callbacks, metrics, validation)
        experiment._extra = list(extra)
        _ = experiment.training, experiment.clock  # what can fail for a wrong config fails now, not in the first round
        return experiment

    def _setup(
        self,
        config: Config,
        model: ModelSource | None,
        data: DataSource | None,
        callbacks: Sequence[Callback],
        metrics: Sequence[str | Function] = (),
        validation: Any = None,
    ) -> None:
        ExperimentSetup.__init__(self, config, model, data, metrics, validation)
        self.choice = Choice(self)
        self._tested: dict[str, Any] | None = None
        if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
            raise ConfigError(f"callbacks is {callbacks!r}; give a list of functions of (experiment, record)")
        self.callbacks = list(callbacks)
        self.records: list[RoundRecord] = []
        """The records of all rounds so far."""
        self.observation: Observation | None = None
        """Diagnostics of the last round, where they were due."""
        self._state: ServerState | None = None
        self._final_state: ServerState | None = None
        self.client_states: ClientStates = ClientStatesInMemory()
        self._stopped = self._training_now = self._warned = False
        self._rounds_are_planned = True

    def __repr__(self) -> str:
        data, accuracy = self.config.data, self.records[-1].accuracy if self.records else None
        shown = "" if accuracy is None else f", accuracy {accuracy:.2%}"
        clients = f"{data.clients} clients" if data.clients else "its clients"
        return (
            f"<Experiment {self.config.algorithm.name} on {data.name} with {clients}: {self.state.round} rounds{shown}>"
        )

    # -- local training ---------------------------------------------------------------------------------------
    @property
    def local(self) -> LocalTraining:
        """How clients train; assign another value to change it from the next round on."""
        return self.config.local

    @local.setter
    def local(self, local: LocalTraining) -> None:
        self.config = self.config.model_copy(update={"local": _local_training(local)})

    # -- state ------------------------------------------------------------------------------------------------
    @property
    def state(self) -> ServerState:
        """The server state after the last round; before a final pass, so that the training can go on."""
        if self._state is None:
            self._state = self.training.init()
        return self._state

    @property
    def final_state(self) -> ServerState:
        """The server state after the last round and, where there was one, the final pass."""
        return self._final_state or self.state

    def restore(
        self, state: ServerState | None, records: Sequence[Mapping[str, Any]], client_states: ClientStates
    ) -> None:
        """Continue from a saved state."""
        self._state, self._final_state, self.client_states = state, None, client_states
        self.records = [RoundRecord(record) for record in records]
        self.choice, self._tested = Choice(self), None

    # -- rounds -----------------------------------------------------------------------------------------------
    @checks_arguments("rounds")
    def rounds(
        self, count: int | None = None, *, patience: int | None = None, progress: bool | None = None
    ) -> Iterator[RoundRecord]:
        """Train, one round per iteration; stop iterating to stop training. Call it again to continue.

        Args:
            count: Number of further rounds; left out, as many as remain of the planned ones.
            patience: Stop after this many evaluations in a row without a better one on the validation samples; left
                out, ``evaluation.patience`` decides.
            progress: Show a progress bar; left out, in a terminal or notebook.

        Yields:
            The record of each round; after the last one that of the final pass, for algorithms that have one.

        Raises:
            ConfigError: The count is no whole number, or the algorithm follows a schedule over the planned rounds, and
                these would be exceeded.
        """
        if count is not None and (isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 0):
            raise ConfigError(f"rounds({count!r}): give the number of further rounds, a whole number")
        if patience is not None:
            self.config = Config.resolve(self.config.to_dict(), {"evaluation": {"patience": patience}})
        last = self.config.rounds if count is None else self.state.round + int(count)
        self._plan_rounds(last)
        ahead = last - self.state.round
        return Rounds(show_progress(self._rounds(last), ahead, self.config.algorithm.name, progress), ahead)

    def _plan_rounds(self, last: int) -> None:
        config, horizon = self.config, self.algorithm.uses_horizon or self.config.local.uses_horizon
        planned = self._rounds_are_planned or (horizon and self.state.round > 0)
        if last == config.rounds or (last < config.rounds and planned):
            return
        if horizon and planned:
            raise ConfigError(
                f"{config.algorithm.name!r} follows a schedule over {config.rounds} rounds and cannot train "
                f"{last}; start a new experiment with planned_rounds={last}"
            )
        self.config = config.model_copy(update={"rounds": last})
        if "training" in vars(self):
            self.training = replace(self.training, task=replace(self.task, rounds=last))

    def _rounds(self, last: int) -> Iterator[RoundRecord]:
        if self._training_now:
            raise RunError("this experiment is training a round; start further rounds after it, not in a callback")
        check_work(self.config.local, self.federation)
        self._stopped, observer = False, self.observer()
        with single_thread():
            engine = self.engine()
        try:
            while self.state.round < last and not self._ended():
                with single_thread(), self._all_or_nothing():
                    record = self._round(engine, observer, last)
                yield record
            if self.algorithm.has_final_pass:
                with single_thread():
                    record = self._final_pass(engine)
                yield record
        finally:
            engine.close()

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Undo a round that fails or is interrupted, in its evaluation or a callback too: it can be trained again."""
        before, final, records, best = self.state, self._final_state, list(self.records), self.choice.best
        self._training_now = True
        try:
            yield
        except BaseException:
            self._state, self._final_state, self.records, self.choice.best = before, final, records, best
            self.client_states.discard(before.round + 1)
            raise
        finally:
            self._training_now = False

    def _ended(self) -> bool:
        """Whether training ends here: stopped by a callback, out of patience, or out of the privacy budget."""
        if self._stopped or self.choice.out_of_patience():
            return True
        if self.budget is None or self.budget.allows(self.state.round + 1):
            return False
        log.warning(
            "the privacy budget is spent: another round would exceed privacy.epsilon = %g; stopping after round %d",
            self.budget.epsilon, self.state.round,
        )  # fmt: skip
        return True

    def stop(self) -> None:
        """End the training after the current round; for callbacks. A final pass still follows."""
        self._stopped = True

    def _round(self, engine: Engine, observer: Observer | None, last: int) -> RoundRecord:
        before = self.state
        cohort = self.cohort(before.round) if self.clock is None else []  # the clock draws by itself
        local = self.config.local.in_round(before.round, self.config.rounds)
        if self.algorithm.pools_data:  # one site with all data does the work of this round's cohort
            steps = sum(local.steps_on(int(self.sizes[client])) for client in cohort)
            local, cohort = local.model_copy(update={"steps": steps}), [0]
        on_clock: dict[str, Any] = {}
        if self.clock is None:
            state, statistics = self.training.apply(
                before, cohort, local, self.carried(engine), self.client_states, observer=observer
            )
        else:
            state, statistics, on_clock = self.clock.round(
                self.training, before, local, engine.train, self.client_states, observer
            )
        if self.clock is None and self.config.cohort.selection in INFORMED:
            state = KnownClients.of(before).after(state.round, statistics.losses, {}).added_to(state)
        self._state, self._final_state, self._tested = state, None, None
        spent: dict[str, Any] = {}
        if self.budget is not None or self.config.privacy.masks:
            # Of single clients' data, and not accounted: a warning would tell the loss as well. Under masks the server
            # of a federation does not even know whether sites trained.
            statistics = replace(statistics, train_loss=None)
        else:
            self._warned = warn_of_round(statistics, self.preprocessing.classes, self._warned)
        if self.budget is not None:
            spent = {**self.budget.record(state.round), "clip": float(state.components["privacy"]["clip"])}
        if self.records and self.records[-1].final_pass:  # of a model that is no longer the last one
            self.records.pop()
        ends = state.round == last or (self.budget is not None and not self.budget.allows(state.round + 1))
        due = state.round % self.config.evaluation.every == 0 or ends
        due = due and bool(statistics.clients or not self.is_personal)  # on a clock nobody may have arrived
        evaluation = evaluation_values(None)
        if due:
            evaluation = evaluate_round(self, engine, state, statistics.clients, self.evaluated_on)
            self.choice.consider(state, evaluation)
        self.observation = None if observer is None else observer.observe(before, state)
        return self._record(state.round, evaluation, statistics, engine, **on_clock, **spent)

    def _final_pass(self, engine: Engine) -> RoundRecord:
        """Every client that holds data contributes once more, and the server step of the final pass follows.

        The state of the training stays as it was, so that it can go on from there.
        """
        clients = [0] if self.algorithm.pools_data else [int(client) for client in np.flatnonzero(self.sizes)]
        local = self.config.local.in_round(self.state.round, self.config.rounds)
        state, statistics = self.training.apply(
            self.state, clients, local, engine.train, self.client_states, final_pass=True
        )
        self._final_state = state
        evaluation = evaluate_round(self, engine, state, statistics.clients, self.evaluated_on)
        self.choice.consider(state, evaluation)
        on_clock = {} if self.clock is None else self.clock.final_pass(self.state, statistics)
        return self._record(state.round + 1, evaluation, statistics, engine, final_pass=True, **on_clock)

    def _record(
        self, round: int, evaluation: Mapping[str, Any], measured: RoundStatistics, engine: Engine, **more: Any
    ) -> RoundRecord:
        record = RoundRecord.of(round, evaluation, measured, {**more, **engine.remarks()})
        for callback in self.callbacks:
            if added := callback(self, record):
                record = record.extended(added, getattr(callback, "__name__", type(callback).__name__))
        self.records.append(record)
        return record

    def cohort(self, round: int) -> list[int]:
        """The clients of a round, counted from 0; where the selection goes by what is known of them, as of now."""
        if self.config.cohort.selection in INFORMED:
            selector = replace(self.selector(), known=KnownClients.of(self.state))
            return selector.select(self.config.cohort.count(len(self.sizes)), 0.0, round, set())
        return super().cohort(round)

    # -- choosing by validation, and the test ---------------------------------------------------------------------
    @property
    def evaluated_on(self) -> EvaluatedOn:
        """What rounds are evaluated on: the validation samples where there are some, else the test set."""
        return "test" if self.config.data.validation is None else "validation"

    @property
    def chosen_state(self) -> ServerState:
        """The state whose model is tested: that of the best validation, or the last one."""
        return self.choice.state or self.final_state

    def test(self) -> dict[str, Any]:
        """Evaluate the chosen model on the test set, once: a second call returns the same values.

        Without validation samples this is the evaluation of the current model.

        Returns:
            The values of an evaluation, and under ``chosen`` the round whose model it is and why.
        """
        if self._tested is None:
            rounds = [record for record in self.records if record.cohort]
            clients = rounds[-1].cohort if rounds else self.cohort(0)
            state = self.chosen_state
            with single_thread():
                values = evaluate_round(self, self.local_engine(), state, clients, "test")
            self._tested = {**values, "chosen": {"round": state.round, "by": self.choice.reason}}
        return self._tested

    def carried(self, engine: Engine) -> TrainClients:
        """The engine's clients behind the channel."""
        return self.training.carried(engine.train)

    def engine(self) -> Engine:
        """The engine that the config asks for."""
        cohort = 1 if self.algorithm.pools_data else self.config.cohort.count(len(self.federation))
        return build_engine(self.config, self.training, self.local_engine(), cohort, self.state)

    # -- the trained model ------------------------------------------------------------------------------------
    def weights(self, client: int | None = None) -> Tensors:
        """The current weights by name: of the global model, or of a client's own model.

        With ``data.validation`` the global model is the one of the best validation so far.

        Raises:
            RunError: Clients keep tensors of their own, and no client is named; or there is no such client.
        """
        if client is not None and not 0 <= client < self._number_of_clients:
            raise RunError(f"there is no client {client}; the clients are 0 to {self._number_of_clients - 1}")
        if client is None and self.is_personal:
            raise RunError(
                f"with {self.config.algorithm.name!r} every client keeps tensors of its own, so there is no global "
                "model; name a client, e.g. experiment.model(client=0)"
            )
        model = self.chosen_state.model
        return model if client is None else own_model(self, model, client)

    def model(self, client: int | None = None) -> nn.Module:
        """A copy of the network with the current weights, in evaluation mode.

        It takes preprocessed inputs; :meth:`predict` takes raw ones.

        Args:
            client: Whose model, for algorithms in which clients keep tensors of their own.
        """
        self.task.model.load(self.weights(client))
        return self.task.model.plain_copy().eval()

    @checks_arguments("predict")
    def predict(self, inputs: Any, *, client: int | None = None, scores: bool = False) -> Tensor:
        """Predict the classes of raw inputs, preprocessed as the training data were.

        Args:
            inputs: Pictures as arrays of 8 or 16 bits, tokens as integers, other inputs as float arrays, or a
                dictionary or tuple of these, as in training; one or many.
            client: Whose model, for algorithms in which clients keep tensors of their own.
            scores: Return the scores ``[N, C]`` instead of the class numbers ``[N]``.
        """
        network, device = self.task.model, next(self.task.model.module.parameters()).device
        network.load(self.weights(client))
        broadcast = self.algorithm.broadcast(self.chosen_state.components)
        score = scores_of(self.algorithm, broadcast, device)
        network.module.eval()
        found = []
        with torch.inference_mode():
            prepared, size = self.preprocessing.apply(inputs, client), self.config.evaluation.batch_size
            for batch in pieces_of(prepared, lambda each: each.split(size)):
                features, logits = network(to_device(batch, device))
                found.append((logits if score is None else score(features, logits)).cpu())
        network.outputs = {}
        values = torch.cat(found).clone()
        return values if scores else values.argmax(-1)

    # -- files ------------------------------------------------------------------------------------------------
    def save(self, path: Path | str, *, overwrite: bool = False) -> Path:
        """Write everything to a run directory: config, records, model, preprocessing, server and client state.

        :func:`fedfa.load` reads it back; ``fedfa run --resume`` and ``fedfa report`` work on it, too.

        Args:
            path: The run directory.
            overwrite: Replace a run that is there.
        """
        from fedfa.experiment.saving import save

        return save(self, Path(path), overwrite=overwrite)


def _local_training(local: LocalTraining) -> LocalTraining:
    if not isinstance(local, LocalTraining):
        raise ConfigError(f"local is {local!r}; give fedfa.LocalTraining(epochs=5, batch_size=64, lr=0.01)")
    return LocalTraining(**vars(local))  # again: model_copy(update=…) checks neither names nor values
