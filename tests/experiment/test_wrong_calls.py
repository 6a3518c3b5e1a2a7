"""Calls that a user gets wrong in Python: what is wrong, and what to write."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import fedfa
from fedfa.errors import ArgumentError

DIGITS = fedfa.data.load("digits")
DATA = DIGITS.split("shards:2", clients=4)


def experiment(**arguments: Any) -> fedfa.Experiment:
    return fedfa.Experiment(**{"algorithm": "fedavg", "data": DATA, "model": "mlp", "cohort": 2, **arguments})


def compare(**arguments: Any) -> Any:
    return fedfa.compare(["fedavg"], **{"data": DATA, "model": "mlp", "rounds": 1, **arguments})


@pytest.mark.parametrize(
    ("call", "wrong", "message"),
    [
        (experiment, {"chohort": 2}, "Experiment has no argument 'chohort' (did you mean 'cohort'?)"),
        (experiment, {"lr": 0.1}, "'lr': it belongs to local=fedfa.LocalTraining(lr=…)"),
        (experiment, {"learning_rte": 0.1}, "(did you mean 'learning_rate'?)"),
        (experiment, {"rounds": 3}, "'rounds': how many rounds to train is given to experiment.rounds(…)"),
        (experiment, {"clients": 3}, "dataset.split(…, clients=…); clients per round are cohort=…"),
        (lambda **n: experiment().rounds(**n), {"cuont": 3}, "rounds has no argument 'cuont' (did you mean 'count'?)"),
        (lambda **n: experiment().predict([], **n), {"score": True}, "(did you mean 'scores'?)"),
        (DIGITS.split, {"client": 4}, "split has no argument 'client' (did you mean 'clients'?)"),
        (DIGITS.split, {"alpha": 0.1}, "split('dirichlet:0.1')"),
        (fedfa.data.load, {"datadir": "x"}, "fedfa.data.load has no argument 'datadir'"),
        (fedfa.data.dataset_from, {"class_names": []}, "dataset_from has no argument 'class_names'"),
        (fedfa.data.federation_from, {"clases": []}, "(did you mean 'classes'?)"),
        (fedfa.load, {"modle": None}, "load has no argument 'modle' (did you mean 'model'?)"),
        (fedfa.run, {"overwite": True}, "(did you mean 'overwrite'?)"),
        (compare, {"seed": 3}, "compare has no argument 'seed': give a list, seeds=[1, 2, 3]"),
        (compare, {"cohrt": 3}, "compare has no argument 'cohrt' (did you mean 'cohort'?)"),
        (compare, {"epochs": 3}, "it belongs to local=fedfa.LocalTraining(epochs=…)"),
    ],
)
def test_a_wrong_argument_is_named_with_the_right_one(
    call: Callable[..., Any], wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        call(**wrong)


def test_it_is_a_type_error_as_everywhere_in_python() -> None:
    with pytest.raises(TypeError):
        experiment(chohort=2)


def test_rounds_that_nobody_iterates_over_warn_that_nothing_was_trained() -> None:
    mine = experiment()
    with pytest.warns(RuntimeWarning, match=r"rounds\(3\) trained nothing.*list\(experiment\.rounds\(3\)\)"):
        mine.rounds(3)
    assert mine.state.round == 0


def test_rounds_that_were_begun_or_are_none_do_not_warn() -> None:
    mine = experiment()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(mine.rounds(3))
        mine.rounds(0)
        list(mine.rounds(1))
    assert mine.state.round == 2


def test_rounds_in_a_notebook_say_what_they_are() -> None:
    rounds = experiment().rounds(3)
    assert repr(rounds) == "<3 rounds, trained as they are iterated over: for record in experiment.rounds(…)>"
    next(rounds)
