"""The whole model as one drawing, from its configuration."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from dskit.config import ModelConfig
from dskit.viz.figures.page import BLUE, SAND, SLATE, STONE, YELLOW, Picture, canvas, theme
from dskit.viz.figures.pieces import arrow, box, streams, write

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
