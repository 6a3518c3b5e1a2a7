"""Mistakes in a component of a user's own: each is refused with an error that names the component and the remedy."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from types import new_class
from typing import Any

import pytest
import torch

from fedfa.algorithms.registry import build_algorithm, expression_of
from fedfa.errors import AlgorithmError, ClientError, ConfigError
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.component import HOOKS, Component, Traits
from tests.algorithms.toy import toy_federation


# -- class definitions ------------------------------------------------------------------------------------------------
def define(method: str, function: Callable[..., Any]) -> Any:
    """A component class with one method."""
    return new_class("Mine", (Component,), exec_body=lambda body: body.update({method: function}))


@pytest.mark.parametrize(
    ("method", "meant"),
    [
        ("after_steps", "after_step"), ("afterstep", "after_step"), ("gradients", "gradient"), ("losss", "loss"),
        ("logit", "logits"), ("contributes", "contribute"), ("predicts", "predict"), ("role", "roles"),
        # names of other frameworks and of earlier releases
        ("on_batch_end", "after_step"), ("compute_loss", "loss"), ("aggregate", "step"), ("initialize", "init"),
        ("end", "after_epoch"), ("survey", "contribute"), ("conclude", "step"),
    ],
)  # fmt: skip
def test_a_misspelt_hook_is_refused_with_the_nearest(method: str, meant: str) -> None:
    message = f"Mine.{method} looks like a hook, but there is no hook of that name (did you mean {meant!r}?)"
    with pytest.raises(AlgorithmError, match=re.escape(message)):
        define(method, lambda self, *arguments: None)


def test_an_unknown_method_with_the_arguments_of_a_hook_is_refused_with_all_hooks() -> None:
    with pytest.raises(AlgorithmError, match=f"Mine.frobnicate looks like a hook.*{', '.join(HOOKS)}.*underscore"):
        define("frobnicate", lambda self, ctx, batch: None)


def test_what_changes_is_not_kept_in_a_component() -> None:
    mine = define("begin", lambda self, ctx: None)()
    with pytest.raises(AlgorithmError, match=r"mine\.count cannot be assigned: .*ctx\.scratch\['mine'\]"):
        mine.count = 1


def test_helper_methods_are_allowed() -> None:
    assert define("_after_steps", lambda self, ctx, batch: None).name == "mine"
    assert define("distance", lambda self, a, b: a - b).name == "mine"


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_allowed(hook: str) -> None:
    kind = define(hook, lambda self, *arguments: arguments[-1])
    assert Algorithm([kind()]).hooks(hook)


def test_an_option_without_a_type_is_refused_with_what_to_write() -> None:
    members = {"name": "mine", "loss": lambda self, ctx, batch, loss: loss, "strength": 0.1}
    wanted = (
        "Mine.strength has no type; write `strength: float = 0.1` for an option, or `strength: ClassVar[float] = 0.1`"
    )
    with pytest.raises(AlgorithmError, match=re.escape(wanted)):
        new_class("Mine", (Component,), exec_body=lambda body: body.update(members))


class Empty(Component):
    strength: float = 0.1


def test_a_component_that_overrides_nothing_is_refused(tmp_path: Path) -> None:
    problem = "Empty overrides no hook, so it would change nothing; override one of adapt, roles, init, begin"
    with pytest.raises(AlgorithmError, match=problem):
        Algorithm([Empty()])
    with pytest.raises(AlgorithmError, match=problem):
        expression_of(Empty())
    file = tmp_path / "mine.py"
    file.write_text("from fedfa.learning.component import Component\n\nclass Empty(Component):\n    pass\n")
    with pytest.raises(AlgorithmError, match=problem):
        build_algorithm(str(file))


def test_a_component_that_only_declares_traits_is_allowed() -> None:
    class Marker(Component):
        traits = Traits(horizon=True)

    assert Algorithm([Marker()]).uses_horizon


def test_a_misspelt_hook_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        dedent("""
        from fedfa.learning.component import Component

        class Mine(Component):
            def after_steps(self, ctx, batch):
                pass
    """)
    )
    with pytest.raises(AlgorithmError, match=r"mine\.py cannot be imported: Mine\.after_steps.*'after_step'"):
        build_algorithm(str(file))


def test_options_are_checked_when_a_component_is_made() -> None:
    misspelt: dict[str, Any] = {"strenght": 0.2}
    with pytest.raises(ConfigError, match=r"algorithm\.empty\.strenght.*did you mean 'strength'"):
        Empty(**misspelt)
    with pytest.raises(ConfigError, match=r"algorithm\.empty\.strength = 'much'"):
        Empty(strength="much")


@pytest.mark.parametrize("name", ["model", "round", "a/b", "a+b", "a.b", "two words"])
def test_names_that_fedfa_needs_itself_are_refused(name: str) -> None:
    kind = new_class("Mine", (Component,), exec_body=lambda body: body.update(name=name, begin=lambda self, ctx: None))
    with pytest.raises(AlgorithmError, match=re.escape(f"a component cannot be named {name!r}")):
        Algorithm([kind()])


# -- values that hooks return or store --------------------------------------------------------------------------------
def message_of(hook: str, function: Callable[..., Any]) -> str:
    """The error of a round with a component that has this hook."""
    with pytest.raises((AlgorithmError, ClientError)) as error:
        toy_federation(define(hook, function)()).round()
    return str(error.value)


@pytest.mark.parametrize(
    ("returned", "found"),
    [(None, "None"), (0.5, "0.5"), (torch.zeros(4), "a tensor of shape (4,)"), ([1], "[1]")],
    ids=["nothing", "a float", "a loss per sample", "a list"],
)
def test_a_loss_that_is_not_one_number_is_refused(returned: Any, found: str) -> None:
    message = message_of("loss", lambda self, ctx, batch, loss: returned)
    assert message.startswith(f"client 0, round 1, {FIRST_BATCH}: ")
    assert f"component 'mine': `loss` returned {found}; return the loss as one number" in message


def test_logits_of_another_shape_are_refused() -> None:
    message = message_of("logits", lambda self, ctx, batch, logits: logits[:, :2])
    assert "component 'mine': `logits` returned a tensor of shape (4, 2); return logits of shape (4, 5)" in message


@pytest.mark.parametrize("value", [0.5, 3, None, "text"])
def test_client_state_other_than_tensors_is_refused(value: Any) -> None:
    def after_epoch(self: Component, ctx: Any) -> None:
        ctx.client_state[self.name] = {"count": value}

    message = message_of("after_epoch", after_epoch)
    assert message.startswith("client 0, round 1, building the contribution: ")
    assert f"component 'mine' keeps 'count' = {value!r} in ctx.client_state" in message
    assert "wrap it with torch.tensor" in message


@pytest.mark.parametrize("value", [0.5, 3, None, "text"])
def test_server_state_other_than_tensors_is_refused(value: Any) -> None:
    def step(self: Component, server: Any) -> None:
        server.state[self.name]["count"] = value

    expected = (
        f"component 'mine' has 'count' = {value!r} in its server state; state is named tensors: wrap it with torch"
    )
    assert expected in message_of("step", step)
    assert expected in message_of("init", lambda self, task, rng: {"count": value})


@pytest.mark.parametrize(
    "returned",
    [None, [torch.zeros(1)], WeightedSum.of({}, 1), {"group": torch.zeros(2)}, {"group": {"name": torch.zeros(2)}}],
    ids=["nothing", "a list", "one sum", "a tensor", "nested tensors"],
)
def test_a_contribution_that_is_no_mapping_of_weighted_sums_is_refused(returned: Any) -> None:
    message = message_of("contribute", lambda self, ctx: returned)
    assert message.startswith("client 0, round 1, building the contribution: ")
    assert f"component 'mine': `contribute` returned {returned!r}; return a dict of WeightedSum" in message


# -- exceptions inside hooks ------------------------------------------------------------------------------------------
FIRST_BATCH = "local training (epoch 1, batch 1)"


def line_of(function: Callable[..., Any]) -> int:
    """The line after the ``def`` of a function."""
    return inspect.getsourcelines(function)[1] + 1


@pytest.mark.parametrize(
    ("hook", "stage"),
    [
        ("begin", "begin"), ("logits", FIRST_BATCH), ("loss", FIRST_BATCH), ("gradient", FIRST_BATCH),
        ("after_step", FIRST_BATCH), ("after_epoch", "after epoch"), ("contribute", "building the contribution"),
    ],
)  # fmt: skip
def test_an_exception_in_a_client_hook_names_client_stage_file_and_line(hook: str, stage: str) -> None:
    def broken(self: Component, *arguments: Any) -> Any:
        return dict[str, int]()["missing"]

    message = message_of(hook, broken)
    place = f"test_component_mistakes.py, line {line_of(broken)}, in broken"
    assert message == f"client 0, round 1, {stage}: KeyError: 'missing' ({place})"


def test_an_exception_in_the_server_step_names_component_round_file_and_line() -> None:
    def broken(self: Component, server: Any) -> None:
        server.update["missing"] = server.update["missing"] * 2

    message = message_of("step", broken)
    place = f"test_component_mistakes.py, line {line_of(broken)}, in broken"
    assert message == f"component 'mine', server step of round 1: KeyError: 'missing' ({place})"


def test_a_hook_with_the_wrong_arguments_is_refused() -> None:
    with pytest.raises(
        AlgorithmError, match=r"Short\.loss has the wrong arguments; write: def loss\(self, ctx, batch, loss\)"
    ):

        class Short(Component):
            def loss(self, ctx, batch):  # type: ignore[no-untyped-def,override]
                return batch
