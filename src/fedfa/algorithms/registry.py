"""From an algorithm expression to an algorithm: ``"fedfa+fedadam"``, or the path of a file with your own method."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfa.algorithms import (
    CCVR,
    MOON,
    Anchors,
    Averaging,
    Calibration,
    Centralised,
    Ditto,
    FedACG,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedBN,
    FedDecorr,
    FedDyn,
    FedETF,
    FedExP,
    FedLC,
    FedNH,
    FedNova,
    FedNTD,
    FedProc,
    FedProto,
    FedProx,
    FedRep,
    FedRS,
    FedSAM,
    FedYogi,
    FinalCalibration,
    LocalOnly,
    MatchedAveraging,
    Scaffold,
    TiedAnchors,
    reference_code,
)
from fedfa.algorithms.method import Method
from fedfa.error_messages import nearest
from fedfa.errors import AlgorithmError, ConfigError, describe
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.component import Component, check_defines_something

_COMMON = reference_code.COMMON
_FEDFA = (Anchors, Calibration, FinalCalibration)

BUILT_IN = (
    Method("fedavg", "Federated averaging (McMahan et al. 2017): the weighted mean of the clients' models.", (FedAvg,),
           reference_code.FEDAVG),
    Method("fedfa", "Feature anchors align features and calibrate classifiers (Zhou et al. 2023).", _FEDFA,
           reference_code.FEDFA, "default"),
    Method("fedprox", "FedProx (Li et al. 2020): a proximal term holds local training near the global model.",
           (FedProx,), _COMMON),
    Method("feddyn", "FedDyn (Acar et al. 2021): per-client dual states align the local optima with the global one.",
           (FedDyn,), _COMMON),
    Method("scaffold", "SCAFFOLD (Karimireddy et al. 2020): control variates correct each client's drift.",
           (Scaffold,), _COMMON),
    Method("fednova", "FedNova (Wang et al. 2020): updates normalised by each client's number of steps before "
           "averaging.", (FedNova,), _COMMON),
    Method("matching", "Matched averaging, one step of FedMA (Wang et al. 2020): hidden units are aligned, then "
           "averaged.", (MatchedAveraging,), _COMMON),
    Method("fedavgm", "FedAvgM (Hsu et al. 2019): momentum on the server.", (FedAvgM,), _COMMON),
    Method("fedadagrad", "FedAdagrad (Reddi et al. 2021): Adagrad on the server.", (FedAdagrad,), _COMMON),
    Method("fedadam", "FedAdam (Reddi et al. 2021): Adam on the server.", (FedAdam,), _COMMON),
    Method("fedyogi", "FedYogi (Reddi et al. 2021): Yogi on the server.", (FedYogi,), _COMMON),
    Method("fedlc", "Local logits calibrated by the client's label counts (Zhang et al. 2022).", (FedLC,), _COMMON),
    Method("fedbn", "Normalisation layers stay with the client, the rest is averaged (X. Li et al. 2021).", (FedBN,),
           _COMMON),
    Method("ccvr", "After training of any method, the classifier is calibrated on virtual features (Luo et al. 2021).",
           (CCVR,), _COMMON),
    Method("local", "Local training: each client by itself, nothing is shared; the lower end of comparisons.",
           (LocalOnly,), _COMMON),
    Method("centralised", "Centralised training: all data at one site, as many steps as the cohort would make; the "
           "upper end.", (Centralised,), _COMMON),
    Method("moon", "Features contrasted with those of the global and the previous local model (Li et al. 2021).",
           (MOON,), _COMMON),
    Method("fedproto", "Clients keep their models and exchange class prototypes (Tan et al. 2022).", (FedProto,),
           _COMMON),
    Method("ditto", "Beside the global model, a model of each client's own that is held near it (T. Li et al. 2021).",
           (Ditto,), _COMMON),
    Method("fedrep", "A shared representation and a classifier for each client, trained in turn (Collins et al. 2021).",
           (FedRep,), _COMMON),
    Method("fedproc", "Features contrasted with global class prototypes, less so as rounds pass (Mu et al. 2023).",
           (FedProc,), _COMMON),
    Method("fedetf", "A fixed classifier of equal angles, and a loss balanced by label counts (Li et al. 2023).",
           (FedETF,), _COMMON),
    Method("fednh", "Class prototypes on a sphere are the classifier, moved by the server (Dai et al. 2023).", (FedNH,),
           _COMMON),
    Method("fedntd", "The global model's opinion of the classes a sample does not have is kept (Lee et al. 2022).",
           (FedNTD,), _COMMON),
    Method("fedrs", "Logits of classes that a client lacks are scaled down in its softmax (Li and Zhan 2021).",
           (FedRS,), _COMMON),
    Method("feddecorr", "Features are decorrelated against dimensional collapse (Shi et al. 2023).", (FedDecorr,),
           _COMMON),
    Method("fedsam", "Sharpness-aware local steps towards flat minima (Qu et al. 2022).", (FedSAM,), _COMMON),
    Method("fedacg", "Clients start ahead, where the server's momentum goes (Kim et al. 2024).", (FedACG,), _COMMON),
    Method("fedexp", "FedAvg with a server step that is longer where updates differ (Jhunjhunwala et al. 2023).",
           (FedExP,), _COMMON),
    Method("averaging", "The evaluated model is a moving average over rounds of the trained one (Polyak and Juditsky "
           "1992).", (Averaging,), _COMMON),
    Method("fedfac", "FedFA whose anchors, a simplex, are the classifier; look-ahead and average (this project).",
           (TiedAnchors, FedACG, Averaging), _COMMON),
)  # fmt: skip
"""The methods that come with fedfa, in the order in which they are listed."""

RENAMED = {"fedma": "matching"}
"""Names of earlier releases for methods and components, with the names they have now."""

_METHODS: dict[str, Method] = {method.name: method for method in BUILT_IN}


def methods() -> Mapping[str, Method]:
    """Every known method by name."""
    return dict(_METHODS)


def register(method: Method | type[Component]) -> Method:
    """Make a method or component of your own known, so that algorithm expressions can name it."""
    if isinstance(method, type):
        check_defines_something(method)
        method = Method(method.name, (method.__doc__ or "").partition("\n")[0], (method,))
    if method.name in _METHODS and _METHODS[method.name] != method:
        raise AlgorithmError(f"a method named {method.name!r} exists already; choose another name")
    _METHODS[method.name] = method
    return method


def methods_of(expression: str) -> list[Method]:
    """The methods that an algorithm expression names, in order.

    Raises:
        AlgorithmError: An unknown name; the message has the nearest known one.

    Example:
        >>> [method.name for method in methods_of("fedfa")]
        ['fedfa']
    """
    names = expression_names(expression)
    return [_from_file(Path(name)) if name.endswith(".py") else _known(name) for name in names]


def expression_names(expression: str) -> list[str]:
    """The names and files in an algorithm expression; a ``+`` inside a file's path does not separate.

    Old names become those of today.

    Example:
        >>> expression_names("fedfa+code/c++/pull.py")
        ['fedfa', 'code/c++/pull.py']
    """
    names: list[str] = []
    for piece in expression.split("+"):
        inside_path = bool(names) and any(sign in names[-1] for sign in "/\\") and not names[-1].endswith(".py")
        if inside_path:
            names[-1] += f"+{piece}"
        else:
            names.append(current_name(piece.strip()))
    if not all(names):
        raise AlgorithmError(
            f"{expression!r} is not an algorithm expression: write methods joined by '+', like 'fedfa' or "
            "'fedfa+fedadam'"
        )
    return names


def current_name(name: str) -> str:
    """The present name of a method or component of an earlier release; other names stay.

    Example:
        >>> current_name("fedma"), current_name("fedfa")
        ('matching', 'fedfa')
    """
    return name if name in _METHODS else RENAMED.get(name, name)


def build_algorithm(expression: str, options: Mapping[str, Mapping[str, Any]] | None = None) -> Algorithm:
    """The algorithm of an expression.

    Args:
        expression: Methods joined by ``+``.
        options: Options by component, e.g. ``{"anchors": {"mu": 0.2}}``.

    Raises:
        AlgorithmError: The methods are unknown or cannot be combined.
        ConfigError: An option is unknown or has a bad value.
    """
    return Algorithm(list(build_components(expression, options or {}).values()), title=expression)


def build_components(expression: str, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Component]:
    """The components of an expression by name, with these options and defaults for the rest."""
    types = {kind.name: kind for kind in component_types(methods_of(expression))}
    for name in options:
        if name not in types:
            raise ConfigError(
                f"algorithm.{name}: the algorithm {expression!r} has no component {name!r}{nearest(name, types)}; its "
                f"components are {', '.join(types)}"
            )
    return {name: kind(**options.get(name, {})) for name, kind in types.items()}


def component_types(chosen: Sequence[Method]) -> list[type[Component]]:
    """The components of several methods together; FedAvg aggregates unless a method brings its own aggregation."""
    types: list[type[Component]] = []
    for method in chosen:
        types.extend(kind for kind in method.components if kind not in types)
    if any(kind.traits.aggregates and kind is not FedAvg for kind in types):  # `fedavg+scaffold` means scaffold
        return [kind for kind in types if kind is not FedAvg]
    return types if FedAvg in types else [FedAvg, *types]


def option_names(kind: type[Component]) -> list[str]:
    """Names of a component's options as a config writes them."""
    return [field.alias or name for name, field in kind.model_fields.items()]


def expression_of(algorithm: Algorithm | Component) -> tuple[str, dict[str, dict[str, Any]]]:
    """The expression and the options that describe an algorithm object; its unknown components become known.

    Example:
        >>> expression_of(FedProx(mu=0.2) + FedAdam())[0]
        'fedprox+fedadam'
    """
    components = algorithm.components if isinstance(algorithm, Algorithm) else [algorithm]
    kinds = [type(component) for component in components]
    given, names = set(kinds), list[str]()
    while kinds:
        whole = [m for m in _METHODS.values() if kinds[0] in m.components and set(m.components) <= given]
        # In the order of the components where possible, then the largest.
        found = max(whole, key=lambda m: (_begins(kinds, m.components), len(m.components)), default=None)
        if found is None:
            kind = kinds[0]
            check_defines_something(kind)
            known = _METHODS.get(kind.name)
            if known is not None and known.components != (kind,) and known in BUILT_IN:
                raise AlgorithmError(
                    f"component {kind.__name__!r} is named {kind.name!r}, which is a method of fedfa; give it another "
                    "`name`"
                )
            # A class that is defined again (a notebook cell run twice) replaces the one before.
            found = _METHODS[kind.name] = Method(kind.name, (kind.__doc__ or "").partition("\n")[0], (kind,))
        names.append(found.name)
        kinds = [kind for kind in kinds if kind not in found.components]
    options = {c.name: c.model_dump(mode="json", by_alias=True, exclude_none=True) for c in components}
    return "+".join(names), {name: values for name, values in options.items() if values}


def _begins(kinds: Sequence[type[Component]], with_those: Sequence[type[Component]]) -> bool:
    return tuple(kinds[: len(with_those)]) == tuple(with_those)


def _known(name: str) -> Method:
    if name not in _METHODS:
        raise AlgorithmError(
            f"unknown method {name!r}{nearest(name, _METHODS)}; known: {', '.join(sorted(_METHODS))}. A component of "
            "your own: name its .py file, or in Python call fedfa.register(Mine) or fedfa.load(path, algorithm=Mine())"
        )
    return _METHODS[name]


_FILES: dict[tuple[Path, int], Method] = {}
"""Methods read from files, by path and time of change: an edited file is read again."""


def _from_file(path: Path) -> Method:
    """The method defined in a Python file: its ``Method`` object, or one made of the components it defines."""
    path = path.resolve()
    if not path.is_file():
        raise AlgorithmError(f"there is no file {path}; an algorithm ending in .py names a Python file")
    key = (path, path.stat().st_mtime_ns)
    if key in _FILES:
        return _FILES[key]
    unique = hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()
    spec = importlib.util.spec_from_file_location(f"fedfa_method_{path.stem}_{unique}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # pydantic and dataclasses look their module up while it is made
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module.__name__]
        raise AlgorithmError(f"{path} cannot be imported: {describe(error)}") from error
    imported = list(_METHODS.values())
    found = [value for value in vars(module).values() if isinstance(value, Method) and value not in imported]
    if not found:
        components = tuple(
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, Component) and value.__module__ == module.__name__
        )
        for kind in components:
            check_defines_something(kind)
        summary = (module.__doc__ or "").strip().partition("\n")[0]
        found = [Method(path.stem, summary, components)] if components else []
    if len(found) != 1:
        raise AlgorithmError(f"{path} must define one Method, or Component classes; found {len(found)} methods")
    _FILES[key] = found[0]
    return found[0]
