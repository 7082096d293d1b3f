"""The n-gram memory: which rows of its table a token looks up, and how far each stream lets them in."""

from __future__ import annotations

from textwrap import shorten

from matplotlib.axes import Axes

from dskit.viz.figures.page import BLUE, SAND, YELLOW, Picture, Rows, theme
from dskit.viz.figures.pieces import arrow, box, shade, titled, visible, write


def ngram_lookup(rows: Rows, title: str = "Which rows one token looks up") -> Picture:
    """The n-grams that end at one token, and for each the rows of the table that its hashes name.

    Keys, one row per hash: "gram" (its tokens, oldest first); "row" of the table; "twin" (another n-gram
    that reads this row, "" where none is known); "bytes" of a row; "gates" of the streams at the token.
    """
    if not rows:
        raise ValueError("rows is empty; give at least one lookup")
    grams: dict[tuple[str, ...], list[dict]] = {}
    for row in rows:
        grams.setdefault(tuple(row["gram"]), []).append(row)
    nbytes = sum(row["bytes"] for row in rows)
    height = 1.3 + 0.85 * len(grams)
    gates = ", ".join(f"{gate:.2f}" for gate in rows[0]["gates"])
    said = "; ".join(map(_say_lookup, grams, grams.values()))
    alt = f"{title}. {said}. {len(rows)} rows, {nbytes:,} bytes are read. Gates: {gates}."
    picture, axes = titled(9.5, height, title, alt)
    for i, (gram, found) in enumerate(grams.items()):
        y = 10 * height - 12 - 8.5 * i
        write(axes, 2, y + 1.5, f"{len(gram)}-gram", fontsize=8.5)
        _gram(axes, 10, y, gram)
        _rows(axes, 42, y, found)
    write(axes, 2, 2.5, f"{len(rows)} rows of the table, {nbytes:,} bytes", fontsize=9)
    write(axes, 42, 2.5, f"gates of the streams: {gates}", fontsize=9)
    return picture


def _gram(axes: Axes, x: float, y: float, gram: tuple[str, ...]) -> None:
    """Tokens side by side, the newest in yellow."""
    longest = 28.0 / len(gram)
    for i, token in enumerate(gram):
        label = shorten(visible(token), max(3, int((longest - 1.2) / 0.66)), placeholder="\u2026")
        width = 0.66 * len(label) + 1.4
        fill = YELLOW if i == len(gram) - 1 else SAND
        box(axes, x, y, width, 3, fill, label, family="monospace", fontsize=7.8)
        x += width + 0.3
    arrow(axes, (x + 0.5, y + 1.5), (41, y + 1.5))


def _rows(axes: Axes, x: float, y: float, found: list[dict]) -> None:
    """The rows that one n-gram looks up, and below each an n-gram that shares it."""
    step = min(26.0, 52 / len(found))
    for row in found:
        box(axes, x, y, min(12, step - 1), 3, BLUE, f"row {row['row']:,}", fontsize=8)
        if row["twin"] and len(found) <= 2:
            also = shorten(visible(row["twin"]), 26, placeholder="\u2026")
            write(axes, x, y - 1.6, f"also of {also}", fontsize=7, color=theme().faint)
        x += step


def _say_lookup(gram: tuple[str, ...], found: list[dict]) -> str:
    shared = [f"row {row['row']:,} also of {row['twin']!r}" for row in found if row["twin"]]
    alone = [f"row {row['row']:,}" for row in found if not row["twin"]]
    return f"{''.join(gram)!r} reads {', '.join(shared + alone)}"


def gate_map(rows: Rows, title: str = "How far each stream lets the memory in") -> Picture:
    """One column per token, one cell per stream. Keys: "token", "gates" (numbers between 0 and 1)."""
    if not rows:
        raise ValueError("rows is empty; give at least one token")
    streams = len(rows[0]["gates"])
    height = 1.45 + 0.34 * streams
    highest = max(rows, key=lambda row: max(row["gates"]))
    said = "; ".join(f"{row['token']!r} {max(row['gates']):.2f}" for row in rows)
    alt = (f"{title}. {len(rows)} tokens, {streams} streams. The widest gate of each token: {said}. The "
           f"widest of all stands at {highest['token']!r}.")
    picture, axes = titled(9.5, height, title, alt)
    for i in range(streams):
        write(axes, 11, 10 * height - 13.3 - 3.4 * i, f"stream {i}", ha="right", fontsize=8)
    x = 12.0
    for row in rows:
        label = shorten(visible(row["token"]), 12, placeholder="\u2026")
        width = max(4.4, 0.66 * len(label) + 1.2)
        if x + width > 93:
            write(axes, x + 0.5, 10 * height - 9.5, "\u2026")
            break
        write(axes, x + width / 2, 10 * height - 9.5, label, ha="center", family="monospace", fontsize=7.8)
        for i, gate in enumerate(row["gates"]):
            y = 10 * height - 15 - 3.4 * i
            box(axes, x, y, width - 0.3, 3.1, shade(gate), f"{gate:.2f}", fontsize=7.5)
        x += width
    return picture
