"""What a checkpoint of the released format holds: name, storage format and shape of every tensor.

Idea: the config alone decides it. `layout` lists the weights as a reader thinks of them, numbers of some
shape; `spec` lists what lies in the files: a weight in FP8 or MXFP4 is two tensors there, codes and scales.

    fp8    e4m3 codes [N, K], E8M0 scales [ceil(N/b0), ceil(K/b1)]; blocks of 32x32 (V4.1) or 128x128 (V4)
    fp4    two e2m1 codes a byte, I8 [N, K/2], E8M0 scales [N, K/32]: the routed experts
    row    e4m3 codes [rows, Y], E8M0 scales [rows, Y/32]: the Engram tables
    bf16, fp32, int64    plain

Shapes: as listed; all weights are [out, in].
Errors: none; ModelConfig refused what has no layout.
Source: model.md 4.2, 4.3, 6.1, 6.2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dskit.config import ModelConfig

ROW_GROUP = (1, 32)  # elements per scale of fp4 weights and of Engram rows
PACKED = ("fp8", "fp4", "row")
NBYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4, "I64": 8}
DTYPES = {"fp8": "F8_E4M3", "row": "F8_E4M3", "fp4": "I8", "bf16": "BF16", "fp32": "F32", "int64": "I64"}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w[123])\.weight$")
Held = Callable[[int], list[int]]  # number of a layer's experts -> those that one rank holds, slot by slot


class Weight(NamedTuple):
    """One weight: its released name, storage format, and shape as numbers."""

    name: str
    fmt: str
    shape: tuple[int, ...]

    @property
    def scale_name(self) -> str:
        """Where the scales of a packed weight are stored."""
        return self.name.removesuffix("weight") + "scale"

    @property
    def table(self) -> bool:
        """Whether it is an Engram table, which may lie elsewhere than the model (place.Tables)."""
        return self.name.endswith("engram.embed.weight")


def spec(config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(safetensors dtype, shape) of every tensor of the checkpoint, scales right after their weights."""
    return {name: stored for weight in layout(config) for name, stored in stored_form(weight, config).items()}


def stored_form(weight: Weight, config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The one or two tensors that a weight is stored as."""
    name, fmt, shape = weight
    if fmt not in PACKED:
        return {name: (DTYPES[fmt], shape)}
    rows, cols = config.weight_block_size if fmt == "fp8" else ROW_GROUP
    scale = (-(-shape[0] // rows), -(-shape[1] // cols))
    codes = (shape[0], shape[1] // 2) if fmt == "fp4" else shape
    return {name: (DTYPES[fmt], codes), weight.scale_name: ("F8_E8M0", scale)}


def layout(config: ModelConfig, held: Held | None = None) -> Iterator[Weight]:
    """Every weight in the order of the files: embedding, layers, final norm and head, draft stages.

    held: leave the experts out that it does not name.
    """
    own = {n: set(held(n)) for n in (config.n_routed_experts, config.draft_experts[0])} if held else {}
    for weight in _all(config):
        expert = EXPERT.match(weight.name) if held else None
        n = config.draft_experts[0] if weight.name.startswith("mtp.") else config.n_routed_experts
        if expert and int(expert[2]) not in own[n]:
            continue
        plain = weight.fmt in PACKED and not config.quantized
        yield weight._replace(fmt="bf16") if plain else weight


def _all(config: ModelConfig) -> Iterator[Weight]:
    vocabulary, D = config.vocab_size, config.hidden_size
    yield Weight("embed.weight", "bf16", (vocabulary, D))
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}."
        yield from _block(config, at, config.n_routed_experts, hashed=layer < config.num_hash_layers)
        yield from _memory(config, at + "attn.", layer)
        if layer in config.engram_layer_ids:
            yield from _engram(config, at + "engram.", config.engram_layer_ids.index(layer))
    if not config.is_v41:
        yield from _collapse(config, "")
    yield Weight("norm.weight", "bf16", (D,))
    yield Weight("head.weight", "bf16", (vocabulary, D))
    yield from _drafts(config)


def _block(config: ModelConfig, at: str, experts: int, hashed: bool) -> Iterator[Weight]:
    """What every backbone layer and every draft stage has."""
    D, N, A, H = config.hidden_size, config.hc_mult, config.num_attention_heads, config.head_dim
    rank, groups, low = config.q_lora_rank, config.o_groups, config.o_lora_rank
    yield Weight(at + "attn.wq_a.weight", "fp8", (rank, D))
    yield Weight(at + "attn.q_norm.weight", "bf16", (rank,))
    yield Weight(at + "attn.wq_b.weight", "fp8", (A * H, rank))
    yield Weight(at + "attn.wkv.weight", "fp8", (H, D))
    yield Weight(at + "attn.kv_norm.weight", "bf16", (H,))
    yield Weight(at + "attn.attn_sink", "fp32", (A,))
    yield Weight(at + "attn.wo_a.weight", "fp8", (groups * low, A * H // groups))
    yield Weight(at + "attn.wo_b.weight", "fp8", (D, groups * low))
    for part in ("attn", "ffn"):
        yield Weight(f"{at}{part}_norm.weight", "bf16", (D,))
        yield Weight(f"{at}hc_{part}_fn", "fp32", ((2 + N) * N, N * D))
        yield Weight(f"{at}hc_{part}_base", "fp32", ((2 + N) * N,))
        yield Weight(f"{at}hc_{part}_scale", "fp32", (3,))
    yield from _experts(config, at + "ffn.", experts, hashed)


def _experts(config: ModelConfig, at: str, experts: int, hashed: bool) -> Iterator[Weight]:
    D, I = config.hidden_size, config.moe_intermediate_size
    yield Weight(at + "gate.weight", "bf16", (experts, D))
    if hashed:
        yield Weight(at + "gate.tid2eid", "int64", (config.vocab_size, config.num_experts_per_tok))
    else:
        yield Weight(at + "gate.bias", "fp32", (experts,))
    if config.is_v41:
        yield Weight(at + "gate.bias_vl", "fp32", (experts,))
    routed = [(f"experts.{e}", config.expert_dtype) for e in range(experts)]
    for name, fmt in [("shared_experts", "fp8"), *routed]:
        yield Weight(f"{at}{name}.w1.weight", fmt, (I, D))
        yield Weight(f"{at}{name}.w2.weight", fmt, (D, I))
        yield Weight(f"{at}{name}.w3.weight", fmt, (I, D))


def _memory(config: ModelConfig, at: str, layer: int) -> Iterator[Weight]:
    """Compressor and index key of a KV source, index query of an index source."""
    source, index = layer in config.kv_source_layer_ids, layer in config.index_source_layer_ids
    H, Y = config.head_dim, config.index_head_dim
    if source:
        yield from _compressor(config, at + "compressor.", layer, H)
    if source and index and config.is_v41:
        yield Weight(at + "indexer.wk.weight", "bf16", (Y, H))
        yield Weight(at + "indexer.k_norm.weight", "bf16", (Y,))
    elif source and index:
        yield from _compressor(config, at + "indexer.compressor.", layer, Y)
    if index:
        yield Weight(at + "indexer.wq_b.weight", "fp8", (config.index_n_heads * Y, config.q_lora_rank))
        yield Weight(at + "indexer.weights_proj.weight", "bf16", (config.index_n_heads, config.hidden_size))


def _compressor(config: ModelConfig, at: str, layer: int, width: int) -> Iterator[Weight]:
    """Ratio 1 has no gate; V4 adds a position bias, and twice the width where its entries overlap."""
    ratio = config.ratio(layer)
    overlaps = not config.is_v41 and layer in config.index_source_layer_ids
    out = width * 2 if overlaps else width
    yield Weight(at + "wkv.weight", "bf16", (out, config.hidden_size))
    if ratio > 1 or not config.is_v41:
        yield Weight(at + "wgate.weight", "bf16", (out, config.hidden_size))
    if not config.is_v41:
        yield Weight(at + "ape", "fp32", (ratio, out))
    yield Weight(at + "norm.weight", "bf16", (width,))


def _engram(config: ModelConfig, at: str, table: int) -> Iterator[Weight]:
    D, N, Y = config.hidden_size, config.hc_mult, config.engram_head_dim
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    yield Weight(at + "embed.weight", "row", (config.engram_num_embeddings[table], Y))
    yield Weight(at + "wkv.weight", "fp8", ((N + 1) * D, columns * Y))
    yield Weight(at + "q_weight", "bf16", (N, D))
    yield Weight(at + "k_weight", "bf16", (N, D))


def _collapse(config: ModelConfig, at: str) -> Iterator[Weight]:
    """V4's own read weights in front of the final norm."""
    N = config.hc_mult
    yield Weight(at + "hc_head_fn", "fp32", (N, N * config.hidden_size))
    yield Weight(at + "hc_head_base", "fp32", (N,))
    yield Weight(at + "hc_head_scale", "fp32", (1,))


def _drafts(config: ModelConfig) -> Iterator[Weight]:
    """The DSpark stages: the main projection on the first, norm and heads on the last."""
    stages, D, rank = config.num_nextn_predict_layers, config.hidden_size, config.dspark_markov_rank
    names = ("embed", "head") if config.is_v41 else ("markov_w1", "markov_w2")
    for stage in range(stages):
        at = f"mtp.{stage}."
        if stage == 0:
            yield Weight(at + "main_proj.weight", "fp8", (D, len(config.dspark_target_layer_ids) * D))
            yield Weight(at + "main_norm.weight", "bf16", (D,))
        yield from _block(config, at, config.draft_experts[0], hashed=False)
        if stage == stages - 1:
            if not config.is_v41:
                yield from _collapse(config, at)
            yield Weight(at + "norm.weight", "bf16", (D,))
            for name in names:
                yield Weight(f"{at}markov_head.{name}.weight", "bf16", (config.vocab_size, rank))
            yield Weight(at + "confidence_head.proj.weight", "bf16", (1, D + rank))
