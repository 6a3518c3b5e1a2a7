"""Colours by role, for the light and the dark theme; files use the light one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

LIGHT: Mapping[str, str] = {
    "page": "#f5f6f8", "code": "#f1f3f5", "link": "#0b57a4",
    "surface": "#ffffff", "ink": "#1b1f24", "muted": "#5b636d", "grid": "#e3e6ea", "faint": "#c3c9d0",
    "s0": "#af2d00", "s1": "#124597", "s2": "#227f4e", "s3": "#d05198",
    "s4": "#c28704", "s5": "#009cee", "s6": "#400054", "s7": "#4e4353",
    "q0": "#eef3f8", "q1": "#d8e5f1", "q2": "#bcd3e7", "q3": "#98bcda", "q4": "#6fa1cb",
    "q5": "#4884b8", "q6": "#2a669d", "q7": "#164a7c", "q8": "#0a2f57",
    "d0": "#8a3208", "d1": "#bd5a24", "d2": "#dd9468", "d3": "#f0cbb4", "d4": "#f3f4f5",
    "d5": "#bcd3e7", "d6": "#7ba9d0", "d7": "#3a76ab", "d8": "#124a80",
}  # fmt: skip
DARK: Mapping[str, str] = {
    "page": "#101216", "code": "#22262c", "link": "#8ab8f0",
    "surface": "#181b20", "ink": "#e8eaed", "muted": "#a3abb5", "grid": "#2c3138", "faint": "#4b535d",
    "s0": "#eb7013", "s1": "#4472bd", "s2": "#38b575", "s3": "#f48aba",
    "s4": "#f0dc46", "s5": "#98e5ff", "s6": "#a150ff", "s7": "#737674",
    "q0": "#1f262e", "q1": "#22364a", "q2": "#264a6b", "q3": "#2f628f", "q4": "#3d7db1",
    "q5": "#5998cc", "q6": "#80b4df", "q7": "#aed0ed", "q8": "#e0eefa",
    "d0": "#f5b48b", "d1": "#df8a54", "d2": "#b1602d", "d3": "#6e401f", "d4": "#2a2e34",
    "d5": "#29496a", "d6": "#33699c", "d7": "#5797cc", "d8": "#a5cdf0",
}  # fmt: skip
"""``s``: series. Any two differ by at least 20 in CIELAB for full colour vision and for the three forms of colour
blindness, and each has a contrast of at least 3:1 to the surface. ``q``: sequential scale. ``d``: diverging scale."""

SERIES = 8
"""Number of series colours; further series repeat them with another dash."""
STEPS = 9
"""Number of steps of the scales ``q`` and ``d``."""
_DASHES: tuple[tuple[float, ...], ...] = ((), (7, 3), (2, 2.5), (9, 3, 2, 3))


@dataclass(frozen=True)
class Style:
    """Colour and dash of a series, the same in every chart of a page."""

    colour: str
    dash: tuple[float, ...] = ()


def style(number: int) -> Style:
    """Style of the series with a number; the first 32 all differ."""
    return Style(f"s{number % SERIES}", _DASHES[number // SERIES % len(_DASHES)])


def styles(names: Iterable[str]) -> dict[str, Style]:
    """A style for each name: FedFA always has the first, FedAvg the second, the others follow in alphabetical order.

    Of several names that begin so (``fedfa-plus``), the alphabetically first has it.

    Example:
        >>> [(name, style.colour) for name, style in styles(["scaffold", "fedavg", "moon"]).items()]
        [('fedavg', 's1'), ('moon', 's2'), ('scaffold', 's3')]
    """
    ordered = sorted(set(names))
    numbers: dict[str, int] = {}
    for number, family in enumerate(("fedfa", "fedavg")):
        heads = [name for name in ordered if re.split(r"[-+@]", name)[0] == family]
        if heads:
            numbers[heads[0]] = number
    others = [name for name in ordered if name not in numbers]
    numbers |= {name: place + 2 for place, name in enumerate(others)}
    return {name: style(numbers[name]) for name in sorted(numbers, key=lambda name: numbers[name])}


def step_role(scale: str, share: float) -> str:
    """Colour role on a scale for a share between 0 and 1.

    Example:
        >>> step_role("q", 0.0), step_role("q", 0.5), step_role("d", 1.0)
        ('q0', 'q4', 'd8')
    """
    return f"{scale}{min(STEPS - 1, max(0, int(share * STEPS)))}"


def css() -> str:
    """The roles as CSS variables: theme of the system or of the reader's choice on screen, light in print."""

    def block(colours: Mapping[str, str]) -> str:
        return "".join(f"--{role}:{value};" for role, value in colours.items())

    dark = f"{{color-scheme:dark;{block(DARK)}}}"
    return (
        f":root{{color-scheme:light;{block(LIGHT)}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){dark}}}\n"
        f"@media screen{{:root[data-theme=dark]{dark}}}\n"
    )
