"""How fast kernels are, beside what the machine could do."""

from __future__ import annotations

from textwrap import shorten
from typing import Any

from matplotlib.axes import Axes

from dskit.viz.figures.page import BLUE, SAND, Picture, Rows, canvas, theme
from dskit.viz.figures.pieces import box, write


def floor_shares(rows: Rows, title: str = "Share of the floor that each kernel reaches") -> Picture:
    """One bar per op, from nothing to its floor, with a diamond where the fastest peer stands.

    Keys: "what", "shape"; "share", "us" (None: not measured); "peer", "peer_share" (None: no peer).
    """
    if not rows:
        raise ValueError("rows is empty; give at least one op")
    height = 1.2 + 0.42 * len(rows)
    picture, axes = canvas(10, height, f"{title}. " + "; ".join(map(_say_share, rows)))
    write(axes, 2, 10 * height - 4, title, fontsize=12, fontweight="bold")
    left, full, top = 24.0, 40.0, 10 * height - 8.0
    _floor_scale(axes, left, full, top, 4.2 * len(rows))
    for i, row in enumerate(rows):
        y = top - 3.6 - 4.2 * i
        write(axes, left - 1, y + 0.7, row["what"], ha="right", fontsize=9)
        shape = shorten(row["shape"], 46, placeholder=" ...")
        write(axes, left - 1, y - 1.0, shape, ha="right", fontsize=6.8, color=theme().faint)
        _floor_bar(axes, left, full, y, row)
    return picture


def _floor_scale(axes: Axes, left: float, full: float, top: float, depth: float) -> None:
    """Thin lines at quarters of the floor, their percentages above, and what the marks mean below."""
    for quarter in range(5):
        x = left + full * quarter / 4
        axes.plot([x, x], [top - 0.8, top - 1 - depth], color=theme().faint, linewidth=0.5, zorder=1)
        write(axes, x, top + 0.4, f"{25 * quarter} %", ha="center", fontsize=7.5, color=theme().faint)
    y = top - 2.6 - depth
    box(axes, left, y - 0.7, 3, 1.4, SAND)
    write(axes, left + 3.8, y, "this kernel", fontsize=7.5)
    _diamond(axes, left + 15, y)
    write(axes, left + 16.6, y, "fastest public peer in the same run", fontsize=7.5)


def _floor_bar(axes: Axes, left: float, full: float, y: float, row: dict[str, Any]) -> None:
    """A bar, the peer's diamond, and both in words; or "not measured"."""
    end = left + full
    if row["share"] is None:
        write(axes, left + 1, y, "not measured", fontsize=8, color=theme().faint)
        return
    width = full * min(row["share"], 1.15)
    axes.barh(y, width, 2.5, left=left, color=SAND, zorder=2)
    alone = row["peer_share"] is None
    write(axes, end + 7, y + (0 if alone else 0.7), f"{row['us']:.1f} us, {row['share']:.0%}", fontsize=8)
    if not alone:
        _diamond(axes, left + full * min(row["peer_share"], 1.15), y)
        said = f"{row['peer']} {row['peer_share']:.0%}"
        write(axes, end + 7, y - 1.0, said, fontsize=6.8, color=theme().faint)


def _diamond(axes: Axes, x: float, y: float) -> None:
    """A mark that stands out on a bar and on the page."""
    axes.plot([x], [y], "D", color=BLUE, markeredgecolor="#ffffff", markeredgewidth=0.9, markersize=6.5,
              zorder=5)


def _say_share(row: dict[str, Any]) -> str:
    """One bar in words."""
    if row["share"] is None:
        return f"{row['what']} at {row['shape']}: not measured"
    said = f"{row['what']} at {row['shape']}: {row['us']:.1f} microseconds, {row['share']:.0%} of its floor"
    return said if row["peer_share"] is None else f"{said}, {row['peer']} {row['peer_share']:.0%}"
