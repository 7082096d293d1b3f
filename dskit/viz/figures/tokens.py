"""What a model said, token by token."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from dskit.viz.figures.page import SAND, SLATE, Picture, Rows, theme
from dskit.viz.figures.pieces import box, titled, visible, write


def token_strips(rows: Rows, title: str = "What the model said") -> Picture:
    """One strip of tokens per row. Keys: "label"; "tokens", a list of strings. Equal strips say so."""
    if not rows:
        raise ValueError("rows is empty; give at least one strip")
    twins = [[other["tokens"] for other in rows].index(row["tokens"]) for row in rows]  # first equal strip
    same = [f" = row {twin + 1}" if twin < i else "" for i, twin in enumerate(twins)]
    said = (f"{i + 1}, {row['label']}: {''.join(row['tokens'])!r}{same[i]}" for i, row in enumerate(rows))
    height = 0.8 + 0.46 * len(rows)
    picture, axes = titled(9.5, height, title, f"{title}. " + "; ".join(said))
    for i, row in enumerate(rows):
        y = 10 * height - 11 - 4.6 * i
        write(axes, 2, y + 1.5, f"{i + 1}  {row['label']}", fontsize=8.5)
        end = _strip(axes, 14, y, row["tokens"], 70)
        write(axes, end + 1, y + 1.5, same[i], fontsize=8.5, color=theme().faint)
    return picture


def _strip(axes: Axes, x: float, y: float, tokens: Sequence[str], room: float) -> float:
    """Tokens as boxes side by side, as many as fit; returns where the strip ends."""
    start = x
    for i, token in enumerate(tokens):
        label = visible(token)
        width = 0.66 * len(label) + 1.2
        if x + width > start + room - 2:
            write(axes, x + 0.5, y + 1.5, "\u2026")
            return x + 2
        box(axes, x, y, width, 3, (SLATE, SAND)[i % 2], label, family="monospace", fontsize=7.8)
        x += width + 0.25
    return x
