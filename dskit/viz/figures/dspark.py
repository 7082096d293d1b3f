"""DSpark: what became of drafted tokens, round by round, and how well the draft knew."""

from __future__ import annotations

from collections import Counter
from statistics import mean
from typing import Any

from matplotlib.axes import Axes

from dskit.viz.figures.page import BLUE, SAND, SLATE, Picture, Rows, theme
from dskit.viz.figures.pieces import box, titled, write

SHOWN = 10  # rounds that are drawn; the rest only counts
CELL = 8.2  # room of a token


def acceptance(rows: Rows, title: str = "What became of the guesses") -> Picture:
    """Rounds of a draft: its guesses and the model's own token, tokens per round, confidence against truth.

    Keys: "drafted", a list of strings; "held", how many of them were kept; "next", the model's own token
    after those; "chance", the draft's confidence that each guess is reached and kept.
    """
    if not rows:
        raise ValueError("rows is empty; give at least one round")
    guesses = len(rows[0]["drafted"])
    shown = rows[:SHOWN]
    height = 1.9 + max(0.42 * len(shown), 3.4)
    picture, axes = titled(10.5, height, title, _describe(rows, title))
    top = 10 * height
    for i, row in enumerate(shown):
        _round(axes, top - 13 - 4.2 * i, i, row)
    if len(rows) > SHOWN:
        write(axes, 2, top - 13 - 4.2 * SHOWN + 1.5, f"and {len(rows) - SHOWN} rounds more", fontsize=8)
    _legend(axes, 2.5)
    left = 12 + CELL * (guesses + 1)
    _lengths(axes, left, top - 9, 100 - left, rows, guesses)
    _confidence(axes, left, top - 31, 100 - left, rows, guesses)
    return picture


def _round(axes: Axes, y: float, i: int, row: dict[str, Any]) -> None:
    """One strip: kept guesses, the model's own token, guesses that were thrown away."""
    write(axes, 2, y + 1.5, f"{i + 1}", fontsize=8.5)
    held, x = row["held"], 5.0
    for token in row["drafted"][:held]:
        box(axes, x, y, CELL - 0.4, 3, SAND, _label(token), family="monospace", fontsize=7.5)
        x += CELL
    box(axes, x, y, CELL - 0.4, 3, BLUE, _label(row["next"]), family="monospace", fontsize=7.5)
    x += CELL
    for token in row["drafted"][held:]:
        _thrown(axes, x, y, _label(token))
        x += CELL


def _thrown(axes: Axes, x: float, y: float, label: str) -> None:
    """A guess that was not kept: no fill, and a line through it."""
    write(axes, x + CELL / 2, y + 1.5, label, ha="center", family="monospace", fontsize=7.5,
          color=theme().faint)
    axes.plot([x + 0.6, x + CELL - 1], [y + 1.5, y + 1.5], color=theme().faint, linewidth=0.9, zorder=6)


def _label(token: str) -> str:
    text = token.replace(" ", "\u2423").replace("\n", "\u21b5").replace("\uff5c", "|")
    return text if len(text) <= 9 else text[:8] + "\u2026"


def _legend(axes: Axes, y: float) -> None:
    box(axes, 5, y - 1, 4, 2, SAND)
    write(axes, 10, y, "guess kept", fontsize=8)
    box(axes, 23, y - 1, 4, 2, BLUE)
    write(axes, 28, y, "the model's own token", fontsize=8)
    _thrown(axes, 50, y - 1.5, "guess")
    write(axes, 59, y, "guess thrown away", fontsize=8)


def _lengths(axes: Axes, x: float, y: float, width: float, rows: Rows, guesses: int) -> None:
    """Bars: how many rounds gave 1, 2, ... tokens."""
    count = Counter(row["held"] + 1 for row in rows)
    write(axes, x, y + 1.5, f"tokens per round, {_per_round(rows):.2f} on average", fontsize=9)
    step, most = width / (guesses + 1), max(count.values())
    for n in range(1, guesses + 2):
        at, tall = x + (n - 1) * step, 11 * count[n] / most
        axes.bar([at + step / 2], [tall], step * 0.7, bottom=y - 15, color=SAND, zorder=3)
        write(axes, at + step / 2, y - 13.6 + tall, str(count[n]), ha="center", fontsize=8)
        write(axes, at + step / 2, y - 16.6, str(n), ha="center", fontsize=8)


def _confidence(axes: Axes, x: float, y: float, width: float, rows: Rows, guesses: int) -> None:
    """Per place: the share of rounds that kept the guess (bar), the draft's mean confidence (diamond)."""
    write(axes, x, y + 1.5, "guess kept (bar), as the draft expected (diamond)", fontsize=9)
    step = width / guesses
    for k, (kept, chance) in enumerate(_shares(rows, guesses)):
        middle = x + (k + 0.5) * step
        axes.bar([middle], [9 * kept], step * 0.6, bottom=y - 11, color=SLATE, zorder=3)
        axes.plot([middle], [y - 11 + 9 * chance], "D", color=SAND, markeredgecolor=theme().ink,
                  markersize=6, zorder=5)
        write(axes, middle, y - 12.6, f"{k + 1}: {kept:.0%}", ha="center", fontsize=7.5)


def _shares(rows: Rows, guesses: int) -> list[tuple[float, float]]:
    """(share of rounds that kept guess k, mean confidence that they would), for each place."""
    return [(mean(row["held"] > k for row in rows), mean(row["chance"][k] for row in rows))
            for k in range(guesses)]


def _per_round(rows: Rows) -> float:
    return mean(row["held"] + 1 for row in rows)


def _describe(rows: Rows, title: str) -> str:
    places = "; ".join(f"guess {k + 1} kept in {kept:.0%}, expected {chance:.0%}"
                       for k, (kept, chance) in enumerate(_shares(rows, len(rows[0]["drafted"]))))
    return f"{title}. {_per_round(rows):.2f} tokens per round over {len(rows)} rounds. {places}."
