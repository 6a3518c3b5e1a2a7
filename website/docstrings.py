"""Docstrings of fedfa as Markdown: roles become code or links, equations MathML."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import griffe

from website import equations

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`~?([^`]+)`")
_COST = re.compile(
    r"(?P<label>Sends (?:per client and round|once)[^:]{0,40}|Server and client (?:state|keep)|Server state|"
    r"Client state|Extra compute[^:]{0,60}|What the server learns[^:]{0,30}): "
)


def without_roles(text: str, link: Callable[[str], str | None] = lambda name: None) -> str:
    """Sphinx roles as code, or as a reference where ``link`` knows the target.

    Example:
        >>> without_roles("See :class:`~fedfa.Experiment`.")
        'See `Experiment`.'
    """

    def replace(found: re.Match[str]) -> str:
        name = found[1]
        shown = f"`{name.rpartition('.')[2] if found[0].split('`')[1].startswith('~') else name}`"
        target = link(name)
        return shown if target is None else f"[{shown}][{target}]"

    return _ROLE.sub(replace, text)


def costs(explanation: str) -> tuple[str, dict[str, str]]:
    """The docstring of a method's file without its account of costs, and that account by label."""
    for paragraph in (paragraphs := explanation.split("\n\n")):
        if _COST.match(paragraph):
            pieces = _COST.split(" ".join(paragraph.split()))[1:]
            labels, texts = pieces[::2], pieces[1::2]
            rest = "\n\n".join(one for one in paragraphs if one is not paragraph)
            return rest, {label: text.strip() for label, text in zip(labels, texts, strict=True)}
    return explanation, {}


def as_markdown(text: str) -> str:
    """A docstring's text as Markdown: indented blocks are equations, letters with subscripts too."""
    blocks = []
    for block in re.split(r"\n\s*\n", without_roles(text)):
        if all(line.startswith("    ") for line in block.splitlines()):
            blocks.append(equations.display(block))
        else:
            blocks.append(inline_markdown(re.sub(r"::$", ":", block)))
    return "\n\n".join(blocks)


def inline_markdown(text: str) -> str:
    """Prose with its equations; what is code stays as it is."""
    pieces = re.split(r"(``.+?``|`[^`]+`)", without_roles(text), flags=re.DOTALL)
    return "".join(
        piece if place % 2 else equations.inline(piece.replace("&", "&amp;").replace("<", "&lt;"))
        for place, piece in enumerate(pieces)
    )


class Roles(griffe.Extension):  # type: ignore[misc, unused-ignore]  # untyped where griffe is missing
    """Lets mkdocstrings show the roles in docstrings as links to the public names, or as code."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite every docstring of the package."""
        public = {name: f"fedfa.{name}" for name in (pkg.exports or ())}

        def link(name: str) -> str | None:
            return public.get(str(name).removeprefix("fedfa."))

        self._rewrite(pkg, link)

    def _rewrite(self, thing: griffe.Object, link: Callable[[str], str | None]) -> None:
        if thing.docstring is not None:
            text = re.sub(r"(?m)^Example:$", "Examples:", thing.docstring.value)  # a section that holds doctests
            thing.docstring.value = without_roles(text, link)
        for member in thing.members.values():
            if isinstance(member, griffe.Object):
                self._rewrite(member, link)
