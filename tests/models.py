"""Small random models for tests: configurations with awkward sizes, and checkpoints in the released format.

Weights are drawn, packed and unpacked here without any help of dskit, so that a loader has something to be
wrong against. What a trivial initialisation would hide is drawn on purpose: mixes far from the identity, norm
gains away from 1, heads that are each other's opposites.

Shapes: names, dtypes and shapes of model.md 4.2 (V4: 6.2); one safetensors file per checkpoint.
Errors: none of its own.
Source: model.md sections 2, 4, 7.1, 9 and appendix B.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.oracle import E2M1, Net, e2m1, engram_primes, pow2ceil

# ---- configurations --------------------------------------------------------------------------------------


def flat(raw: dict[str, Any]) -> SimpleNamespace:
    """The fields of a config.json as attributes, defaults filled in, V4's implied sources spelled out."""
    values = {"engram_layer_ids": [], "candidate_source_layer_id": -1, "gate_temp": 1.0, "num_hash_layers": 0,
              "dspark_target_layer_ids": [], "dspark_n_routed_experts": None, "image_token_id": None,
              "dspark_num_experts_per_tok": None, "num_nextn_predict_layers": 0, "rope_scaling": None}
    values |= raw.get("text_config", {})
    values |= {k: v for k, v in raw.items() if k not in ("text_config", "quantization_config")}
    block = 32 if "text_config" in raw else 128
    values["weight_block_size"] = raw.get("quantization_config", {}).get("weight_block_size", [block, block])
    if "kv_source_layer_ids" not in values:
        ratios = values["compress_ratios"][: values["num_hidden_layers"]]
        values["kv_source_layer_ids"] = [i for i, r in enumerate(ratios) if r]
        values["index_source_layer_ids"] = [i for i, r in enumerate(ratios) if r == 4]
    return SimpleNamespace(**values)


def random_v41(seed: int) -> dict[str, Any]:
    """A V4.1 config.json whose sizes differ from one another and divide as little as the formats allow."""
    r = torch.Generator().manual_seed(seed)

    def pick(*options):
        return options[int(torch.randint(len(options), (), generator=r))]

    layers = pick(5, 6, 7)
    first = pick(0, 1, 2)  # window-only layers
    pairs = pick(1, 2)  # ratio-2 layers
    second = first + pairs
    later = [l for l in range(second + 1, layers) if pick(True, False)]
    stages = pick(0, 1, 2)
    groups = pick(1, 2, 3)
    engrams = sorted({pick(*range(second)), pick(*range(second))})
    text = {
        "model_type": "deepseek_v41_text", "vocab_size": pick(131, 200), "hidden_size": pick(96, 160),
        "num_hidden_layers": layers, "num_attention_heads": groups * pick(1, 2), "num_key_value_heads": 1,
        "head_dim": pick(32, 64, 96), "qk_rope_head_dim": pick(6, 14, 20), "q_lora_rank": pick(32, 64),
        "o_groups": groups, "o_lora_rank": 32, "sliding_window": pick(1, 3, 7, 11),
        "compress_ratios": [0] * first + [2] * pairs + [1] * (layers - second) + [0] * stages,
        "kv_source_layer_ids": [first, second], "index_source_layer_ids": [first, second, *later],
        "index_n_heads": pick(2, 4), "index_head_dim": pick(32, 64), "index_topk": pick(3, 5, 9),
        "candidate_source_layer_id": pick(second, second, -1), "candidate_topk_blocks": pick(2, 3, 5),
        "candidate_block_size": pick(2, 3, 5), "rope_theta": 10000, "compress_rope_theta": 160000,
        "rope_scaling": {"rope_type": "yarn", "factor": pick(4, 16), "beta_fast": 32, "beta_slow": 1,
                         "original_max_position_embeddings": pick(16, 48, 500)},
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-20, "hc_mult": pick(2, 3, 4, 5),
        "hc_sinkhorn_iters": pick(1, 3, 20), "hc_eps": 1e-6, "n_routed_experts": pick(5, 7),
        "n_shared_experts": 1, "num_experts_per_tok": pick(1, 2, 3),
        "moe_intermediate_size": pick(32, 64, 128),
        "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": pick(True, False),
        "routed_scaling_factor": 1.5, "swiglu_limit": pick(0.0, 0.5, 10.0), "hidden_act": "silu",
        "engram_layer_ids": engrams, "engram_max_ngram_size": pick(2, 3, 4),
        "engram_vocab_size": pick(20, 51), "engram_n_heads": pick(1, 2, 3), "engram_head_dim": 32,
        "engram_pad_token_id": 2, "engram_compressed_vocab_size": pick(50, 101),
        "num_nextn_predict_layers": stages, "dspark_block_size": pick(2, 3), "dspark_noise_token_id": 5,
        "dspark_target_layer_ids": [layers - 1], "dspark_markov_rank": 8, "dspark_n_routed_experts": 3,
        "dspark_num_experts_per_tok": 2,
    }
    text["engram_num_embeddings"] = [sum(map(sum, sizes)) for sizes in engram_primes(SimpleNamespace(**text))]
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
                    "weight_block_size": [32, 32], "expert_dtype": "fp4"}
    return {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16",
            "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "image_token_id": 130,
            "quantization_config": quantization, "text_config": text}


# ---- drawing ---------------------------------------------------------------------------------------------


Layout = dict[str, tuple[str, tuple[int, ...]]]


def layout(c: Any) -> Layout:
    """Format and shape of every tensor: "fp8" blocks, "fp4" groups, "row" (Engram), or the stored dtype."""
    D, n = c.hidden_size, c.hc_mult
    out = {"embed.weight": ("bf16", (c.vocab_size, D)), "head.weight": ("bf16", (c.vocab_size, D)),
           "norm.weight": ("bf16", (D,))}
    if c.model_type == "deepseek_v4":
        out |= {"hc_head_fn": ("fp32", (n, n * D)), "hc_head_base": ("fp32", (n,)),
                "hc_head_scale": ("fp32", (1,))}
    for l in range(c.num_hidden_layers):
        out |= block_layout(c, f"layers.{l}.", c.n_routed_experts, l < c.num_hash_layers)
        out |= memory_layout(c, l)
        if l in c.engram_layer_ids:
            out |= engram_layout(c, l)
    for s in range(c.num_nextn_predict_layers):
        out |= block_layout(c, f"mtp.{s}.", c.dspark_n_routed_experts or c.n_routed_experts, False)
    if c.num_nextn_predict_layers:
        last, rank = f"mtp.{c.num_nextn_predict_layers - 1}.", c.dspark_markov_rank
        out |= {"mtp.0.main_proj": ("fp8", (D, D * len(c.dspark_target_layer_ids))),
                "mtp.0.main_norm.weight": ("bf16", (D,)), last + "norm.weight": ("bf16", (D,)),
                last + "markov_head.embed.weight": ("bf16", (c.vocab_size, rank)),
                last + "markov_head.head.weight": ("bf16", (c.vocab_size, rank)),
                last + "confidence_head.proj.weight": ("bf16", (1, D + rank))}
    return out


def engram_layout(c: Any, l: int) -> Layout:
    D, n, at = c.hidden_size, c.hc_mult, f"layers.{l}.engram."
    rows = c.engram_num_embeddings[list(c.engram_layer_ids).index(l)]
    width = c.engram_n_heads * (c.engram_max_ngram_size - 1) * c.engram_head_dim
    return {at + "embed": ("row", (rows, c.engram_head_dim)), at + "wkv": ("fp8", ((n + 1) * D, width)),
            at + "q_weight": ("bf16", (n, D)), at + "k_weight": ("bf16", (n, D))}


def block_layout(c: Any, at: str, experts: int, hashed: bool) -> Layout:
    """What every backbone layer and draft stage has."""
    D, n, A, d, I = c.hidden_size, c.hc_mult, c.num_attention_heads, c.head_dim, c.moe_intermediate_size
    attn, ffn = at + "attn.", at + "ffn."
    out = {attn + "wq_a": ("fp8", (c.q_lora_rank, D)), attn + "q_norm.weight": ("bf16", (c.q_lora_rank,)),
           attn + "wq_b": ("fp8", (A * d, c.q_lora_rank)), attn + "wkv": ("fp8", (d, D)),
           attn + "kv_norm.weight": ("bf16", (d,)), attn + "attn_sink": ("fp32", (A,)),
           attn + "wo_a": ("fp8", (c.o_groups * c.o_lora_rank, A * d // c.o_groups)),
           attn + "wo_b": ("fp8", (D, c.o_groups * c.o_lora_rank)),
           at + "attn_norm.weight": ("bf16", (D,)), at + "ffn_norm.weight": ("bf16", (D,)),
           ffn + "gate.weight": ("bf16", (experts, D))}
    for kind in ("attn", "ffn"):
        hc = f"{at}hc_{kind}_"
        out |= {hc + "fn": ("fp32", ((2 + n) * n, n * D)), hc + "base": ("fp32", ((2 + n) * n,)),
                hc + "scale": ("fp32", (3,))}
    if hashed:
        out[ffn + "gate.tid2eid"] = ("int64", (c.vocab_size, c.num_experts_per_tok))
    else:
        out[ffn + "gate.bias"] = ("fp32", (experts,))
    if c.model_type == "deepseek_v41":
        out[ffn + "gate.bias_vl"] = ("fp32", (experts,))
    for name, fmt in [("shared_experts", "fp8")] + [(f"experts.{e}", "fp4") for e in range(experts)]:
        mlp = ffn + name
        out |= {mlp + ".w1": (fmt, (I, D)), mlp + ".w3": (fmt, (I, D)), mlp + ".w2": (fmt, (D, I))}
    return out


def memory_layout(c: Any, l: int) -> Layout:
    """Compressor and indexer of the layers that own one."""
    D, d, di, r, at = c.hidden_size, c.head_dim, c.index_head_dim, c.compress_ratios[l], f"layers.{l}.attn."
    v4, out = c.model_type == "deepseek_v4", {}
    if l in c.kv_source_layer_ids:
        out |= compressor_layout(at + "compressor.", D, d, r, v4)
        if not v4:
            out |= {at + "indexer.wk.weight": ("bf16", (di, d)),
                    at + "indexer.k_norm.weight": ("bf16", (di,))}
    if l in c.index_source_layer_ids:
        out |= {at + "indexer.wq_b": ("fp8", (c.index_n_heads * di, c.q_lora_rank)),
                at + "indexer.weights_proj.weight": ("bf16", (c.index_n_heads, D))}
        if v4:
            out |= compressor_layout(at + "indexer.compressor.", D, di, r, v4)
    return out


def compressor_layout(at: str, D: int, d: int, r: int, v4: bool) -> Layout:
    width = 2 * d if v4 and r == 4 else d
    out = {at + "wkv.weight": ("bf16", (width, D)), at + "norm.weight": ("bf16", (d,))}
    if r > 1:
        out[at + "wgate.weight"] = ("bf16", (width, D))
    return out | ({at + "ape": ("fp32", (r, width))} if v4 else {})


def draw(c: Any, seed: int = 0, *, calm: bool = False) -> dict[str, Tensor]:
    """Every tensor as it is stored. `calm`: router biases far apart: no rounding changes an expert."""
    r = torch.Generator().manual_seed(seed)
    stored: dict[str, Tensor] = {}
    for name, (fmt, shape) in layout(c).items():
        if fmt == "int64":
            choices = [torch.randperm(c.n_routed_experts, generator=r)[: shape[1]] for _ in range(shape[0])]
            stored[name] = torch.stack(choices)
            continue
        value = start(name, shape, r, calm)
        if name.endswith("indexer.wq_b"):  # opposite heads: no two entries tie at a score of 0 (model.md 9)
            half = value.view(c.index_n_heads // 2, 2, c.index_head_dim, -1)
            half[:, 1] = -half[:, 0]
        stored |= pack(name, value, fmt, c.weight_block_size)
    return stored


def start(name: str, shape: tuple[int, ...], r: torch.Generator, calm: bool) -> Tensor:
    """A float32 value to store: what matters is that nothing is trivial and nothing explodes."""
    noise = torch.randn(shape, generator=r)
    if "hc_" in name and name.endswith("_scale"):
        return 0.5 + 0.2 * noise
    if "hc_" in name and name.endswith("_base"):
        return noise
    if name.endswith("gate.bias") or name.endswith("gate.bias_vl"):
        return torch.randperm(shape[0], generator=r) * 4.0 if calm else 0.2 * noise
    if "norm" in name or name.endswith(("q_weight", "k_weight")):
        return 1 + 0.3 * noise
    if name.endswith(("attn_sink", "ape", "embed.weight", "engram.embed")):
        return noise
    return noise * shape[-1] ** -0.5


# ---- storing (model.md 4.3) ------------------------------------------------------------------------------


def pack(name: str, value: Tensor, fmt: str, block: list[int]) -> dict[str, Tensor]:
    """A weight in its stored form; the largest element of a block lies in the top binade of its format."""
    if fmt in ("bf16", "fp32"):
        return {name: value.to(torch.bfloat16 if fmt == "bf16" else torch.float32)}
    size = {"fp8": tuple(block), "fp4": (1, 32), "row": (1, 32)}[fmt]
    amax = value.abs()
    for axis in (0, 1):
        if size[axis] > 1:
            amax = torch.cat([part.amax(axis, keepdim=True) for part in amax.split(size[axis], axis)], axis)
    scale = pow2ceil(amax.clamp(min=1e-4) / (6 if fmt == "fp4" else 448))
    v = value / spread(scale, size, value.shape)
    if fmt == "fp4":
        codes = (e2m1(v)[..., None].abs() == torch.tensor(E2M1)).int().argmax(-1) + 8 * torch.signbit(v)
        packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)
    else:
        packed = v.to(torch.float8_e4m3fn)
    byte = (torch.log2(scale).round() + 127).to(torch.uint8)
    return {f"{name}.weight": packed, f"{name}.scale": byte.view(torch.float8_e8m0fnu)}


def spread(scale: Tensor, size: tuple[int, ...], shape: torch.Size) -> Tensor:
    """One scale per element."""
    return scale.repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)[: shape[0], : shape[1]]


def dense(c: Any, stored: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every tensor as numbers, under its own name."""
    out = {}
    for name, (fmt, shape) in layout(c).items():
        if fmt in ("bf16", "fp32", "int64"):
            out[name] = stored[name] if fmt == "int64" else stored[name].to(dtype)
            continue
        if f"{name}.scale" not in stored:
            out[f"{name}.weight"] = stored[f"{name}.weight"].to(dtype)
            continue
        size = {"fp8": tuple(c.weight_block_size), "fp4": (1, 32), "row": (1, 32)}[fmt]
        codes, byte = stored[f"{name}.weight"], stored[f"{name}.scale"].view(torch.uint8)
        if fmt == "fp4":
            table = torch.tensor([*E2M1, *(-v for v in E2M1)])
            codes = codes.view(torch.uint8).int()
            codes = torch.stack([table[codes & 15], table[codes >> 4]], -1).flatten(1)
        scale = torch.pow(2.0, byte.double() - 127)
        out[f"{name}.weight"] = (codes.double() * spread(scale, size, torch.Size(shape))).to(dtype)
    return out


def save(folder: Path, raw: dict[str, Any], stored: dict[str, Tensor]) -> Path:
    """A checkpoint folder in the released layout, in one shard."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    file = "model-00001-of-00001.safetensors"
    save_file({k: v.contiguous() for k, v in stored.items()}, folder / file)
    total = sum(v.numel() * v.element_size() for v in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(stored, file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def net(folder: Path, *, release: bool = False, dtype: torch.dtype = torch.float32) -> Net:
    """The oracle's view of a checkpoint folder."""
    c = flat(json.loads((folder / "config.json").read_text()))
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    return Net(dense(c, stored, dtype), c, release)


# ---- transformers as the oracle of V4 --------------------------------------------------------------------


def random_v4(seed: int) -> dict[str, Any]:
    """A flat V4 config.json of dense weights; window, ratios, top-k and groups do not divide one another."""
    r = torch.Generator().manual_seed(seed)

    def pick(*options):
        return options[int(torch.randint(len(options), (), generator=r))]

    layers, wide, groups = pick(3, 4, 5), pick(3, 6, 7, 9), pick(1, 2, 3)
    head = pick(32, 48, 80)
    ratios = [pick(0, 4, wide) for _ in range(layers)]
    ratios[pick(*range(layers))] = 4
    factor, start = pick(2, 16), pick(20, 64, 1000)
    return {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": "float32",
        "bos_token_id": 0, "eos_token_id": 1, "vocab_size": pick(61, 97), "hidden_size": pick(40, 56, 88),
        "num_hidden_layers": layers, "num_attention_heads": groups * pick(1, 2, 3), "num_key_value_heads": 1,
        "head_dim": head, "qk_rope_head_dim": head // pick(4, 8) // 2 * 2, "q_lora_rank": pick(20, 36),
        "o_groups": groups, "o_lora_rank": pick(12, 28), "sliding_window": pick(2, 5, 8, 11),
        "compress_ratios": ratios, "index_n_heads": 2, "index_head_dim": pick(32, 64),
        "index_topk": pick(1, 3, 5, 40), "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
        "max_position_embeddings": factor * start, "rms_norm_eps": 1e-6, "hc_mult": pick(2, 3, 4),
        "rope_scaling": {"type": "yarn", "factor": factor, "beta_fast": 32, "beta_slow": 1,
                         "original_max_position_embeddings": start},
        "hc_sinkhorn_iters": pick(1, 4, 20), "hc_eps": 1e-6, "n_routed_experts": pick(5, 7),
        "n_shared_experts": 1, "num_experts_per_tok": pick(2, 3), "moe_intermediate_size": pick(24, 44),
        "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
        "routed_scaling_factor": 1.5, "hidden_act": "silu",
        "swiglu_limit": pick(0.5, 10.0), "num_hash_layers": pick(0, 1, 2), "tie_word_embeddings": False,
    }


def transformers_v4(raw: dict[str, Any], seed: int = 0):
    """transformers' model of a `random_v4` config in float32, every parameter and buffer drawn."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention"}
    wide = next((r for r in raw["compress_ratios"] if r not in kinds), 128)
    other = ("architectures", "model_type", "torch_dtype", "compress_ratios", "rope_scaling", "topk_method",
             "num_hash_layers", "qk_rope_head_dim")
    hashed = raw["num_hash_layers"]
    scaling = {k: v for k, v in raw["rope_scaling"].items() if k != "type"} | {"rope_type": "yarn"}
    config = DeepseekV4Config(
        **{k: v for k, v in raw.items() if k not in other}, rope_parameters=scaling,
        partial_rotary_factor=(raw["qk_rope_head_dim"] + 0.5) / raw["head_dim"],
        layer_types=[kinds.get(r, "heavily_compressed_attention") for r in raw["compress_ratios"]],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": wide},
        mlp_layer_types=["hash_moe" if l < hashed else "moe" for l in range(raw["num_hidden_layers"])])
    assert config.qk_rope_head_dim == raw["qk_rope_head_dim"]
    model = DeepseekV4ForCausalLM(config).float().eval()
    r = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith("tid2eid"):
                for row in value:
                    row.copy_(torch.randperm(raw["n_routed_experts"], generator=r)[: len(row)])
            else:
                value.copy_(start_v4(name, value.shape, r))
            if name.endswith("indexer.q_b_proj.weight"):
                first, second = value.chunk(2)
                second.copy_(-first)
    return model


def start_v4(name: str, shape: torch.Size, r: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=r)
    if name.endswith("scale"):
        return 0.5 + 0.2 * noise
    if "norm" in name:
        return 1 + 0.3 * noise
    if name.endswith("e_score_correction_bias"):
        return 0.2 * noise
    if name.endswith(("base", "sinks", "position_bias", "embed_tokens.weight")):
        return noise
    return noise * shape[-1] ** -0.5


V4_NAMES = {  # transformers' spelling of each part -> the release's, applied in order
    "model.hc_head.hc_": "hc_head_", "model.embed_tokens": "embed", "lm_head": "head", "model.": "",
    "attn_hc.": "hc_attn_", "ffn_hc.": "hc_ffn_",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "compressor.indexer.scorer.weights_proj": "indexer.weights_proj",
    "compressor.indexer.q_b_proj": "indexer.wq_b",
    "compressor.indexer.kv_norm": "indexer.compressor.norm", "compressor.kv_norm": "compressor.norm",
    "compressor.indexer.": "indexer.compressor.", "position_bias": "ape", "self_attn": "attn", "mlp.": "ffn.",
    "q_a_proj": "wq_a", "q_b_proj": "wq_b", "q_a_norm": "q_norm", "o_a_proj": "wo_a", "o_b_proj": "wo_b",
    "sinks": "attn_sink", "e_score_correction_bias": "bias", "shared_experts.gate_proj": "shared_experts.w1",
    "shared_experts.up_proj": "shared_experts.w3", "shared_experts.down_proj": "shared_experts.w2",
    "kv_proj": "wkv", "gate_proj": "wgate",
}


def released_v4(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of transformers' V4 model under the released names."""
    out = {}
    for name, value in state.items():
        at = name.removeprefix("model.").replace("mlp.", "ffn.").rpartition(".experts.")[0]
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(value):
                out[f"{at}.experts.{e}.w1.weight"], out[f"{at}.experts.{e}.w3.weight"] = both.chunk(2)
        elif name.endswith("experts.down_proj"):
            out |= {f"{at}.experts.{e}.w2.weight": one for e, one in enumerate(value)}
        else:
            for theirs, ours in V4_NAMES.items():
                name = name.replace(theirs, ours)
            out[name] = value
    return out


# ---- comparing -------------------------------------------------------------------------------------------


def ids(raw: dict[str, Any], count: int, seed: int = 0, image_at: tuple[int, ...] = ()) -> list[int]:
    """Random token ids, with image tokens where asked."""
    c, r = flat(raw), torch.Generator().manual_seed(seed)
    found = torch.randint(3, c.vocab_size, (count,), generator=r).tolist()
    found = [3 if i == c.image_token_id else i for i in found]
    return [c.image_token_id if t in image_at else i for t, i in enumerate(found)]


def replaced(c: Any, **changes: Any) -> SimpleNamespace:
    """A copy of flat config fields with some changed."""
    return SimpleNamespace(**(vars(c) | changes))


def relative_rms(found: Tensor, wanted: Tensor) -> float:
    """RMS of the difference over the RMS of what is wanted."""
    found, wanted = found.double(), wanted.double()
    return ((found - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt()).item()
