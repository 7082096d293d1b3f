"""Residual streams: how a sublayer reads and writes them, and the matrices that mix them in between."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from dskit.viz.figures.page import SAND, SLATE, STONE, YELLOW, Picture, Rows, theme
from dskit.viz.figures.pieces import box, heat, on, titled, write

SPELLED_OUT = 8  # streams of a matrix whose values are written into its cells


def stream_flow(rows: Rows, title: str = "From streams to streams", inside: str = "sublayer") -> Picture:
    """The way of N streams past a sublayer; lines are as wide as their weights.

    Keys, one row per stream: "read" and "write" (its weights), "mix" (what it passes on to each stream).
    """
    if not rows:
        raise ValueError("rows is empty; give at least one stream")
    count = len(rows)
    height = 2.6 + 0.62 * count
    picture, axes = titled(9.5, height, title, f"{title}. {_say_flow(rows, inside)}")
    left, right, top, y = 24.0, 71.0, 10 * height - 12, 3.0
    at = [top - 6.2 * i for i in range(count)]
    box(axes, 39, y, 17, 6, YELLOW, inside, fontsize=9)
    for j, row in enumerate(rows):
        for k, share in enumerate(row["mix"]):
            _flow(axes, (left, at[j]), (right, at[k]), share, STONE)
        _flow(axes, (left, at[j]), (39, y + 3), row["read"], SAND)
        _flow(axes, (56, y + 3), (right, at[j]), row["write"], SAND)
        for x in (left, right):
            box(axes, x - 1.6, at[j] - 1.4, 3.2, 2.8, SLATE, str(j), fontsize=8)
        write(axes, left - 3, at[j], f"read {row['read']:.2f}", ha="right", fontsize=8)
        write(axes, right + 3, at[j], f"write {row['write']:.2f}, keeps {row['mix'][j]:.2f}", fontsize=8)
    write(axes, left, 10 * height - 8, "streams before", ha="center", fontsize=8.5)
    write(axes, right, 10 * height - 8, "streams after", ha="center", fontsize=8.5)
    return picture


def _flow(axes: Axes, start: tuple[float, float], end: tuple[float, float], weight: float, fill: str) -> None:
    """A line as wide as a weight, unless that is next to nothing."""
    if weight >= 0.005:
        (x0, y0), (x1, y1) = start, end
        axes.plot([x0, x1], [y0, y1], color=fill, linewidth=5 * weight, alpha=0.85, zorder=2)


def _say_flow(rows: Rows, inside: str) -> str:
    reads = ", ".join(f"{row['read']:.2f}" for row in rows)
    writes = ", ".join(f"{row['write']:.2f}" for row in rows)
    keeps = ", ".join(f"{row['mix'][j]:.2f}" for j, row in enumerate(rows))
    return f"{len(rows)} streams. {inside} reads them with {reads}, writes with {writes}; they keep {keeps}."


# ---- matrices --------------------------------------------------------------------------------------------


def mixing_matrices(rows: Rows, title: str = "Mixing matrices") -> Picture:
    """Square matrices side by side, four to a line.

    Keys: "what"; "matrix"; "sums": whether its sums should be one. If so, they stand in the margins, and
    below how far the worst is from one.
    """
    if not rows:
        raise ValueError("rows is empty; give at least one matrix")
    lines = -(-len(rows) // 4)
    height = 1.0 + 2.9 * lines
    picture, axes = titled(9.5, height, title, f"{title}. " + "; ".join(map(_say_matrix, rows)))
    for i, row in enumerate(rows):
        x, y = 3 + 23.2 * (i % 4), 10 * height - 30 - 29 * (i // 4)
        write(axes, x, y + 20.4, row["what"], fontsize=8.5)
        _matrix(picture, axes, x, y, np.asarray(row["matrix"], dtype=float), row["sums"])
    return picture


def _matrix(picture: Picture, axes: Axes, x: float, y: float, values: np.ndarray, sums: bool) -> None:
    """One matrix in a square of 17 units, with its sums around it."""
    count, side = len(values), 17.0
    low, high = (0, 1) if sums else (values.min(), values.max())
    inner = heat(picture, (x, y + 1.5, side, side), values, vmin=low, vmax=high)
    for (j, k), value in np.ndenumerate(values):
        if count <= SPELLED_OUT:
            ink = on(to_hex(inner.images[0].to_rgba(value)))
            size = min(8, 34 / count)
            inner.text(k, j, f"{value:.2f}", ha="center", va="center_baseline", fontsize=size, color=ink)
    if not sums:
        return
    cell = side / count
    small = {"fontsize": min(7, 32 / count), "color": theme().faint}
    for i in range(count):
        write(axes, x + side + 0.6, y + 1.5 + side - (i + 0.5) * cell, f"{values[i].sum():.2f}", **small)
        write(axes, x + (i + 0.5) * cell, y + 0.3, f"{values[:, i].sum():.2f}", ha="center", **small)
    write(axes, x, y - 2.2, f"off by {unevenness(values):.2g}", fontsize=8.5)


def unevenness(values: np.ndarray) -> float:
    """How far the worst sum of a row or column is from one."""
    return float(max(np.abs(values.sum(axis) - 1).max() for axis in (0, 1)))


def _say_matrix(row: dict) -> str:
    values = np.asarray(row["matrix"], dtype=float)
    size = f"{row['what']}: {len(values)} by {len(values)}, from {values.min():.2f} to {values.max():.2f}"
    if not row["sums"]:
        return size
    diagonal = values.diagonal().mean()
    return f"{size}, {diagonal:.2f} on the diagonal on average, sums off by {unevenness(values):.2g} at most"
