"""What attention leaves in memory, as bars to scale."""

from __future__ import annotations

from matplotlib.axes import Axes

from dskit.viz.figures.page import SAND, SLATE, YELLOW, Picture, Rows, theme
from dskit.viz.figures.pieces import titled, write


def memory_bars(rows: Rows, title: str = "Bytes that one token leaves in one layer") -> Picture:
    """Bars to scale. Keys: "what"; "bytes"; "vectors", how many equal parts a bar is divided into."""
    if not rows:
        raise ValueError("rows is empty; give at least one bar")
    largest = max(rows, key=lambda row: row["bytes"])
    alt = f"{title}. " + "; ".join(
        f"{row['what']}: {row['bytes']:,} bytes in {row['vectors']} vector{'s' * (row['vectors'] > 1)}"
        for row in rows
    )
    height = 0.85 + 0.72 * len(rows)
    picture, axes = titled(9.5, height, title, alt)
    for i, row in enumerate(rows):
        y = 10 * height - 10.5 - 7.2 * i
        length = 70 * row["bytes"] / largest["bytes"]
        _cells(axes, 3, y - 3.6, length, row["vectors"])
        times = largest["bytes"] / row["bytes"]
        fewer = "" if times == 1 else f"  ({times:,.0f} times less)"
        write(axes, 3, y + 1.4, row["what"], fontsize=9)
        write(axes, 4.2 + length, y - 1.9, f"{row['bytes']:,} bytes{fewer}", fontsize=9)
    return picture


def _cells(axes: Axes, x: float, y: float, width: float, count: int) -> None:
    """A bar of `count` cells, keys and values in turn; a single cell is both at once."""
    gap = 0.18 if width / count > 0.6 else 0.0
    each = width / count
    fills = [YELLOW] if count == 1 else [SLATE, SAND]
    starts = [x + i * each for i in range(count)]
    outline = theme().ink if count == 1 else "none"
    axes.bar(
        starts,
        3.4,
        each - gap,
        y,
        align="edge",
        color=[fills[i % len(fills)] for i in range(count)],
        edgecolor=outline,
        linewidth=0.5,
        zorder=3,
    )
