"""Format tables as Markdown, LaTeX or CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

Cells = Sequence[str]


def markdown_table(header: Cells, rows: Sequence[Cells]) -> str:
    """Format rows as a Markdown table; all columns but the first are right-aligned.

    Example:
        >>> print(markdown_table(["a", "b"], [["x", "1"]]))
        | a | b |
        |:--|--:|
        | x | 1 |
    """
    marks = "|:--|" + "--:|" * (len(header) - 1)
    return "\n".join(["| " + " | ".join(header) + " |", marks, *("| " + " | ".join(row) + " |" for row in rows)])


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "α": r"$\alpha$", "λ": r"$\lambda$", "–": "--",
    "±": r"$\pm$", "▲": r"$\blacktriangle$", "▼": r"$\blacktriangledown$", "−": "$-$", "·": r"$\cdot$",
}  # fmt: skip
_SPECIAL = re.compile("|".join(re.escape(sign) for sign in _LATEX))


def latex_text(text: str) -> str:
    r"""Escape the special characters of LaTeX.

    Example:
        >>> print(latex_text("#C = 2, α = 0.1"))
        \#C = 2, $\alpha$ = 0.1
    """
    return _SPECIAL.sub(lambda found: _LATEX[found.group()], text)


def latex_table(header: Cells, rows: Sequence[Cells]) -> str:
    """Format rows as a LaTeX tabular (packages booktabs and amssymb)."""

    def line(cells: Cells) -> str:
        return " & ".join(latex_text(cell) for cell in cells) + r" \\"

    return "\n".join(
        [
            rf"\begin{{tabular}}{{@{{}}l{'r' * (len(header) - 1)}@{{}}}}",
            r"\toprule",
            line(header),
            r"\midrule",
            *(line(row) for row in rows),
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


def csv_table(header: Cells, rows: Sequence[Cells]) -> str:
    """Format rows as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")
