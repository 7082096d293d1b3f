"""Experts: which tokens go where, and how evenly."""

from __future__ import annotations

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from dskit.viz.figures.page import BLUE, SAND, SLATE, Picture, Rows, theme
from dskit.viz.figures.pieces import box, on, titled, write


def expert_flow(rows: Rows, experts: int, title: str = "Where each token goes") -> Picture:
    """Lines from tokens to their experts, as thick as the weights.

    Keys: "token"; "experts", numbers below `experts`; "weights", one for each.
    """
    if not rows:
        raise ValueError("rows is empty; give at least one token")
    said = "; ".join(
        f"{row['token']!r} to " + ", ".join(f"{expert} ({weight:.2f})" for expert, weight in _pairs(row))
        for row in rows
    )
    height = 1.1 + 0.34 * max(len(rows), experts)
    picture, axes = titled(9.5, height, title, f"{title}. {said}")
    low, high = 3.0, 10 * height - 10.0
    places = [_between(high, low, i, len(rows)) for i in range(len(rows))]
    homes = [_between(high, low, i, experts) for i in range(experts)]
    counts = [sum(expert in row["experts"] for row in rows) for expert in range(experts)]
    for row, y in zip(rows, places, strict=True):
        box(axes, 2, y - 1.2, 16, 2.4, SLATE, row["token"].replace("\n", "\u21b5"), family="monospace")
        for expert, weight in _pairs(row):
            axes.plot([18.2, 64], [y, homes[expert]], color=theme().faint, linewidth=0.4 + 4 * weight,
                      alpha=0.75, solid_capstyle="butt", zorder=1)
    for expert, (y, count) in enumerate(zip(homes, counts, strict=True)):
        fill = SAND if count else SLATE
        box(axes, 64, y - 1.2, 14, 2.4, fill, f"expert {expert}", fontsize=8)
        write(axes, 79, y, f"{count} token{'s' * (count != 1)}", fontsize=8, color=theme().faint)
    return picture


def _pairs(row: dict) -> list[tuple[int, float]]:
    return list(zip(row["experts"], row["weights"], strict=True))


def _between(high: float, low: float, i: int, count: int) -> float:
    """The i-th of `count` places from high to low; one place is in the middle."""
    return (high + low) / 2 if count == 1 else high - (high - low) * i / (count - 1)


def expert_load(rows: Rows, top: float | None = None, title: str = "Tokens per expert") -> Picture:
    """Layers by experts, the ideal as a mark on the scale, evenness beside each layer.

    Keys: "layer"; "loads", tokens routed to each expert; "ideal", "max_over_mean", "entropy" (1: even). The
    scale ends at `top` tokens, so that pictures with the same `top` can be compared; None: at the largest.
    """
    if not rows:
        raise ValueError("rows is empty; give at least one layer")
    worst = max(rows, key=lambda row: row["max_over_mean"])
    busiest = worst["loads"].index(max(worst["loads"]))
    alt = (
        f"{title}. Expert load: max {worst['max_over_mean']:.1f} times the mean at layer {worst['layer']}, "
        f"expert {busiest}. "
        + "; ".join(f"layer {row['layer']}: entropy {row['entropy']:.2f} of 1" for row in rows)
    )
    top = top or max(1, max(max(row["loads"]) for row in rows))
    height = 1.6 + 0.34 * len(rows)
    picture, axes = titled(10, height, title, alt)
    left, width, upper = 14.0, 58.0, 10 * height - 9.5
    experts = len(rows[0]["loads"])
    write(axes, left, upper + 1.2, "expert 0", fontsize=7.5, color=theme().faint)
    write(axes, left + width, upper + 1.2, str(experts - 1), fontsize=7.5, color=theme().faint, ha="right")
    write(axes, 76, upper + 1.2, "max/mean   entropy", fontsize=7.5, color=theme().faint)
    for i, row in enumerate(rows):
        y = upper - 3.4 * (i + 1)
        write(axes, left - 1, y + 1.6, f"layer {row['layer']}", ha="right", fontsize=8.5)
        _loads(axes, left, y, width / experts, row["loads"], top)
        write(axes, 76, y + 1.6, f"{row['max_over_mean']:.1f}", fontsize=8.5)
        write(axes, 85, y + 1.6, f"{row['entropy']:.2f}", fontsize=8.5)
    _scale(axes, left, upper - 3.4 * len(rows) - 3.4, width, top, rows[0]["ideal"])
    return picture


def _shade(load: float, top: float) -> str:
    return to_hex(colormaps["cividis"](min(1.0, load / top)))


def _loads(axes: Axes, left: float, y: float, each: float, loads: list[int], top: float) -> None:
    """One row of cells, with the counts where they fit."""
    for expert, load in enumerate(loads):
        fill = _shade(load, top)
        axes.bar(left + expert * each, 3.1, 0.94 * each, y, align="edge", color=fill, zorder=2)
        if each > 2.2:
            write(axes, left + (expert + 0.47) * each, y + 1.5, str(load), fontsize=7, ha="center",
                  color=on(fill))


def _scale(axes: Axes, left: float, y: float, width: float, top: float, ideal: float) -> None:
    """The colours from nothing to `top`, and a mark where every expert would be with even loads."""
    for i in range(64):
        axes.bar(left + width * i / 64, 1.2, width / 64, y, align="edge", color=_shade(i, 63))
    write(axes, left - 1, y + 0.6, "0", fontsize=7.5, ha="right")
    write(axes, left + width + 1, y + 0.6, f"{top:g} tokens", fontsize=7.5)
    at = left + width * min(1.0, ideal / top)
    axes.plot([at, at], [y - 0.9, y + 2.1], color=BLUE, linewidth=2.4, zorder=3)
    axes.plot([at, at], [y - 0.9, y + 2.1], color="#ffffff", linewidth=0.9, zorder=4)
    write(axes, at, y - 1.9, f"even: {ideal:.1f}", fontsize=7.5, ha="center")
