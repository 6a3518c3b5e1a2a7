"""Equations as the docstrings write them, in plain Unicode, as MathML: browsers render it without a script."""

from __future__ import annotations

import re
from html import escape

_GREEK = "\u0370-\u03ff"
_LETTER = rf"[A-Za-z{_GREEK}∇∂ℓ][\u0300-\u036f]?"
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ᵀ", "0123456789+−T", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+−", strict=True))
_SCRIPT = rf"\{{[^}}]*\}}|[A-Za-z0-9{_GREEK}]+"
_TOKEN = re.compile(
    rf"(?P<space>\s+)|(?P<number>\d+(?:[.,]\d+)*)|(?P<word>[A-Za-z][A-Za-z'’-]*[A-Za-z](?![_^{_GREEK}]))|"
    rf"(?P<letter>{_LETTER})|(?P<sign>.)"
)
_SUFFIX = re.compile(
    rf"(?P<sub>_(?:{_SCRIPT}))|(?P<sup>\^(?:{_SCRIPT}))|(?P<primes>['′]+)|(?P<up>[{''.join(_SUPERSCRIPTS)}]+)|"
    rf"(?P<down>[{''.join(_SUBSCRIPTS)}]+)"
)
_FUNCTIONS = {"cos", "exp", "log", "max", "mean", "min", "normalise", "sign", "sim", "softmax", "KL"}
_INLINE = re.compile(
    rf"(?<![\w`{_GREEK}/])(?P<token>{_LETTER}(?:_(?:{_SCRIPT})|\^(?:{_SCRIPT}))+)(?![\w`(])|(?P<closed>[)‖]\^(?:{_SCRIPT}))"
)


def display(block: str) -> str:
    """Lines of equations as one block of MathML; two or more spaces separate columns.

    Example:
        >>> "<msub><mi>w</mi><mi>t</mi></msub>" in display("w_t = 1")
        True
    """
    rows = [re.split(r"\s{2,}", line.strip()) for line in block.splitlines() if line.strip()]
    cells = ["".join(f"<mtd>{math_row(cell)}</mtd>" for cell in row) for row in rows]
    table = "".join(f"<mtr>{row}</mtr>" for row in cells)
    return (
        '<div class="equation"><math display="block" xmlns="http://www.w3.org/1998/Math/MathML">'
        f'<mtable columnalign="left">{table}</mtable></math></div>'
    )


def inline(text: str) -> str:
    """Text in which letters with subscripts or superscripts, such as ``w_t``, are MathML.

    Example:
        >>> inline("drop_last stays, n_i does not")
        'drop_last stays, <span><math><msub><mi>n</mi><mi>i</mi></msub></math></span> does not'
    """
    # Markdown takes a line that begins with <math> for a block of its own, but not one that begins with <span>.
    made = _INLINE.sub(lambda found: f"<span><math>{math_row(found[0])}</math></span>", text)
    # Browsers break lines beside <math>, and would part ‖ from what it encloses; a word joiner forbids that.
    return re.sub(r"(?<=\S)(?=<span><math>)|(?<=</math></span>)(?=\S)", "&#8288;", made)


def math_row(text: str) -> str:
    """One expression as the content of an ``mrow``."""
    pieces: list[str] = []
    place = 0
    root = False
    while place < len(text):
        found = _TOKEN.match(text, place)
        assert found is not None
        place = found.end()
        if found["space"]:
            continue
        if found[0] == "√":
            root = True
            continue
        base, below, above = _base(found), "", ""
        while suffix := _SUFFIX.match(text, place):
            place = suffix.end()
            if suffix["sub"] or suffix["down"]:
                below += _script(suffix)
            else:
                above += _script(suffix)
        piece = _with_scripts(base, below, above)
        pieces.append(f"<msqrt>{piece}</msqrt>" if root else piece)
        root = False
    return "".join(pieces)


def _base(found: re.Match[str]) -> str:
    text = escape(found[0])
    if found["number"]:
        return f"<mn>{text}</mn>"
    if found["word"]:
        return (
            f'<mi mathvariant="normal">{text}</mi>' if found[0] in _FUNCTIONS else f"<mtext>\u00a0{text}\u00a0</mtext>"
        )
    if found["letter"]:
        return f"<mi>{text}</mi>"
    return f'<mo stretchy="false">{text}</mo>'


def _script(found: re.Match[str]) -> str:
    if found["up"] or found["down"]:
        signs = _SUPERSCRIPTS if found["up"] else _SUBSCRIPTS
        return "".join(math_row(signs[sign]) for sign in found[0])
    if found["primes"]:
        return "<mo>′</mo>"
    inner = found[0][1:].strip("{}")
    if inner.isascii() and inner.isalpha() and len(inner) > 2:
        return f"<mtext>{inner}</mtext>"
    if re.fullmatch(rf"[A-Za-z{_GREEK}]+", inner):  # n_ck has the indices c and k
        return "".join(f"<mi>{letter}</mi>" for letter in inner)
    return math_row(inner)


def _with_scripts(base: str, below: str, above: str) -> str:
    below, above = (f"<mrow>{one}</mrow>" if one.count("</m") > 1 else one for one in (below, above))
    if below and above:
        return f"<msubsup>{base}{below}{above}</msubsup>"
    if below:
        return f"<msub>{base}{below}</msub>"
    return f"<msup>{base}{above}</msup>" if above else base
