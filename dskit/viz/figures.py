"""Figures: pure functions from data to a picture that also says in words what it shows.

Idea: a Picture is a matplotlib Figure with an `alt` text made from the same numbers. It displays itself in a
notebook as an image with that text, and needs no pyplot, no JavaScript and no font beyond matplotlib's own.

Shapes: `rows` are lists of dicts; every function names the keys that it reads.
Units: sizes in bytes.
Errors: ValueError for an unknown theme, or for rows that are empty.
Source: colours are samples of cividis, which colour-blind readers tell apart; labels repeat what they mean.
Try: notebooks/00_start.ipynb
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from dskit.config import ModelConfig

# cividis, dark to bright
BLUE, SLATE, STONE, SAND, YELLOW = "#123570", "#46536e", "#7c7b78", "#c5b56b", "#f3df55"


Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Theme:
    """Colours of everything that is not data; no `paper` means a transparent background."""

    ink: str
    faint: str
    paper: str | None = None


THEMES = {
    "auto": Theme("#1f2430", "#6a7080", "#ffffff"),  # a white card is legible on any page
    "light": Theme("#1f2430", "#6a7080"),
    "dark": Theme("#eceff4", "#a4acbb"),
}
_current = {"theme": "auto"}


def set_theme(name: str) -> None:
    """Choose the colours of all figures drawn from now on: "auto", "light" or "dark"."""
    if name not in THEMES:
        raise ValueError(f"theme is {name!r}; choose one of {', '.join(THEMES)}")
    _current["theme"] = name


def theme() -> Theme:
    """The colours in force."""
    return THEMES[_current["theme"]]


class Picture(Figure):
    """A figure with `alt`, the description that a screen reader speaks and a test can read."""

    alt = ""

    def bytes(self, format: str = "png") -> bytes:
        """The file contents as "png" or "svg", with the description inside."""
        out = io.BytesIO()
        key = "Title" if format == "svg" else "Description"
        self.savefig(out, format=format, dpi=160, metadata={key: self.alt})
        return out.getvalue()

    def html(self) -> str:
        """An <img> element with the picture and its description."""
        data, width = base64.b64encode(self.bytes()).decode(), round(96 * self.get_figwidth())
        style = f"width:{width}px;max-width:100%"
        return f'<img style="{style}" alt="{html.escape(self.alt)}" src="data:image/png;base64,{data}">'

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": self.alt, "text/html": self.html()}


def canvas(width: float, height: float, alt: str) -> tuple[Picture, Axes]:
    """An empty picture of so many inches, and axes in which one unit is a tenth of an inch."""
    paper = theme().paper
    picture = Picture(figsize=(width, height), facecolor=paper or "none")
    picture.alt = alt
    axes = picture.add_axes((0, 0, 1, 1), xlim=(0, 10 * width), ylim=(0, 10 * height))
    axes.set_axis_off()
    return picture, axes


# ---- pieces ----------------------------------------------------------------------------------------------


def on(fill: str) -> str:
    """Black or white, whichever reads better on a fill."""
    red, green, blue = (int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "#000000" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.42 else "#ffffff"


def box(
    axes: Axes, x: float, y: float, width: float, height: float, fill: str, label: str = "", **text: Any
) -> None:
    """A rounded box with its lower left corner at (x, y), and a label in the middle."""
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.7",
            facecolor=fill,
            linewidth=0,
            zorder=3,
        )
    )
    style = {
        "ha": "center",
        "va": "center_baseline",
        "fontsize": 8.5,
        "color": on(fill),
        "linespacing": 1.3,
    } | text
    axes.text(x + width / 2, y + height / 2 + 0.15, label, zorder=4, **style)


def write(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Text in the theme's ink."""
    axes.text(x, y, text, **({"color": theme().ink, "fontsize": 8.5, "va": "center", "zorder": 5} | style))


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """A thin arrow."""
    style = {"arrowstyle": "-|>", "color": theme().ink, "linewidth": 0.9, "mutation_scale": 8}
    axes.annotate("", end, start, arrowprops=style | {"shrinkA": 0, "shrinkB": 0}, zorder=4)


def streams(axes: Axes, start: float, end: float, y: float, count: int) -> None:
    """Parallel lines, one per residual stream, centred on y."""
    for i in range(count):
        axes.plot(
            [start, end], [y + 0.9 * (i - (count - 1) / 2)] * 2, color=theme().faint, linewidth=1.1, zorder=1
        )


# ---- the whole model -------------------------------------------------------------------------------------

RATIO_FILLS = {0: SLATE, 1: YELLOW}  # any other ratio: SAND


def model_map(config: ModelConfig, name: str = "") -> Picture:
    """The whole model: streams through the layers, which of them share a memory, one layer from inside."""
    picture, axes = canvas(11, 6.6, _describe(config, name))
    title = f"{name or 'model'}: {config.num_hidden_layers} layers, hidden size {config.hidden_size}"
    write(axes, 2, 62.8, title, fontsize=13, fontweight="bold")
    left, right = 17.0, 93.0
    step = (right - left) / config.num_hidden_layers
    _stack(axes, config, left, step)
    _spans(axes, config, left, step)
    _inside(axes, config)
    return picture


def _stack(axes: Axes, config: ModelConfig, left: float, step: float) -> None:
    """Ids to logits: the embedding, the layers on their streams, the head."""
    layers, wide, y = config.num_hidden_layers, config.hidden_size, 48.0
    streams(axes, 10, 100, y, config.hc_mult)
    box(axes, 2, y - 4, 9, 8, BLUE, "embed")
    box(axes, 99, y - 4, 9, 8, BLUE, "norm\nhead")
    mono = {"family": "monospace", "fontsize": 8, "ha": "center"}
    write(axes, 6.5, y + 6, "ids [T]", **mono)
    write(axes, 6.5, y - 6, f"[T, {config.hc_mult}, {wide}]", **mono)
    write(axes, 103.5, y + 6, "logits", **mono)
    write(axes, 103.5, y - 6, f"[T, {config.vocab_size}]", **mono)
    for layer in range(layers):
        fill = RATIO_FILLS.get(config.ratio(layer), SAND)
        x, width = left + layer * step, min(0.74 * step, 7)
        size = 11 if layers <= 16 else 6
        box(axes, x + (step - width) / 2, y - 4, width, 8, fill, str(layer), fontsize=size)
        if layer in config.engram_layer_ids:
            middle = x + step / 2
            box(axes, middle - 4, y + 8, 8, 3.4, STONE, "Engram", fontsize=7.5)
            arrow(axes, (middle, y + 8), (middle, y + 4.3))


def _spans(axes: Axes, config: ModelConfig, left: float, step: float) -> None:
    """One bar per memory, as wide as the layers that share it."""
    layers = config.num_hidden_layers
    for y, title in ((36.6, "window"), (32.6, "global memory"), (28.6, "selection"), (24.6, "experts")):
        write(axes, left - 1, y, title, ha="right", fontsize=8)

    def bar(y: float, first: int, end: int, fill: str, *labels: str) -> None:
        width = step * (end - first) - 0.6
        fits = next((label for label in labels if len(label) * 0.7 < width), "")
        box(axes, left + first * step + 0.3, y - 1.5, width, 3, fill, fits, fontsize=7.8)

    bar(36.6, 0, layers, SLATE, f"the last {config.sliding_window} tokens, in every layer its own")
    for first, end in _runs(config, config.kv_source_layer_ids):
        ratio = config.ratio(first)
        every = "every token" if ratio == 1 else f"every {ratio} tokens"
        fill = RATIO_FILLS.get(ratio, SAND)
        labels = (
            f"written by layer {first}, one entry {every}",
            f"layer {first}, {every}",
            f"by layer {first}",
        )
        bar(32.6, first, end, fill, *labels)
    for first, end in _runs(config, config.index_source_layer_ids):
        again = first not in config.kv_source_layer_ids
        fill = RATIO_FILLS.get(config.ratio(first), SAND)
        pool = f"{config.candidate_topk_blocks} blocks" if again else "all entries"
        best = f"best {config.index_topk} of {pool}"
        bar(28.6, first, end, fill, best, "reindex" if again else "full")
    routed = f"{config.n_routed_experts} experts, {config.num_experts_per_tok} per token"
    bar(24.6, 0, layers, SLATE, f"{routed}, and one that all tokens share")


def _runs(config: ModelConfig, sources: Sequence[int]) -> list[tuple[int, int]]:
    """(source, first layer that it no longer serves) for each source; window-only layers read none."""
    layers = config.num_hidden_layers
    ends = [
        next((i for i in range(a, layers) if i in sources and i > a or not config.ratio(i)), layers)
        for a in sources
    ]
    return list(zip(sources, ends, strict=True))


def _inside(axes: Axes, config: ModelConfig) -> None:
    """One layer: mHC reads a vector of the streams, a sublayer works, mHC writes back; twice."""
    y, low, count = 14.5, 3.0, config.hc_mult
    write(axes, 2, 20.2, "inside one layer", fontsize=10, fontweight="bold")
    streams(axes, 12, 99, y, count)
    mono = {"family": "monospace", "fontsize": 8}
    shape = f"[T, {count}, {config.hidden_size}]"
    write(axes, 11, y, shape, ha="right", **mono)
    write(axes, 100, y, shape, ha="left", **mono)
    heads = f"{config.num_attention_heads} heads of {config.head_dim}"
    attention = f"MLA attention\n{heads}, one shared key-value vector"
    experts = f"experts\n{config.num_experts_per_tok} of {config.n_routed_experts}, and the shared one"
    for start, label, width in ((16.0, attention, 33), (64.0, experts, 25)):
        box(axes, start - 2.6, y - 2.6, 5.2, 5.2, BLUE, "read", fontsize=8)
        end = start + width
        box(axes, end - 5.2, y - 2.6, 9.4, 5.2, BLUE, f"mix {count}x{count}\nwrite", fontsize=7.5)
        axes.plot([start, start], [y - 2.6, low + 2.4], color=theme().ink, linewidth=0.9)
        arrow(axes, (start, low + 2.4), (start + 2.6, low + 2.4))
        box(axes, start + 2.6, low, width - 5.6, 4.8, SAND, label, fontsize=8)
        axes.plot([end - 3, end - 0.5], [low + 2.4, low + 2.4], color=theme().ink, linewidth=0.9)
        arrow(axes, (end - 0.5, low + 2.4), (end - 0.5, y - 2.7))
        write(axes, start - 1, low + 5.6, f"[T, {config.hidden_size}]", ha="right", **mono)


def _describe(config: ModelConfig, name: str) -> str:
    memories = "".join(
        f"Layer {a} writes a memory, one entry per {config.ratio(a)} tokens, read up to layer {b - 1}. "
        for a, b in _runs(config, config.kv_source_layer_ids)
    ).replace("per 1 tokens", "per token")
    engram = ", ".join(map(str, config.engram_layer_ids)) or "none"
    return (
        f"The {name or 'whole'} model: token ids become {config.hc_mult} streams of {config.hidden_size} "
        f"numbers, pass {config.num_hidden_layers} layers of attention and experts, and end as "
        f"{config.vocab_size} logits. "
        f"Every layer sees the last {config.sliding_window} tokens. {memories}Engram layers: {engram}. "
        f"Experts: {config.num_experts_per_tok} of {config.n_routed_experts} per token."
    )


# ---- memory of attention ---------------------------------------------------------------------------------


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
    picture, axes = canvas(9.5, height, alt)
    write(axes, 3, 10 * height - 4.5, title, fontsize=12, fontweight="bold")
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


# ---- tokens ----------------------------------------------------------------------------------------------


def token_strips(rows: Rows, title: str = "What the model said") -> Picture:
    """One strip of tokens per row. Keys: "label"; "tokens", a list of strings. Equal strips say so."""
    if not rows:
        raise ValueError("rows is empty; give at least one strip")
    twins = [[other["tokens"] for other in rows].index(row["tokens"]) for row in rows]  # first equal strip
    same = [f" = row {twin + 1}" if twin < i else "" for i, twin in enumerate(twins)]
    said = (f"{i + 1}, {row['label']}: {''.join(row['tokens'])!r}{same[i]}" for i, row in enumerate(rows))
    height = 0.8 + 0.46 * len(rows)
    picture, axes = canvas(9.5, height, f"{title}. " + "; ".join(said))
    write(axes, 2, 10 * height - 4, title, fontsize=12, fontweight="bold")
    for i, row in enumerate(rows):
        y = 10 * height - 11 - 4.6 * i
        write(axes, 2, y + 1.5, f"{i + 1}  {row['label']}", fontsize=8.5)
        end = _strip(axes, 14, y, row["tokens"], 70)
        write(axes, end + 1, y + 1.5, same[i], fontsize=8.5, color=theme().faint)
    return picture


def _strip(axes: Axes, x: float, y: float, tokens: Sequence[str], room: float) -> float:
    """Tokens as boxes side by side, as many as fit; returns where the strip ends."""
    start = x
    for i, token in enumerate(tokens):
        label = token.replace(" ", "\u2423").replace("\n", "\u21b5").replace("\uff5c", "|")
        width = 0.66 * len(label) + 1.2
        if x + width > start + room - 2:
            write(axes, x + 0.5, y + 1.5, "\u2026")
            return x + 2
        box(axes, x, y, width, 3, (SLATE, SAND)[i % 2], label, family="monospace", fontsize=7.8)
        x += width + 0.25
    return x


# ---- kernels ---------------------------------------------------------------------------------------------


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
