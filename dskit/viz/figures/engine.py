"""The engine: who holds which cache block, and what became of each request."""

from __future__ import annotations

from collections import Counter

from matplotlib.axes import Axes

from dskit.viz.figures.page import BLUE, SAND, SLATE, STONE, YELLOW, Picture, Rows, theme
from dskit.viz.figures.pieces import box, on, titled, write

FILLS = (SAND, SLATE, YELLOW, BLUE, STONE)  # of requests in turn; letters tell apart what colours repeat
PER_LINE = 16
KINDS = {
    "prefill": ("reads its prompt", YELLOW, ""),
    "decode": ("adds tokens", SLATE, ""),
    "waiting": ("waits", "none", ""),
    "preempted": ("gave its blocks back, waits", "none", "////"),
}


def _letters(names: list[str]) -> dict[str, tuple[str, str]]:
    """A letter and a fill for each request."""
    return {
        name: (chr(ord("A") + i % 26), FILLS[i % len(FILLS)]) for i, name in enumerate(dict.fromkeys(names))
    }


def block_state(row: dict) -> str:
    """free, cached (the prefix tree alone knows it), held, or shared by several requests."""
    if row["requests"]:
        return "shared" if len(row["requests"]) > 1 else "held"
    return "cached" if row["cached"] else "free"


def cache_map(rows: Rows, kinds: dict[str, int] | None = None, title: str = "Cache blocks") -> Picture:
    """A grid of blocks: a request's letter and colour, hatched when shared, outlined with
    a c when only the prefix tree holds it, grey when free.

    Keys: "block"; "requests", the names of those who hold it; "cached", whether the prefix tree knows it.
    `kinds`: bytes per kind of memory, written below.
    """
    if not rows:
        raise ValueError("rows is empty; give at least one block")
    letters = _letters([name for row in rows for name in row["requests"]])
    counts = Counter(map(block_state, rows))
    said = ", ".join(f"{counts[state]} {state}" for state in ("held", "shared", "cached", "free"))
    held = {name: sum(name in row["requests"] for row in rows) for name in letters}
    each = "; ".join(f"{letters[name][0]} is {name}, {count} blocks" for name, count in held.items())
    sizes = ", ".join(f"{what} {size:,} bytes" for what, size in (kinds or {}).items())
    alt = ". ".join(filter(None, (f"{title}: {len(rows)} blocks, {said}", each, sizes))) + "."
    lines = -(-len(rows) // PER_LINE)
    height = 1.7 + 0.42 * lines + 0.25 * len(letters)
    picture, axes = titled(9.5, height, title, alt)
    for i, row in enumerate(rows):
        x, y = 2 + 5.6 * (i % PER_LINE), 10 * height - 11 - 4.2 * (i // PER_LINE)
        _cell(axes, x, y, row, letters)
    y = 10 * height - 14.2 - 4.2 * (lines - 1)
    write(axes, 2, y, said, fontsize=8.5)
    for i, (name, (letter, fill)) in enumerate(letters.items()):
        box(axes, 2, y - 3.4 - 2.5 * i, 2.6, 2, fill, letter, fontsize=7.5)
        write(axes, 5.4, y - 2.4 - 2.5 * i, f"{name}: {held[name]} blocks", fontsize=8.5)
    write(axes, 34, y, sizes, fontsize=7.5, color=theme().faint)
    return picture


def _cell(axes: Axes, x: float, y: float, row: dict, letters: dict[str, tuple[str, str]]) -> None:
    """One block."""
    state = block_state(row)
    fill = letters[row["requests"][0]][1] if row["requests"] else "none"
    ink = on(fill) if fill != "none" else theme().faint
    edge = theme().ink if state in ("shared", "cached") else theme().faint
    hatch = "////" if state == "shared" else ""
    if state == "free":
        axes.bar(x, 3.6, 5.2, y, align="edge", color=theme().faint, alpha=0.25, zorder=1)
    axes.bar(x, 3.6, 5.2, y, align="edge", color=fill, edgecolor=edge, hatch=hatch, zorder=2)
    said = "+".join(letters[name][0] for name in row["requests"][:3]) or ("c" if row["cached"] else "")
    pad = {"boxstyle": "round,pad=0.15", "facecolor": fill, "linewidth": 0} if hatch else None
    write(axes, x + 2.6, y + 1.8, said, ha="center", fontsize=8, color=ink, bbox=pad)


def request_lives(rows: Rows, title: str = "A request's life") -> Picture:
    """One line per request over the engine's steps: waiting, prefill, decode, preempted.

    Keys: "request"; "step"; "kind", one of those; "blocks", how many it holds in that step.
    """
    if not rows:
        raise ValueError("rows is empty; give at least one step of one request")
    names = list(dict.fromkeys(row["request"] for row in rows))
    first, last = min(row["step"] for row in rows), max(row["step"] for row in rows)
    alt = f"{title}, steps {first} to {last}. " + "; ".join(_life(name, rows) for name in names)
    height = 1.75 + 0.5 * len(names)
    picture, axes = titled(10, height, title, alt)
    left, each = 14.0, 82 / (last - first + 1)
    for i, name in enumerate(names):
        y = 10 * height - 11.5 - 5 * i
        write(axes, left - 1, y + 1.6, name, ha="right", fontsize=8.5)
        for row in (row for row in rows if row["request"] == name):
            _, fill, hatch = KINDS[row["kind"]]
            axes.bar(left + each * (row["step"] - first), 3.2, 0.92 * each, y, align="edge", color=fill,
                     edgecolor=theme().faint, linewidth=0.5, hatch=hatch, zorder=2)
            if each > 1.6:
                ink = theme().faint if fill == "none" else on(fill)
                write(axes, left + each * (row["step"] - first + 0.46), y + 1.6, str(row["blocks"] or ""),
                      ha="center", fontsize=7, color=ink)
    y = 10 * height - 11.5 - 5 * len(names)
    write(axes, left, y + 2.6, f"step {first}", fontsize=7.5, color=theme().faint)
    write(axes, 96, y + 2.6, f"step {last}; the numbers are blocks held", fontsize=7.5, ha="right",
          color=theme().faint)
    for i, (what, fill, hatch) in enumerate(KINDS.values()):
        x = left + 19 * i
        axes.bar(x, 1.6, 2.6, y - 1.4, align="edge", color=fill, edgecolor=theme().faint, hatch=hatch)
        write(axes, x + 3.4, y - 0.6, what, fontsize=7.5)
    return picture


def _life(name: str, rows: Rows) -> str:
    """One request in words: what it did for how many steps, and the most blocks it held."""
    mine = [row for row in rows if row["request"] == name]
    runs: list[list] = []
    for row in mine:
        if runs and runs[-1][0] == row["kind"]:
            runs[-1][1] += 1
        else:
            runs.append([row["kind"], 1])
    said = ", then ".join(f"{kind} for {count} step{'s' * (count > 1)}" for kind, count in runs)
    return f"{name}: {said}; {max(row['blocks'] for row in mine)} blocks at most"
