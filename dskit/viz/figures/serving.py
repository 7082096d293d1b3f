"""Serving: the way of a request through the house, and what is shared on it."""

from __future__ import annotations

from dskit.viz.figures.page import BLUE, SAND, SLATE, Picture, Rows, theme
from dskit.viz.figures.pieces import arrow, box, titled, write

FILLS = (BLUE, SLATE, SAND)  # of threads, in order of appearance


def request_path(rows: Rows, title: str = "The way of a request") -> Picture:
    """Boxes from left to right, each with the file that does it; what runs in one thread has one colour.

    Keys: "what", "where", "thread".
    """
    if not rows:
        raise ValueError("rows is empty; give at least one stage")
    alt = f"{title}: " + ", then ".join(f"{r['what']} ({r['where']}, {r['thread']})" for r in rows)
    picture, axes = titled(10, 2.3, title, alt)
    threads = list(dict.fromkeys(row["thread"] for row in rows))
    fills = {thread: FILLS[i % len(FILLS)] for i, thread in enumerate(threads)}
    step = 96 / len(rows)
    for i, row in enumerate(rows):
        x = 2 + i * step
        box(axes, x, 9, step - 3, 6, fills[row["thread"]], row["what"], fontsize=8.5)
        write(axes, x + (step - 3) / 2, 7.2, row["where"], ha="center", family="monospace", fontsize=7)
        if i:
            arrow(axes, (x - 2.8, 12), (x - 0.2, 12))
    for thread in threads:
        mine = [i for i, row in enumerate(rows) if row["thread"] == thread]
        left, right = 2 + mine[0] * step, 2 + mine[-1] * step + step - 3
        axes.plot([left, right], [4.2, 4.2], color=theme().faint, linewidth=1)
        write(axes, (left + right) / 2, 2.4, thread, ha="center", fontsize=8)
    return picture
