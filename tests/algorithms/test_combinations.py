"""From an algorithm expression and a user's options to components: what fits together, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from fedfa.algorithms import Anchors, Calibration, FedAvg
from fedfa.algorithms.method import Method
from fedfa.algorithms.registry import build_algorithm, methods, methods_of, register
from fedfa.errors import AlgorithmError, ConfigError
from fedfa.experiment.config import Config
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.component import Component
from fedfa.learning.context import Task
from fedfa.models.split import SplitModel
from tests.algorithms.toy import CLASSES, Network, toy_federation


def component_names(algorithm: Algorithm) -> list[str]:
    return [component.name for component in algorithm.components]


def mentions(*pieces: str) -> str:
    """A pattern: these pieces, in this order."""
    return "(?s)" + ".*".join(re.escape(piece) for piece in pieces)


# -- composition ----------------------------------------------------------------------------------------------------
class TestComposition:
    def test_the_methods(self) -> None:
        assert {"fedavg", "fedfa"} <= methods().keys()
        assert component_names(build_algorithm("fedavg")) == ["fedavg"]
        assert component_names(build_algorithm("fedfa")) == ["fedavg", "anchors", "calibration", "final"]

    @pytest.mark.parametrize("text", ["fedavg+fedfa", "fedfa+fedavg", " fedavg + fedfa ", "fedfa+fedfa"])
    def test_naming_fedavg_or_a_method_again_changes_nothing(self, text: str) -> None:
        assert component_names(build_algorithm(text)) == component_names(build_algorithm("fedfa"))

    def test_the_title_is_how_it_was_asked_for(self) -> None:
        assert build_algorithm("fedavg+fedfa").title == "fedavg+fedfa"

    @pytest.mark.parametrize(
        ("text", "pieces"),
        [
            ("fedaf", ("unknown method 'fedaf'", "did you mean 'fedfa'", "fedavg", "fedfa")),
            ("fedfa+fedavgg", ("unknown method 'fedavgg'", "did you mean 'fedavg'")),
            ("zzz", ("unknown method 'zzz'", "known: ")),
        ],
    )
    def test_unknown_method(self, text: str, pieces: tuple[str, ...]) -> None:
        with pytest.raises(AlgorithmError, match=mentions(*pieces)):
            build_algorithm(text)

    def test_no_far_fetched_spelling(self) -> None:
        with pytest.raises(AlgorithmError) as error:
            build_algorithm("zzz")
        assert "did you mean" not in str(error.value)

    @pytest.mark.parametrize("text", ["", "fedfa+", "+fedfa", "fedfa++fedavg"])
    def test_not_a_list_of_methods(self, text: str) -> None:
        with pytest.raises(AlgorithmError, match="joined by '\\+'"):
            build_algorithm(text)

    def test_component_twice(self) -> None:
        with pytest.raises(AlgorithmError, match=mentions("'mine'", "two components are named 'anchors'")):
            Algorithm([FedAvg(), Anchors(), Anchors()], title="mine")

    @pytest.mark.parametrize("components", [(FedAvg, Calibration), (FedAvg, Calibration, Anchors)])
    def test_requirement_missing_or_too_late(self, components: tuple[type[Component], ...]) -> None:
        with pytest.raises(AlgorithmError, match=mentions("'calibration' needs 'anchors' before it")):
            Algorithm([component() for component in components])

    def test_no_aggregating_component(self) -> None:
        task = Task(SplitModel.of(Network()), CLASSES, 3, rounds=1)
        with pytest.raises(AlgorithmError, match=mentions("no component turns", "server's update", "add FedAvg()")):
            Algorithm([Anchors()]).with_roles(task)

    def test_two_aggregating_components(self) -> None:
        class Other(FedAvg):
            name = "other"

        with pytest.raises(AlgorithmError, match=mentions("only one component can", "'fedavg' and 'other'")):
            Algorithm([FedAvg(), Other()])

    def test_the_aggregating_component_comes_first(self) -> None:
        assert component_names(Algorithm([Anchors(), FedAvg(), Calibration()])) == ["fedavg", "anchors", "calibration"]

    def test_hooks_are_those_that_a_component_defines(self) -> None:
        algorithm = build_algorithm("fedfa")
        assert [hook.__self__.name for hook in algorithm.hooks("loss")] == ["anchors"]  # type: ignore[attr-defined]  # hooks are bound methods
        assert algorithm.hooks("logits") == []
        assert build_algorithm("fedavg").hooks("loss") == []


# -- methods of a user's own ----------------------------------------------------------------------------------------
WITH_COMPONENTS = '''
    """Half steps: the server goes half of the way."""
    from fedfa.learning.component import Component
    from fedfa.learning.context import ServerStep

    class Half(Component):
        share: float = 0.5

        def step(self, server: ServerStep) -> None:
            server.update = {name: self.share * value for name, value in server.update.items()}
'''
WITH_METHOD = (
    WITH_COMPONENTS
    + """
    from fedfa.algorithms.method import Method

    MINE = Method("halfway", "Half steps.", (Half,), {"small": {"algorithm.half.share": 0.1}}, "small")
"""
)
WITH_LATE_ANNOTATIONS = """
    from __future__ import annotations
    from dataclasses import dataclass
    from typing import Literal
    from fedfa.learning.component import Component

    @dataclass
    class Note:
        text: str | None = None

    class Polite(Component):
        tone: Literal["kind", "very kind"] = "kind"

        def begin(self, ctx):
            pass
"""
BUILT_ON_FEDFA = """
    from fedfa.algorithms.registry import methods
    from fedfa.learning.component import Component, Traits

    FEDFA = methods()["fedfa"]

    class Mine(Component):
        traits = Traits(follows=tuple(component.name for component in FEDFA.components))
"""


def write(directory: Path, text: str, name: str = "halves.py") -> str:
    path = directory / name
    path.write_text(dedent(text), encoding="utf-8")
    return str(path)


class TestOwnFile:
    def test_components_alone_make_a_method(self, tmp_path: Path) -> None:
        path = write(tmp_path, WITH_COMPONENTS)
        (method,) = methods_of(path)
        assert (method.name, method.summary) == ("halves", "Half steps: the server goes half of the way.")
        assert component_names(build_algorithm(path)) == ["fedavg", "half"]
        assert component_names(build_algorithm(f"fedfa+{path}")) == [
            "fedavg",
            "anchors",
            "calibration",
            "final",
            "half",
        ]

    def test_its_component_acts_in_a_round(self, tmp_path: Path) -> None:
        """Half of FedAvg's change, exactly."""
        plain, half = (toy_federation(algorithm) for algorithm in ("fedavg", write(tmp_path, WITH_COMPONENTS)))
        start = plain.state.model
        full, halved = plain.round().model, half.round().model
        for name, value in start.items():
            assert ((halved[name] - value) * 2 - (full[name] - value)).abs().max() < 1e-14

    def test_a_method_with_variants(self, tmp_path: Path) -> None:
        path = write(tmp_path, WITH_METHOD)
        (method,) = methods_of(path)
        assert method.name == "halfway"
        config = Config.resolve({"algorithm": {"name": path}})
        assert config.algorithm.variant == "small"
        assert config.algorithm.options["half"] == {"share": 0.1}

    def test_options_of_its_components_are_checked(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=mentions("algorithm.half.shar", "did you mean 'share'")):
            build_algorithm(write(tmp_path, WITH_COMPONENTS), {"half": {"shar": 0.1}})

    def test_a_file_may_use_late_annotations(self, tmp_path: Path) -> None:
        """Dataclasses and pydantic look a class's module up by name; files of the project's own style must work."""
        algorithm = build_algorithm(write(tmp_path, WITH_LATE_ANNOTATIONS), {"polite": {"tone": "very kind"}})
        assert algorithm.components[1].model_dump() == {"tone": "very kind"}

    def test_its_explanation_is_its_text(self, tmp_path: Path) -> None:
        (method,) = methods_of(write(tmp_path, WITH_COMPONENTS))
        assert method.explanation().startswith("Half steps")

    def test_a_file_that_imports_a_known_method_is_not_that_method(self, tmp_path: Path) -> None:
        (method,) = methods_of(write(tmp_path, BUILT_ON_FEDFA))
        assert [component.name for component in method.components] == ["mine"]

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(AlgorithmError, match=mentions("no file", "nothing.py")):
            methods_of(str(tmp_path / "nothing.py"))

    @pytest.mark.parametrize(
        ("text", "pieces"),
        [
            ("x = 1", ("halves.py must define one Method, or Component classes", "found 0")),
            ("1 / 0", ("halves.py cannot be imported", "ZeroDivisionError")),
            ("def (", ("halves.py cannot be imported", "SyntaxError")),
        ],
    )
    def test_a_file_without_a_method(self, tmp_path: Path, text: str, pieces: tuple[str, ...]) -> None:
        with pytest.raises(AlgorithmError, match=mentions(*pieces)):
            methods_of(write(tmp_path, text))


def test_a_registered_method_is_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfa.algorithms.registry._METHODS", dict(methods()))
    register(Method("anchored", "Anchors without calibration.", (Anchors,)))
    assert component_names(build_algorithm("anchored")) == ["fedavg", "anchors"]
    with pytest.raises(AlgorithmError, match=mentions("'fedfa' exists already")):
        register(Method("fedfa", "Something else.", (Anchors,)))
    fedfa = methods()["fedfa"]
    assert register(fedfa) is fedfa, "the same again is no clash"


# -- options and their errors ---------------------------------------------------------------------------------------
class TestOptionErrors:
    @pytest.mark.parametrize(
        ("algorithm", "pieces"),
        [
            # an unknown option: the key, the nearest spelling, what is allowed
            (
                {"anchors": {"momentun": 0.1}},
                ("algorithm.anchors.momentun", "did you mean 'momentum'", "allowed here: mu, loss, update, momentum"),
            ),
            ({"calibration": {"wen": "step"}}, ("algorithm.calibration.wen", "did you mean 'when'", "when, optimiser")),
            ({"fedavg": {"weight": "uniform"}}, ("algorithm.fedavg.weight", "did you mean 'weighting'", "weighting")),
            # an unknown component
            ({"anchor": {"mu": 1}}, ("algorithm.anchor", "did you mean 'anchors'", "fedavg, anchors, calibration")),
            # an option outside its component
            ({"mu": 1.0}, ("unknown key algorithm.mu", "name, variant", "anchors")),
            ({"varient": "paper"}, ("unknown key algorithm.varient", "did you mean 'variant'")),
            # bad values: the key, the value, what is allowed
            ({"anchors": {"loss": "samples"}}, ("algorithm.anchors.loss = 'samples'", "'sample' or 'class'")),
            ({"anchors": {"momentum": 1.5}}, ("algorithm.anchors.momentum = 1.5", "less than or equal to 1")),
            ({"anchors": {"mu": -1}}, ("algorithm.anchors.mu = -1", "greater than or equal to 0")),
            ({"calibration": {"lr": 0}}, ("algorithm.calibration.lr = 0", "greater than 0")),
            ({"calibration": {"steps": 0}}, ("algorithm.calibration.steps = 0", "greater than or equal to 1")),
            (
                {"variant": "autors"},
                ("algorithm.variant = 'autors'", "did you mean 'authors'", "default, plus, paper, authors"),
            ),
        ],
    )
    def test_names_the_key_and_what_is_allowed(self, algorithm: dict[str, Any], pieces: tuple[str, ...]) -> None:
        with pytest.raises(ConfigError, match=mentions(*pieces)):
            Config.resolve({"algorithm": {"name": "fedfa", **algorithm}})

    @pytest.mark.parametrize(
        ("component", "option", "value", "meant"),
        [("anchors", "loss", "sampel", "sample"), ("calibration", "optimiser", "adm", "adam")],
    )
    def test_a_misspelt_value_is_answered_with_the_nearest(
        self, component: str, option: str, value: str, meant: str
    ) -> None:
        with pytest.raises(ConfigError, match=mentions(f"algorithm.{component}.{option}", f"did you mean '{meant}'")):
            Config.resolve({"algorithm": {"name": "fedfa", component: {option: value}}})

    def test_fedavg_has_no_anchors(self) -> None:
        with pytest.raises(ConfigError, match=mentions("algorithm.anchors", "'fedavg' has no component 'anchors'")):
            Config.resolve({"algorithm": {"name": "fedavg", "anchors": {"mu": 1}}})

    def test_several_mistakes_in_one_component_are_all_reported(self) -> None:
        with pytest.raises(ConfigError) as error:
            build_algorithm("fedfa", {"anchors": {"mu": -1, "momentum": 2}})
        assert "algorithm.anchors.mu" in str(error.value)
        assert "algorithm.anchors.momentum" in str(error.value)


# -- variants -------------------------------------------------------------------------------------------------------
ANCHORS_OF = {
    # variant: loss, class_mean, average, start, absent, weights; calibration optimiser
    "paper": ("sample", "batch", "two-epochs", "zero", "zero", "size", "sgd"),
    "authors": ("class", "batch", "running", "received", "keep", "size", "adam"),
    "default": ("class", "exact", "running", "received", "keep", "size", "adam"),
}


class TestVariants:
    @pytest.mark.parametrize("variant", ANCHORS_OF)
    def test_options_of_fedfa_s_components(self, variant: str) -> None:
        options = Config.resolve({"algorithm": {"name": "fedfa", "variant": variant}}).algorithm.options
        anchors, calibration = options["anchors"], options["calibration"]
        names = ("loss", "class_mean", "average", "start", "absent", "weights")
        assert (*(anchors[name] for name in names), calibration["optimiser"]) == ANCHORS_OF[variant]
        assert (anchors["mu"], anchors["momentum"], anchors["init"], anchors["update"]) == (
            0.1,
            0.5,
            "orthogonal",
            True,
        )
        assert (calibration["when"], calibration["steps"]) == ("step", 1)

    @pytest.mark.parametrize(
        ("algorithm", "variant", "lr_decay", "weight_decay", "normalise", "selection"),
        [
            ("fedfa", "paper", 1.0, 0.001, "dataset", "uniform"),
            ("fedfa", "default", 1.0, 0.001, "dataset", "uniform"),
            ("fedfa", "authors", 0.99, 0.001, "authors", "authors"),
            ("fedavg", "paper", 1.0, 0.001, "dataset", "uniform"),
            ("fedavg", "authors", 0.99, 0.0001, "authors", "authors"),
        ],
    )
    def test_settings_of_the_training(
        self, algorithm: str, variant: str, lr_decay: float, weight_decay: float, normalise: str, selection: str
    ) -> None:
        s = Config.resolve({"algorithm": {"name": algorithm, "variant": variant}})
        assert (s.local.lr, s.local.lr_decay, s.local.weight_decay) == (0.01, lr_decay, weight_decay)
        assert (s.data.normalise, s.cohort.selection) == (normalise, selection)

    @pytest.mark.parametrize("text", ["fedavg+fedfa", "fedfa+fedavg"])
    @pytest.mark.parametrize("variant", ["paper", "authors", "default"])
    def test_naming_fedavg_changes_no_setting(self, text: str, variant: str) -> None:
        """Also not the weight decay, which the authors made smaller for plain FedAvg alone."""
        with_base = Config.resolve({"algorithm": {"name": text, "variant": variant}})
        alone = Config.resolve({"algorithm": {"name": "fedfa", "variant": variant}})
        assert with_base.local == alone.local
        assert with_base.algorithm.options == alone.algorithm.options

    def test_the_default_applies_by_itself_and_is_written_down(self) -> None:
        assert Config.resolve({"algorithm": {"name": "fedfa"}}).algorithm.variant == methods()["fedfa"].default_variant
        assert (
            Config.resolve({"algorithm": {"name": "fedavg"}}).algorithm.variant == methods()["fedavg"].default_variant
        )

    def test_unknown_variant_of_a_method_without_that_one(self) -> None:
        with pytest.raises(ConfigError, match=mentions("algorithm.variant = 'default'", "'fedavg'", "paper, authors")):
            Config.resolve({"algorithm": {"name": "fedavg", "variant": "default"}})

    def test_never_overrides_what_the_user_wrote(self) -> None:
        written = {
            "algorithm": {
                "name": "fedfa", "variant": "authors",
                "anchors": {"loss": "sample", "weights": "count"}, "calibration": {"optimiser": "sgd"},
            },
            "local": {"lr_decay": 1.0, "weight_decay": 0.5},
            "cohort": {"selection": "size"},
        }  # fmt: skip
        s = Config.resolve(written)
        anchors = s.algorithm.options["anchors"]
        assert (anchors["loss"], anchors["weights"], s.algorithm.options["calibration"]["optimiser"]) == (
            "sample", "count", "sgd",
        )  # fmt: skip
        assert (s.local.lr_decay, s.local.weight_decay, s.cohort.selection) == (1.0, 0.5, "size")
        # what the user did not write is still the authors'
        assert (anchors["start"], anchors["class_mean"], s.data.normalise) == ("received", "batch", "authors")

    @pytest.mark.parametrize("variant_first", [True, False])
    def test_whichever_layer_the_variant_stands_in(self, variant_first: bool) -> None:
        """A variant on the command line does not beat a value in the file, nor the other way round."""
        variant, value = {"algorithm": {"variant": "authors"}}, {"local": {"lr_decay": 0.5}}
        layers = (variant, value) if variant_first else (value, variant)
        assert Config.resolve(*layers).local.lr_decay == 0.5

    @pytest.mark.parametrize("variant", ["paper", "authors", "default"])
    def test_complete_settings_read_back_as_themselves(self, variant: str) -> None:
        s = Config.resolve({"algorithm": {"variant": variant, "anchors": {"mu": 0.3}}})
        assert Config.resolve(s.to_dict()) == s

    def test_a_variant_changes_the_algorithm_that_is_built(self) -> None:
        algorithm = Config.resolve({"algorithm": {"variant": "authors"}}).build_algorithm()
        calibration = next(component for component in algorithm.components if component.name == "calibration")
        assert calibration == Calibration(optimiser="adam")
