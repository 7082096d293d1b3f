"""What attention looks at: the reach of one query, the reach of all, and the weight of everything it reads.

Shapes: the query at position t reads a window of tokens that ends at t, and entries of the global memory,
each of which stands for `ratio` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from dskit.viz.figures.page import SAND, SLATE, YELLOW, Picture, Rows, theme
from dskit.viz.figures.pieces import heat, legend, titled, write

LONGEST = 512  # positions that are drawn one by one; longer texts are drawn in groups


# ---- one query -------------------------------------------------------------------------------------------


def query_reach(rows: Rows, title: str = "What one query reads") -> Picture:
    """Per row one layer: its window over the tokens, its chosen entries over the global memory.

    Keys: "what"; "position" of the query; "window" (tokens); "ratio" (tokens per entry, 0: no global memory);
    "chosen" (entries); "block" (tokens per cache block).
    """
    if not rows:
        raise ValueError("rows is empty; give at least one layer")
    height = 1.35 + 0.95 * len(rows)
    picture, axes = titled(9.5, height, title, f"{title}. " + "; ".join(map(_say_reach, rows)))
    for i, row in enumerate(rows):
        _reach(axes, 10 * height - 12 - 9.5 * i, row)
    legend(axes, 13, 2.4, ((SLATE, "in the window"), (YELLOW, "chosen entry"), (None, "not read")))
    write(axes, 92, 2.4, "thick lines: edges of cache blocks", ha="right", fontsize=8)
    return picture


def _reach(axes: Axes, y: float, row: dict[str, Any]) -> None:
    """Two strips under one title: tokens with the window, entries with the chosen ones."""
    left, width = 13.0, 79.0
    tokens, ratio = row["position"] + 1, row["ratio"]
    each = width / tokens
    write(axes, left, y + 3.4, row["what"], fontsize=9)
    write(axes, left - 1, y + 1, "tokens", ha="right", fontsize=8)
    _strip(axes, left, y, each, tokens, range(max(0, tokens - row["window"]), tokens), SLATE)
    write(axes, left - 1, y - 2, "memory", ha="right", fontsize=8)
    if not ratio:
        write(axes, left, y - 2, "this layer reads no global memory", fontsize=8, color=theme().faint)
        return
    _strip(axes, left, y - 3, ratio * each, tokens // ratio, row["chosen"], YELLOW)
    for edge in range(row["block"], tokens, row["block"]):
        axes.plot([left + edge * each] * 2, [y - 3.5, y - 0.5], color=theme().ink, linewidth=1.6, zorder=6)


def _strip(axes: Axes, x: float, y: float, each: float, count: int, marked: Sequence[int], fill: str) -> None:
    """`count` cells in a frame, some of them filled."""
    edge = theme().faint
    axes.bar([x], [2], count * each, y, align="edge", color="none", edgecolor=edge, linewidth=0.7, zorder=4)
    axes.bar([x + i * each for i in marked], 2, each, y, align="edge", color=fill, zorder=3)


def _say_reach(row: dict[str, Any]) -> str:
    tokens, ratio, chosen = row["position"] + 1, row["ratio"], row["chosen"]
    said = f"{row['what']}: the window holds {min(row['window'], tokens)} of {tokens} tokens"
    if not ratio:
        return f"{said}, no global memory"
    blocks = len({entry * ratio // row["block"] for entry in chosen})
    oldest = f", the oldest at token {min(chosen) * ratio}" if chosen else ""
    return (f"{said}, {len(chosen)} of {tokens // ratio} entries are chosen, from {blocks} cache "
            f"block{'s' * (blocks != 1)}{oldest}")


# ---- all queries -----------------------------------------------------------------------------------------

SKIPPED, WINDOW, CHOSEN, BOTH = range(4)


def selection_mask(rows: Rows, title: str = "What each query reads") -> Picture:
    """A map of queries against tokens: in the window, in a chosen entry, in both, not read.

    Keys, one row per query in order: "window" (first token of the window), "chosen" (entries), "ratio".
    """
    if not rows:
        raise ValueError("rows is empty; give at least one query")
    kinds, last = _kinds(rows), rows[-1]
    tokens = len(rows)
    read, window = int((kinds[-1] > SKIPPED).sum()), tokens - last["window"]
    per = "1 token" if last["ratio"] == 1 else f"{last['ratio']} tokens"
    alt = (f"{title}. {tokens} queries, top to bottom, against as many tokens, left to right. The last query "
           f"has {window} tokens in its window and {len(last['chosen'])} chosen entries of {per} each; "
           f"together they cover {read} of {tokens} tokens.")
    picture, axes = titled(9.5, 6.0, title, alt)
    faint = theme().faint
    look = {"cmap": ListedColormap([faint + "30", SLATE, YELLOW, SAND]), "vmin": 0, "vmax": 3}
    _map(picture, axes, (13, 9, 45, 43), kinds, look)
    names = ("seen, not read", "in the window", "in a chosen entry", "in both")
    for i, (fill, name) in enumerate(zip((faint + "30", SLATE, YELLOW, SAND), names, strict=True)):
        legend(axes, 63, 50 - 4 * i, ((fill, name),))
    said = f"The last query:\n{window} tokens in the window\n{len(last['chosen'])} entries of {per}"
    write(axes, 63, 27, f"{said}\n{read} of {tokens} tokens covered", fontsize=9, linespacing=1.6)
    return picture


def _kinds(rows: Rows) -> np.ndarray:
    """What each token is to each query, [queries, tokens]; not a number where it is still to come."""
    kinds = np.full((len(rows), len(rows)), np.nan)
    for t, row in enumerate(rows):
        kinds[t, : t + 1] = SKIPPED
        kinds[t, row["window"] : t + 1] = WINDOW
        tokens = _tokens(row["chosen"], row["ratio"])
        kinds[t, tokens] = np.where(kinds[t, tokens] == WINDOW, BOTH, CHOSEN)
    return kinds


def _tokens(entries: Sequence[int], ratio: int) -> np.ndarray:
    """The tokens that entries stand for."""
    return np.add.outer(np.asarray(entries, dtype=int) * ratio, np.arange(ratio)).ravel()


# ---- the weights -----------------------------------------------------------------------------------------


def attention_map(rows: Rows, title: str = "Where one head looks") -> Picture:
    """Maps of queries against tokens, for the window and for the global memory; beside them the sink's share.

    Keys, one row per query in order: "window" (first token of the window) and "weights" of its tokens;
    "chosen" (entries), "entries" (their weights), "ratio"; "sink" (its share). The weights of a query and its
    sink add up to one. Colours are on a square-root scale.
    """
    if not rows:
        raise ValueError("rows is empty; give at least one query")
    tokens = len(rows)
    window, memory = np.full((2, tokens, tokens), np.nan)
    for t, row in enumerate(rows):
        window[t, row["window"] : t + 1] = row["weights"]
        memory[t, _tokens(row["chosen"], row["ratio"])] = np.repeat(row["entries"], row["ratio"])
    sink = np.array([[row["sink"]] for row in rows])
    picture, axes = titled(9.5, 5.5, title, f"{title}. {_say_weights(rows)}")
    look = {"vmin": 0, "vmax": 1}
    for left, values, name in ((9, window, "window"), (48, memory, "global memory")):
        write(axes, left, 47, name, fontsize=9)
        _map(picture, axes, (left, 9, 36, 36), np.sqrt(values), look)
    write(axes, 86, 47, "sink", fontsize=9)
    heat(picture, (86, 9, 2.4, 36), _thin(np.sqrt(sink), (0,)), **look)
    heat(picture, (90, 9, 1.2, 36), np.linspace(1, 0, 64)[:, None], **look)
    for share in (0, 0.05, 0.25, 0.5, 1):
        write(axes, 91.6, 9 + 36 * share**0.5, f"{share:g}", fontsize=6.5)
    return picture


def _say_weights(rows: Rows) -> str:
    last, count = rows[-1], len(rows)
    parts = {"the window": last["weights"], "the global memory": last["entries"], "the sink": [last["sink"]]}
    shares = ", ".join(f"{sum(weights):.0%} to {name}" for name, weights in parts.items())
    where = [(weight, f"token {last['window'] + i}") for i, weight in enumerate(last["weights"])]
    entries = zip(last["entries"], last["chosen"], strict=True)
    weight, place = max([*where, *((weight, f"entry {entry}") for weight, entry in entries)])
    mean = sum(row["sink"] for row in rows) / count
    return (f"{count} queries, top to bottom, against as many tokens. The last one gives {shares}; most, "
            f"{weight:.0%}, to {place}. The sink takes {mean:.0%} on average.")


# ---- maps ------------------------------------------------------------------------------------------------


def _map(picture: Picture, axes: Axes, place: tuple[float, float, float, float], values: np.ndarray,
         look: dict[str, Any]) -> None:
    """A map of queries against tokens with its causal limit, and in words what runs along its sides."""
    left, bottom, width, height = place
    tokens = len(values)
    shown = _thin(values, (0, 1))
    inner = heat(picture, place, shown, **look)
    inner.plot([-0.5, len(shown) - 0.5], [-0.5, len(shown) - 0.5], color=theme().ink, linewidth=0.8)
    group = -(-tokens // LONGEST)
    grouped = f", {group} to a cell" if group > 1 else ""
    write(axes, left + width / 2, bottom - 2, f"tokens 0 to {tokens - 1}{grouped}", ha="center", fontsize=7.5)
    write(axes, left - 1.2, bottom + height / 2, "queries", ha="right", rotation=90, fontsize=7.5)


def _thin(values: np.ndarray, along: tuple[int, ...]) -> np.ndarray:
    """The largest of each group of neighbours along some axes, so that at most `LONGEST` cells remain."""
    for axis in along:
        starts = np.arange(0, values.shape[axis], -(-values.shape[axis] // LONGEST))
        values = np.fmax.reduceat(values, starts, axis=axis)
    return values
