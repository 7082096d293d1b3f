"""Which released tensor a stored tensor is, whatever its writer called it.

Idea: one list of spellings, applied in order, turns the names of third-party V4.1 files and of transformers'
own DeepSeek V4 into the released ones; released names pass through unchanged. transformers stacks the experts
of a layer in one tensor, so a stored tensor may be many released ones: each is a part of it.

    model.layers.3.self_attn.q_a_proj.weight     -> layers.3.attn.wq_a.weight
    layers.3.mlp.experts.gate_up_proj [E, 2I, D] -> layers.3.ffn.experts.{e}.w1.weight [e, :I], .w3 [e, I:]

Shapes: a part is an index into the stored tensor, or None for all of it.
Errors: none; a name that nothing matches comes back as it is, and the reader refuses it.
Source: model.md 4.2, 4.4, 6.1.
"""

from __future__ import annotations

import re

from dskit.config import ModelConfig

Part = tuple[int | slice, ...] | None

_SPELLINGS = [(re.compile(pattern), name) for pattern, name in (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."), (r"^lm_head\.", "head."), (r"^hc_head\.hc_", "hc_head_"),
    (r"\.self_attn\.", ".attn."), (r"\.mlp\.", ".ffn."),
    (r"\.input_layernorm\.", ".attn_norm."), (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.compressor\.indexer\.(kv_proj|gate_proj|kv_norm|position_bias)", r".indexer.compressor.\1"),
    (r"\.compressor\.indexer\.", ".indexer."), (r"\.scorer\.", "."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."), (r"\.position_bias$", ".ape"),
    (r"\.attn\.norm\.", ".attn.kv_norm."),  # how transformers 5.24 writes it
    (r"\.(shared_experts|experts\.\d+)\.gate_proj\.", r".\1.w1."),
    (r"\.(shared_experts|experts\.\d+)\.down_proj\.", r".\1.w2."),
    (r"\.(shared_experts|experts\.\d+)\.up_proj\.", r".\1.w3."),
    (r"\.q_a_proj\.", ".wq_a."), (r"\.q_b_proj\.", ".wq_b."), (r"\.q_a_(layer)?norm\.", ".q_norm."),
    (r"\.kv_proj\.", ".wkv."), (r"\.gate_proj\.", ".wgate."),
    (r"\.o_a_proj\.", ".wo_a."), (r"\.o_b_proj\.", ".wo_b."), (r"\.sinks$", ".attn_sink"),
    (r"\.e_score_correction_bias$", ".bias"), (r"\.weight_scale(_inv)?$", ".scale"))]
_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)$")
_UNUSED = re.compile(r"(vision|aligner)\.|image_(start|end|newline)$|mtp\.\d+\.(embed|head)\.weight$"
                     r"|.*inv_freq$")


def released(stored: str, config: ModelConfig) -> list[tuple[str, Part]]:
    """The released tensors that a stored tensor holds, each with its part of it."""
    for pattern, name in _SPELLINGS:
        stored = pattern.sub(name, stored)
    if not (stacked := _STACKED.match(stored)):
        return [(stored, None)]
    at, kind = stacked.groups()
    experts, width = config.n_routed_experts, config.moe_intermediate_size
    if kind == "down_proj":
        return [(f"{at}.{e}.w2.weight", (e,)) for e in range(experts)]
    return [(f"{at}.{e}.{name}.weight", (e, rows)) for e in range(experts)
            for name, rows in (("w1", slice(None, width)), ("w3", slice(width, None)))]


def unused(name: str) -> bool:
    """True for tensors that the text model has no use for: vision, ties of the draft, rotary tables."""
    return _UNUSED.match(name) is not None
