"""Kernels: what runs, how far it is off, where a step's time goes, and what the machine could do."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10
from textwrap import shorten
from typing import Any

from matplotlib.axes import Axes

from dskit.viz.figures.page import BLUE, SAND, SLATE, STONE, YELLOW, Picture, Rows, theme
from dskit.viz.figures.pieces import box, titled, write


def floor_shares(rows: Rows, title: str = "Share of the floor that each kernel reaches") -> Picture:
    """One bar per op, from nothing to its floor, with a diamond where the fastest peer stands.

    Keys: "what", "shape"; "share", "us" (None: not measured); "peer", "peer_share" (None: no peer).
    """
    if not rows:
        raise ValueError("rows is empty; give at least one op")
    height = 1.2 + 0.42 * len(rows)
    picture, axes = titled(10, height, title, f"{title}. " + "; ".join(map(_say_share, rows)))
    left, full, top = 24.0, 40.0, 10 * height - 8.0
    _floor_scale(axes, left, full, top, 4.2 * len(rows))
    for i, row in enumerate(rows):
        y = top - 3.6 - 4.2 * i
        write(axes, left - 1, y + 0.7, row["what"], ha="right", fontsize=9)
        shape = shorten(row["shape"], 42, placeholder=" ...")
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


# ---- a swap ------------------------------------------------------------------------------------------------

ERRORS = (-8.0, -1.0)  # powers of ten that the scale of errors spans


def swap_board(rows: Rows, title: str = "What each group of ops runs") -> Picture:
    """One line per group: choice and state in words, error against float64 on a scale, time.

    Keys: "group", "choice", "state"; "error" (None: not measured, 0: the same bits), "time" in words.
    """
    if not rows:
        raise ValueError("rows is empty; give at least one group")
    height = 1.35 + 0.34 * len(rows)
    picture, axes = titled(10, height, title, f"{title}. " + "; ".join(map(_say_choice, rows)))
    left, width, top = 51.0, 28.0, 10 * height - 8.6
    for power in range(int(ERRORS[0]), int(ERRORS[1]) + 1):
        x = _error_at(10.0**power, left, width)
        axes.plot([x, x], [top - 0.8, top - 1 - 3.4 * len(rows)], color=theme().faint, linewidth=0.4)
        write(axes, x, top + 0.3, f"1e{power}", ha="center", fontsize=6.8, color=theme().faint)
    for i, row in enumerate(rows):
        y = top - 2.8 - 3.4 * i
        write(axes, 2, y, row["group"], fontsize=8.5)
        box(axes, 13, y - 1.2, 10, 2.4, YELLOW if row["choice"] == "triton" else SLATE, row["choice"],
            fontsize=8)
        write(axes, 24.5, y, shorten(row["state"], 40, placeholder=" ..."), fontsize=7.2)
        if row["error"] is not None:
            _diamond(axes, _error_at(row["error"], left, width), y)
        write(axes, 83, y, row["time"], fontsize=8)
    write(axes, left, 10 * height - 5.6, "error against float64, relative RMS", fontsize=7.5)
    write(axes, 83, 10 * height - 5.6, "time of one call of each", fontsize=7.5)
    return picture


def _error_at(error: float, left: float, width: float) -> float:
    """Where an error stands on the logarithmic scale; its ends hold what lies beyond."""
    low, high = ERRORS
    power = min(high, max(low, log10(error))) if error > 0 else low
    return left + width * (power - low) / (high - low)


def _say_choice(row: dict[str, Any]) -> str:
    off = "not measured" if row["error"] is None else f"error {row['error']:.1e}" if row["error"] else "exact"
    return f"{row['group']} = {row['choice']}, {row['state']}, {off}, {row['time'] or 'no time'}"


# ---- where the time goes -----------------------------------------------------------------------------------

def op_bars(rows: Rows, steps_ms: Sequence[float] = (), title: str = "Where a step's time goes") -> Picture:
    """Bars by label, compile time as a bar of its own, and the newest steps as a line.

    Keys: "label", "ms", "share" of the step (None for the time of compiling, which is no part of it).
    """
    if not rows:
        raise ValueError("rows is empty; give at least one label")
    spark = f" The last {len(steps_ms)} steps took {min(steps_ms):.1f} to {max(steps_ms):.1f} ms." if len(
        steps_ms) else ""
    alt = f"{title}. " + "; ".join(f"{r['label']}: {r['ms']:.2f} ms{_percent(r)}" for r in rows) + "." + spark
    height = 1.0 + 0.3 * len(rows) + (0.9 if len(steps_ms) else 0)
    picture, axes = titled(9.5, height, title, alt)
    largest = max(row["ms"] for row in rows) or 1.0
    for i, row in enumerate(rows):
        y, compiling = 10 * height - 9 - 3 * i, row["share"] is None
        write(axes, 30, y, row["label"], ha="right", fontsize=8, family="monospace")
        axes.barh(y, 44 * row["ms"] / largest, 2.1, left=31, color=STONE if compiling else SAND,
                  hatch="////" if compiling else "", edgecolor=theme().ink, linewidth=0.3)
        write(axes, 32 + 44 * row["ms"] / largest, y, f"{row['ms']:.2f} ms{_percent(row)}", fontsize=8)
    if len(steps_ms):
        high, each = max(steps_ms) or 1.0, 44 / max(1, len(steps_ms) - 1)
        axes.plot([31 + each * i for i in range(len(steps_ms))], [1.6 + 4.5 * ms / high for ms in steps_ms],
                  color=theme().ink, linewidth=1.2, marker="o", markersize=2.2)
        write(axes, 30, 3.8, f"last {len(steps_ms)} steps", ha="right", fontsize=8)
        write(axes, 77, 3.8, f"at most {high:.1f} ms", fontsize=8)
    return picture


def _percent(row: dict[str, Any]) -> str:
    return ", compiling" if row["share"] is None else f", {row['share']:.0%}"


def op_timeline(rows: Rows, title: str = "One step, op by op") -> Picture:
    """Lanes on one time axis, each op a box; ops marked as `lit` stand out and are named.

    Keys: "lane", "op", "start_ms", "ms", "lit".
    """
    if not rows:
        raise ValueError("rows is empty; give at least one op")
    lanes = list(dict.fromkeys(row["lane"] for row in rows))
    end = max(row["start_ms"] + row["ms"] for row in rows)
    said = []
    for lane in lanes:
        mine = [row for row in rows if row["lane"] == lane]
        lit = [row for row in mine if row["lit"]]
        names = ", ".join(dict.fromkeys(row["op"] for row in lit))
        last = max(row["start_ms"] + row["ms"] for row in mine)
        said.append(f"{lane}: {len(mine)} op calls in {last:.2f} ms, of which {names or 'none lit'} "
                    f"{sum(row['ms'] for row in lit):.2f} ms")
    height = 1.2 + 0.85 * len(lanes)
    picture, axes = titled(10, height, title, f"{title}. " + "; ".join(said))
    scale = 94 / end
    for i, (lane, words) in enumerate(zip(lanes, said, strict=True)):
        y = 10 * height - 13 - 8.5 * i
        write(axes, 3, y + 4.6, words, fontsize=8)
        mine = [row for row in rows if row["lane"] == lane]
        axes.barh(y + 1.5, [scale * row["ms"] for row in mine], 3,
                  left=[3 + scale * row["start_ms"] for row in mine], edgecolor=theme().ink, linewidth=0.25,
                  color=[YELLOW if row["lit"] else SLATE for row in mine])
    write(axes, 3, 2, "0 ms", fontsize=7.5, color=theme().faint)
    write(axes, 97, 2, f"{end:.1f} ms", fontsize=7.5, ha="right", color=theme().faint)
    return picture
