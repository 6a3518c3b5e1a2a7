"""From a recipe's text and a user's options to parts: what fits together, and what every mistake is told."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from fedfa.algorithms.fedavg import FEDAVG, Averaging
from fedfa.algorithms.fedfa import FEDFA, Anchors, Calibration
from fedfa.algorithms.method import Method
from fedfa.algorithms.registry import build_recipe, methods, methods_of, register
from fedfa.errors import RecipeError, SettingsError
from fedfa.learning.part import Part
from fedfa.learning.recipe import Recipe
from fedfa.studies.settings import Settings
from tests.algorithms.toy import Runner, toy_samples, toy_settings


def part_names(recipe: Recipe) -> list[str]:
    return [part.name for part in recipe.parts]


def mentions(*pieces: str) -> str:
    """A pattern: these pieces, in this order."""
    return "(?s)" + ".*".join(re.escape(piece) for piece in pieces)


# -- composition ----------------------------------------------------------------------------------------------------
class TestComposition:
    def test_the_methods(self) -> None:
        assert {"fedavg", "fedfa"} <= methods().keys()
        assert part_names(build_recipe("fedavg")) == ["fedavg"]
        assert part_names(build_recipe("fedfa")) == ["fedavg", "anchors", "calibration", "final"]

    @pytest.mark.parametrize("text", ["fedavg+fedfa", "fedfa+fedavg", " fedavg + fedfa ", "fedfa+fedfa"])
    def test_naming_the_base_or_a_method_again_changes_nothing(self, text: str) -> None:
        assert part_names(build_recipe(text)) == part_names(build_recipe("fedfa"))

    def test_the_title_is_how_it_was_asked_for(self) -> None:
        assert build_recipe("fedavg+fedfa").title == "fedavg+fedfa"

    @pytest.mark.parametrize(
        ("text", "pieces"),
        [
            ("fedaf", ("unknown method 'fedaf'", "did you mean 'fedfa'", "fedavg", "fedfa")),
            ("fedfa+fedavgg", ("unknown method 'fedavgg'", "did you mean 'fedavg'")),
            ("zzz", ("unknown method 'zzz'", "known: ")),
        ],
    )
    def test_unknown_method(self, text: str, pieces: tuple[str, ...]) -> None:
        with pytest.raises(RecipeError, match=mentions(*pieces)):
            build_recipe(text)

    def test_no_far_fetched_spelling(self) -> None:
        with pytest.raises(RecipeError) as error:
            build_recipe("zzz")
        assert "did you mean" not in str(error.value)

    @pytest.mark.parametrize("text", ["", "fedfa+", "+fedfa", "fedfa++fedavg"])
    def test_not_a_list_of_methods(self, text: str) -> None:
        with pytest.raises(RecipeError, match="joined by '\\+'"):
            build_recipe(text)

    def test_part_twice(self) -> None:
        with pytest.raises(RecipeError, match=mentions("'mine'", "part 'anchors' twice")):
            Recipe([Averaging(), Anchors(), Anchors()], title="mine")

    @pytest.mark.parametrize("parts", [(Averaging, Calibration), (Averaging, Calibration, Anchors)])
    def test_requirement_missing_or_too_late(self, parts: tuple[type[Part[Any]], ...]) -> None:
        with pytest.raises(RecipeError, match=mentions("part 'calibration' works on 'anchors'", "no earlier part")):
            Recipe([part() for part in parts])

    def test_no_base(self) -> None:
        with pytest.raises(RecipeError, match=mentions("exactly one part", "none")):
            Recipe([Anchors()])

    def test_two_bases(self) -> None:
        class Other(Averaging):
            name = "other"

        with pytest.raises(RecipeError, match=mentions("exactly one part", "fedavg, other")):
            Recipe([Averaging(), Other()])

    def test_the_base_comes_first(self) -> None:
        assert part_names(Recipe([Anchors(), Averaging(), Calibration()])) == ["fedavg", "anchors", "calibration"]

    def test_hooks_are_those_that_a_part_defines(self) -> None:
        recipe = build_recipe("fedfa")
        assert [hook.__self__.name for hook in recipe.hooks("loss")] == ["anchors"]  # type: ignore[attr-defined]  # hooks are bound methods
        assert recipe.hooks("logits") == []
        assert build_recipe("fedavg").hooks("loss") == []


# -- methods of a user's own ----------------------------------------------------------------------------------------
WITH_PARTS = '''
    """Half steps: the server goes half of the way."""
    from fedfa.learning.part import Options, Part, ServerStep

    class HalfOptions(Options):
        share: float = 0.5

    class Half(Part[HalfOptions]):
        name = "half"
        options_type = HalfOptions

        def step(self, server: ServerStep) -> None:
            server.update = {name: self.options.share * value for name, value in server.update.items()}
'''
WITH_METHOD = (
    WITH_PARTS
    + """
    from fedfa.algorithms.method import Method

    MINE = Method("halfway", "Half steps.", (Half,), {"small": {"algorithm.half.share": 0.1}}, "small")
"""
)
WITH_LATE_ANNOTATIONS = """
    from __future__ import annotations
    from dataclasses import dataclass
    from typing import Literal
    from fedfa.learning.part import Options, Part

    @dataclass
    class Note:
        text: str | None = None

    class PoliteOptions(Options):
        tone: Literal["kind", "very kind"] = "kind"

    class Polite(Part[PoliteOptions]):
        name = "polite"
        options_type = PoliteOptions
"""
BUILT_ON_FEDFA = """
    from fedfa.algorithms.fedfa import FEDFA
    from fedfa.learning.part import Options, Part

    class Mine(Part[Options]):
        name = "mine"
        requires = tuple(part.name for part in FEDFA.parts)
"""


def write(folder: Path, text: str, name: str = "halves.py") -> str:
    path = folder / name
    path.write_text(dedent(text), encoding="utf-8")
    return str(path)


class TestOwnFile:
    def test_parts_alone_make_a_method(self, tmp_path: Path) -> None:
        path = write(tmp_path, WITH_PARTS)
        (method,) = methods_of(path)
        assert (method.name, method.summary) == ("halves", "Half steps: the server goes half of the way.")
        assert part_names(build_recipe(path)) == ["fedavg", "half"]
        assert part_names(build_recipe(f"fedfa+{path}")) == ["fedavg", "anchors", "calibration", "final", "half"]

    def test_it_takes_part_in_a_round(self, tmp_path: Path) -> None:
        """Half of FedAvg's change, exactly."""
        plain, half = (
            Runner(toy_settings({"recipe": recipe}), toy_samples(1))
            for recipe in ("fedavg", write(tmp_path, WITH_PARTS))
        )
        start = plain.state.model
        full, halved = plain.play().model, half.play().model
        for name, value in start.items():
            assert ((halved[name] - value) * 2 - (full[name] - value)).abs().max() < 1e-14

    def test_a_method_with_variants(self, tmp_path: Path) -> None:
        path = write(tmp_path, WITH_METHOD)
        (method,) = methods_of(path)
        assert method.name == "halfway"
        settings = Settings.resolve({"algorithm": {"recipe": path}})
        assert settings.algorithm.variant == "small"
        assert settings.algorithm.options["half"] == {"share": 0.1}

    def test_options_of_its_parts_are_checked(self, tmp_path: Path) -> None:
        with pytest.raises(SettingsError, match=mentions("algorithm.half.shar", "did you mean 'share'")):
            build_recipe(write(tmp_path, WITH_PARTS), {"half": {"shar": 0.1}})

    def test_a_file_may_use_late_annotations(self, tmp_path: Path) -> None:
        """Dataclasses and pydantic look a class's module up by name; files of the project's own style must work."""
        recipe = build_recipe(write(tmp_path, WITH_LATE_ANNOTATIONS), {"polite": {"tone": "very kind"}})
        assert recipe.parts[1].options.tone == "very kind"

    def test_its_explanation_is_its_text(self, tmp_path: Path) -> None:
        (method,) = methods_of(write(tmp_path, WITH_PARTS))
        assert method.explanation().startswith("Half steps")

    def test_a_file_that_imports_a_known_method_is_not_that_method(self, tmp_path: Path) -> None:
        (method,) = methods_of(write(tmp_path, BUILT_ON_FEDFA))
        assert [part.name for part in method.parts] == ["mine"]

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(RecipeError, match=mentions("no file", "nothing.py")):
            methods_of(str(tmp_path / "nothing.py"))

    @pytest.mark.parametrize(
        ("text", "pieces"),
        [
            ("x = 1", ("halves.py must define one Method, or Part classes", "found 0")),
            ("1 / 0", ("halves.py cannot be imported", "ZeroDivisionError")),
            ("def (", ("halves.py cannot be imported", "SyntaxError")),
        ],
    )
    def test_of_no_use(self, tmp_path: Path, text: str, pieces: tuple[str, ...]) -> None:
        with pytest.raises(RecipeError, match=mentions(*pieces)):
            methods_of(write(tmp_path, text))


def test_a_registered_method_is_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfa.algorithms.registry._METHODS", dict(methods()))
    register(Method("anchored", "Anchors without calibration.", (Anchors,)))
    assert part_names(build_recipe("anchored")) == ["fedavg", "anchors"]
    with pytest.raises(RecipeError, match=mentions("'fedfa' exists already")):
        register(Method("fedfa", "Something else.", (Anchors,)))
    assert register(FEDFA) is FEDFA, "the same again is no clash"


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
            # an unknown part
            ({"anchor": {"mu": 1}}, ("algorithm.anchor", "did you mean 'anchors'", "fedavg, anchors, calibration")),
            # an option outside its part
            ({"mu": 1.0}, ("unknown key algorithm.mu", "recipe, variant", "anchors")),
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
        with pytest.raises(SettingsError, match=mentions(*pieces)):
            Settings.resolve({"algorithm": {"recipe": "fedfa", **algorithm}})

    @pytest.mark.parametrize(
        ("part", "option", "value", "meant"),
        [("anchors", "loss", "sampel", "sample"), ("calibration", "optimiser", "adm", "adam")],
    )
    def test_a_misspelt_value_is_told_the_nearest(self, part: str, option: str, value: str, meant: str) -> None:
        with pytest.raises(SettingsError, match=mentions(f"algorithm.{part}.{option}", f"did you mean '{meant}'")):
            Settings.resolve({"algorithm": {"recipe": "fedfa", part: {option: value}}})

    def test_fedavg_has_no_anchors(self) -> None:
        with pytest.raises(SettingsError, match=mentions("algorithm.anchors", "'fedavg' has no part 'anchors'")):
            Settings.resolve({"algorithm": {"recipe": "fedavg", "anchors": {"mu": 1}}})

    def test_several_mistakes_in_one_part_are_all_told(self) -> None:
        with pytest.raises(SettingsError) as error:
            build_recipe("fedfa", {"anchors": {"mu": -1, "momentum": 2}})
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
    def test_fedfa_s_switches(self, variant: str) -> None:
        options = Settings.resolve({"algorithm": {"recipe": "fedfa", "variant": variant}}).algorithm.options
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
        ("recipe", "variant", "lr_decay", "weight_decay", "normalise", "selection"),
        [
            ("fedfa", "paper", 1.0, 0.001, "dataset", "uniform"),
            ("fedfa", "default", 1.0, 0.001, "dataset", "uniform"),
            ("fedfa", "authors", 0.99, 0.001, "authors", "authors"),
            ("fedavg", "paper", 1.0, 0.001, "dataset", "uniform"),
            ("fedavg", "authors", 0.99, 0.0001, "authors", "authors"),
        ],
    )
    def test_training(
        self, recipe: str, variant: str, lr_decay: float, weight_decay: float, normalise: str, selection: str
    ) -> None:
        s = Settings.resolve({"algorithm": {"recipe": recipe, "variant": variant}})
        assert (s.local.lr, s.local.lr_decay, s.local.weight_decay) == (0.01, lr_decay, weight_decay)
        assert (s.data.normalise, s.cohort.selection) == (normalise, selection)

    @pytest.mark.parametrize("text", ["fedavg+fedfa", "fedfa+fedavg"])
    @pytest.mark.parametrize("variant", ["paper", "authors", "default"])
    def test_naming_the_base_changes_no_setting(self, text: str, variant: str) -> None:
        """Also not the weight decay, which the authors made smaller for plain FedAvg alone."""
        with_base = Settings.resolve({"algorithm": {"recipe": text, "variant": variant}})
        alone = Settings.resolve({"algorithm": {"recipe": "fedfa", "variant": variant}})
        assert with_base.local == alone.local
        assert with_base.algorithm.options == alone.algorithm.options

    def test_the_default_applies_by_itself_and_is_written_down(self) -> None:
        assert Settings.resolve({"algorithm": {"recipe": "fedfa"}}).algorithm.variant == FEDFA.default_variant
        assert Settings.resolve({"algorithm": {"recipe": "fedavg"}}).algorithm.variant == FEDAVG.default_variant

    def test_unknown_variant_of_a_method_without_that_one(self) -> None:
        with pytest.raises(
            SettingsError, match=mentions("algorithm.variant = 'default'", "'fedavg'", "paper, authors")
        ):
            Settings.resolve({"algorithm": {"recipe": "fedavg", "variant": "default"}})

    def test_never_overrides_what_the_user_wrote(self) -> None:
        written = {
            "algorithm": {
                "recipe": "fedfa", "variant": "authors",
                "anchors": {"loss": "sample", "weights": "count"}, "calibration": {"optimiser": "sgd"},
            },
            "local": {"lr_decay": 1.0, "weight_decay": 0.5},
            "cohort": {"selection": "size"},
        }  # fmt: skip
        s = Settings.resolve(written)
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
        assert Settings.resolve(*layers).local.lr_decay == 0.5

    @pytest.mark.parametrize("variant", ["paper", "authors", "default"])
    def test_complete_settings_read_back_as_themselves(self, variant: str) -> None:
        s = Settings.resolve({"algorithm": {"variant": variant, "anchors": {"mu": 0.3}}})
        assert Settings.resolve(s.to_dict()) == s

    def test_a_variant_changes_the_recipe_that_is_built(self) -> None:
        recipe = Settings.resolve({"algorithm": {"variant": "authors"}}).recipe()
        calibration = next(part for part in recipe.parts if part.name == "calibration")
        assert calibration.options.optimiser == "adam"
