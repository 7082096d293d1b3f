"""The configuration of a DeepSeek-V4.1-Flash or V4-Flash model, under the names of `config.json`.

A V4.1 file is nested (`text_config` inside, top-level fields win), a V4 file is flat; `ModelConfig.from_dict`
turns both into one flat, frozen dataclass and refuses what no loader could run.

Errors: ConfigError, with the field, what was found and what is needed.
Source: model.md section 2; presets of section 7.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

PRESETS_DIR = Path(__file__).parent / "presets"


class ConfigError(ValueError):
    """A configuration that no model can be built from; the message names the field and the fix."""


@dataclass(frozen=True)
class ModelConfig:
    """Fields of `config.json`, normalised over both families (model.md 2.2).

    Sizes in elements, ids 0-based.
    """

    model_type: str = "deepseek_v41"
    vocab_size: int = 129280
    hidden_size: int = 5120
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    num_key_value_heads: int = 1
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1280
    o_groups: int = 8
    o_lora_rank: int = 1024
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = ()
    kv_source_layer_ids: tuple[int, ...] = ()
    index_source_layer_ids: tuple[int, ...] = ()
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    candidate_source_layer_id: int = -1
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 8
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 1048576
    rms_norm_eps: float = 1e-20
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    n_routed_experts: int = 384
    n_shared_experts: int = 1
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 2304
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    gate_temp: float = 1.0
    swiglu_limit: float = 10.0
    num_hash_layers: int = 0
    hidden_act: str = "silu"
    attention_bias: bool = False
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 0
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 0
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int | None = None
    dspark_num_experts_per_tok: int | None = None
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int | None = 2
    image_token_id: int | None = None
    weight_block_size: tuple[int, int] = (32, 32)
    quantized: bool = True
    expert_dtype: str = "fp4"
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    # ---- reading -------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelConfig:
        """Normalise the contents of a `config.json`; raises ConfigError."""
        flat = dict(raw.get("text_config") or {})
        flat |= {k: v for k, v in raw.items()
                 if k not in ("text_config", "vision_config", "quantization_config")}
        flat["model_type"] = raw.get("model_type", flat.get("model_type", "deepseek_v41"))
        if flat["model_type"] not in ("deepseek_v41", "deepseek_v4"):
            raise ConfigError(f"model_type is {flat['model_type']!r}; "
                              "dskit runs deepseek_v41 and deepseek_v4")
        dtype = str(flat.get("dtype") or flat.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        if dtype not in ("bfloat16", "float32"):
            raise ConfigError(f"dtype is {dtype!r}; the released format is bfloat16")
        flat |= _quantization(raw)
        if flat["model_type"] == "deepseek_v4":
            flat = _v4_sources(flat)
        known = {f.name for f in fields(cls)} - {"raw"}
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in flat.items()
                  if k in known and v is not None}
        config = cls(**values, raw=raw)
        config.validate()
        return config

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read `config.json` of a checkpoint folder; raises ConfigError, also for unreadable JSON."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ConfigError(f"{path} does not exist; a checkpoint folder needs a config.json")
        try:
            return cls.from_dict(json.loads(path.read_text()))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from None
        except TypeError as error:
            raise ConfigError(f"{path}: a field has the wrong type: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The released nesting of `config.json` for V4.1, flat for V4; `from_dict` reads it back."""
        if self.raw:
            return self.raw
        inner = {f.name: getattr(self, f.name) for f in fields(self)
                 if f.name not in (*_TOP, "raw", "quantized", "weight_block_size", "expert_dtype")}
        inner = {k: list(v) if isinstance(v, tuple) else v for k, v in inner.items() if v is not None}
        inner.pop("model_type")
        quant = {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
                 "weight_block_size": list(self.weight_block_size), "expert_dtype": self.expert_dtype}
        name = "DeepseekV41ForCausalLM" if self.is_v41 else "DeepseekV4ForCausalLM"
        top = {"architectures": [name], "model_type": self.model_type, "dtype": "bfloat16"}
        top |= {k: getattr(self, k) for k in _TOP if getattr(self, k) is not None}
        top |= {"quantization_config": quant} if self.quantized else {}
        return top | ({"text_config": {"model_type": "deepseek_v41_text"} | inner} if self.is_v41 else inner)

    def without_draft(self) -> ModelConfig:
        """The same model before a draft was trained for it."""
        return self.replace(num_nextn_predict_layers=0, dspark_block_size=0,
                            compress_ratios=self.compress_ratios[: self.num_hidden_layers])

    def replace(self, **changes: Any) -> ModelConfig:
        """A validated copy with some fields changed."""
        config = replace(self, **changes, raw={})
        config.validate()
        return config

    # ---- roles of the layers (model.md 1.3) ----------------------------------------------------------------

    @property
    def is_v41(self) -> bool:
        """True for V4.1: shifted mHC reads, shared global KV, FP4 caches."""
        return self.model_type == "deepseek_v41"

    @cached_property
    def split(self) -> int:
        """First decoder layer (the first of ratio 1); `num_hidden_layers` when there is none."""
        return next((i for i, r in enumerate(self.compress_ratios[: self.num_hidden_layers])
                     if r == 1 and self.is_v41), self.num_hidden_layers)

    def ratio(self, layer: int) -> int:
        """Tokens per entry of the global cache that this layer reads; 0 for window-only layers."""
        return self.compress_ratios[layer] if layer < len(self.compress_ratios) else 0

    def kv_source(self, layer: int) -> int:
        """The layer whose global KV this layer reads: the largest KV source at or before it."""
        return max((s for s in self.kv_source_layer_ids if s <= layer), default=-1)

    def index_source(self, layer: int) -> int:
        """The layer whose selection this layer reads: the largest index source at or before it."""
        return max((s for s in self.index_source_layer_ids if s <= layer), default=-1)

    @property
    def activation_group(self) -> int:
        """Channels per activation scale in front of FP8 and FP4 weights: the weight block's width."""
        return self.weight_block_size[1]

    @property
    def draft_experts(self) -> tuple[int, int]:
        """(routed experts, experts per token) of a draft stage."""
        return (self.dspark_n_routed_experts or self.n_routed_experts,
                self.dspark_num_experts_per_tok or self.num_experts_per_tok)

    # ---- validation (model.md 2.5) -------------------------------------------------------------------------

    def validate(self) -> None:
        """Raise ConfigError for the first rule of model.md 2.2 and 2.5 that does not hold."""
        for name in _POSITIVE:
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be a positive integer")
        self._validate_widths()
        self._validate_layers()
        if self.engram_layer_ids:
            self._validate_engram()
        if self.dspark_block_size and self.num_nextn_predict_layers and not self.dspark_target_layer_ids:
            raise ConfigError("dspark_target_layer_ids is empty; a draft head needs the layers it taps")

    def _validate_widths(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; {rule}")

        need(self.num_key_value_heads == 1, "num_key_value_heads",
             "one shared KV vector is what the model has: 1")
        need(self.n_shared_experts == 1, "n_shared_experts", "it must be 1")
        need(self.num_attention_heads % self.o_groups == 0, "o_groups",
             f"it must divide num_attention_heads = {self.num_attention_heads}")
        need(self.qk_rope_head_dim % 2 == 0 and self.qk_rope_head_dim < self.head_dim, "qk_rope_head_dim",
             f"it must be even and below head_dim = {self.head_dim}")
        need(not self.index_source_layer_ids or self.index_head_dim > self.qk_rope_head_dim, "index_head_dim",
             f"it must exceed qk_rope_head_dim = {self.qk_rope_head_dim}")
        need(self.num_experts_per_tok <= self.n_routed_experts, "num_experts_per_tok",
             f"it must not exceed n_routed_experts = {self.n_routed_experts}")
        need(self.scoring_func == "sqrtsoftplus", "scoring_func", "dskit knows sqrtsoftplus")
        need(self.hidden_act == "silu", "hidden_act", "dskit knows silu")
        need(not self.attention_bias, "attention_bias", "no linear layer has a bias")
        need(not self.tie_word_embeddings, "tie_word_embeddings", "embedding and head are separate tensors")
        if self.is_v41 and self.quantized:
            for name in ("hidden_size", "head_dim", "q_lora_rank", "o_lora_rank", "moe_intermediate_size",
                         "index_head_dim"):
                need(getattr(self, name) % 32 == 0, name, "the 32-wide scale groups need a multiple of 32")

    def _validate_layers(self) -> None:
        layers, drafts = self.num_hidden_layers, self.num_nextn_predict_layers
        ratios = self.compress_ratios
        if len(ratios) != layers + drafts and (self.is_v41 or len(ratios) < layers):
            raise ConfigError(f"compress_ratios has {len(ratios)} entries; num_hidden_layers + "
                              f"num_nextn_predict_layers = {layers} + {drafts} are needed")
        if any(ratios[layers:]):
            raise ConfigError(f"compress_ratios ends with {ratios[layers:]}; "
                              "draft stages are window-only (0)")
        allowed = (0, 1, 2) if self.is_v41 else None
        for layer, ratio in enumerate(ratios[:layers]):
            if ratio < 0 or (allowed and ratio not in allowed):
                raise ConfigError(f"compress_ratios[{layer}] is {ratio}; "
                                  f"allowed are {allowed or '0 and above'}")
            if ratio:
                self._validate_sources(layer, ratio)
        for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids",
                     "dspark_target_layer_ids"):
            outside = [i for i in getattr(self, name) if not 0 <= i < layers]
            if outside:
                raise ConfigError(f"{name} holds {outside[0]}; layers are 0 to {layers - 1}")
        candidate = self.candidate_source_layer_id
        if candidate >= 0:
            if candidate not in self.index_source_layer_ids:
                raise ConfigError(f"candidate_source_layer_id is {candidate}; it must be one of "
                                  f"index_source_layer_ids = {self.index_source_layer_ids}")
            stray = [i for i in self.index_source_layer_ids
                     if i > candidate and self.kv_source(i) != self.kv_source(candidate)]
            if stray:
                raise ConfigError(f"index_source_layer_ids holds {stray[0]}, which reads another global KV "
                                  f"than the candidate source {candidate}")

    def _validate_sources(self, layer: int, ratio: int) -> None:
        source = self.kv_source(layer)
        if source < 0 or self.ratio(source) != ratio:
            raise ConfigError(f"compress_ratios[{layer}] is {ratio}, but its KV source "
                              f"{source if source >= 0 else 'does not exist'}: kv_source_layer_ids needs "
                              f"a source at or before layer {layer} with the same ratio")
        if self.is_v41 and self.index_source(layer) < source:
            raise ConfigError(f"index_source_layer_ids has no source between layers {source} and {layer}: "
                              "a new global cache always comes with a new selection")

    def _validate_engram(self) -> None:
        if self.engram_max_ngram_size < 2:
            raise ConfigError(f"engram_max_ngram_size is {self.engram_max_ngram_size}; it must be at least 2")
        if self.engram_head_dim % 32:
            raise ConfigError(f"engram_head_dim is {self.engram_head_dim}; it must be a multiple of 32")
        if max(self.engram_layer_ids) >= self.split:
            raise ConfigError(f"engram_layer_ids holds {max(self.engram_layer_ids)}; Engram must lie before "
                              f"the first decoder layer {self.split}")
        if len(self.engram_num_embeddings) != len(self.engram_layer_ids):
            raise ConfigError(f"engram_num_embeddings has {len(self.engram_num_embeddings)} entries for "
                              f"{len(self.engram_layer_ids)} engram layers")
        if not 1 <= self.engram_compressed_vocab_size <= self.vocab_size:
            raise ConfigError(f"engram_compressed_vocab_size is {self.engram_compressed_vocab_size}; it must "
                              f"lie between 1 and vocab_size = {self.vocab_size}")
        for layer, rows, primes in zip(self.engram_layer_ids, self.engram_num_embeddings, self.engram_primes,
                                       strict=True):
            total = sum(sum(size) for size in primes)
            if rows != total:
                raise ConfigError(f"engram_num_embeddings of layer {layer} is {rows}; its primes sum to "
                                  f"{total}: a wrong size rehashes the whole table")

    @cached_property
    def engram_primes(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Rows per hash column, `[engram layer][n-gram size - 2][head]` (model.md 3.10.2)."""
        used: set[int] = set()
        layers = []
        for _ in self.engram_layer_ids:
            sizes = []
            for _ in range(2, self.engram_max_ngram_size + 1):
                prime, heads = self.engram_vocab_size - 1, []
                for _ in range(self.engram_n_heads):
                    prime = _next_prime(prime, used)
                    used.add(prime)
                    heads.append(prime)
                sizes.append(tuple(heads))
            layers.append(tuple(sizes))
        return tuple(layers)


_TOP = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
_POSITIVE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
             "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window", "hc_mult",
             "hc_sinkhorn_iters", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
             "max_position_embeddings", "index_topk", "index_n_heads", "index_head_dim",
             "candidate_block_size")


def _quantization(raw: dict[str, Any]) -> dict[str, Any]:
    quant = raw.get("quantization_config")
    if quant is None:
        block = (32, 32) if "text_config" in raw else (128, 128)
        return {"quantized": False, "weight_block_size": block}
    if quant.get("quant_method") != "fp8":
        raise ConfigError(f"quantization_config.quant_method is {quant.get('quant_method')!r}; "
                          "the release has 'fp8'")
    if quant.get("scale_fmt", "ue8m0") != "ue8m0":
        raise ConfigError(f"quantization_config.scale_fmt is {quant['scale_fmt']!r}; the release has 'ue8m0'")
    expert = quant.get("expert_dtype", raw.get("expert_dtype", "fp4"))
    if expert not in ("fp4", "fp8"):
        raise ConfigError(f"expert_dtype is {expert!r}; dskit reads fp4 and fp8 experts")
    return {"quantized": True, "weight_block_size": tuple(quant.get("weight_block_size", (128, 128))),
            "expert_dtype": expert}


def _v4_sources(flat: dict[str, Any]) -> dict[str, Any]:
    """V4 names no sources: every layer with a ratio compresses its own, every ratio-4 layer selects.

    Draft stages are counted by the ratios beyond the layers: V4 files say 1 where the checkpoint has 3.
    """
    if "layer_types" in flat and "compress_ratios" not in flat:
        flat = _from_transformers(flat)
    layers = flat.get("num_hidden_layers", 43)
    ratios = list(flat.get("compress_ratios") or [])
    drafts = max(len(ratios) - layers, 0) if flat.get("dspark_block_size") else 0
    ratios = ratios[: layers + drafts]
    return {"rms_norm_eps": 1e-6, "pad_token_id": None} | flat | {
        "compress_ratios": ratios, "num_nextn_predict_layers": drafts,
        "kv_source_layer_ids": [i for i, r in enumerate(ratios[:layers]) if r],
        "index_source_layer_ids": flat.get("index_source_layer_ids")
        or [i for i, r in enumerate(ratios[:layers]) if r == 4]}


def _from_transformers(flat: dict[str, Any]) -> dict[str, Any]:
    """The spelling of transformers' V4 configuration: layer types, rates by type, nested rotary settings."""
    rates = {"sliding_attention": 0, **(flat.get("compress_rates") or {})}
    unknown = [kind for kind in flat["layer_types"] if kind not in rates]
    if unknown:
        raise ConfigError(f"layer_types holds {unknown[0]!r}, which compress_rates does not name: "
                          f"{sorted(rates)}")
    flat = flat | {
        "compress_ratios": [rates[kind] for kind in flat["layer_types"]],
        "index_source_layer_ids": [i for i, kind in enumerate(flat["layer_types"])
                                   if kind == "compressed_sparse_attention"],
        "num_hash_layers": (flat.get("mlp_layer_types") or []).count("hash_moe")}
    if "qk_rope_head_dim" not in flat and flat.get("partial_rotary_factor"):
        flat["qk_rope_head_dim"] = int(flat["head_dim"] * flat["partial_rotary_factor"])
    rope = flat.get("rope_parameters") or {}
    if "compress" not in rope:
        return flat
    main, compress = rope.get("main", {}), rope["compress"]
    if compress.get("attention_factor") not in (None, 1, 1.0):
        raise ConfigError(f"rope_parameters.compress.attention_factor is {compress['attention_factor']}; "
                          "the model scales no rotation: 1.0")
    kind = compress.get("rope_type", compress.get("type", "default"))
    return flat | {"rope_theta": main.get("rope_theta", flat.get("rope_theta", 10000.0)),
                   "compress_rope_theta": compress.get("rope_theta",
                                                      flat.get("compress_rope_theta", 160000.0)),
                   "rope_scaling": None if kind == "default" else compress}


def _next_prime(start: int, used: set[int]) -> int:
    candidate = start + 1
    while candidate in used or not _is_prime(candidate):
        candidate += 1
    return candidate


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


# ---- presets (model.md 7) ----------------------------------------------------------------------------------

PRESETS = ("tiny", "odd", "demo", "slice", "slice:N", "flash", "v4-flash")


def preset(name: str) -> ModelConfig:
    """The configuration of a preset; `slice:N` has the widths of `flash` in N layers. Raises ConfigError."""
    stem, _, layers = name.partition(":")
    if stem == "slice" and (layers.isdecimal() or name == "slice"):
        return _slice(int(layers or 6))
    if name == "demo":
        return ModelConfig.from_folder(PRESETS_DIR / "demo")
    if name not in PRESETS or name == "slice:N":
        raise ConfigError(f"no preset is called {name!r}; presets are {', '.join(PRESETS)}")
    return ModelConfig.from_dict(json.loads((PRESETS_DIR / f"{name}.json").read_text()))


def _slice(layers: int) -> ModelConfig:
    """`flash` with few layers in the same roles, and an Engram table that one GPU holds (model.md 7.3)."""
    if layers < 4:
        raise ConfigError(f"slice:{layers} is too short; the roles of the layers need at least 4")
    paired = (layers - 1) // 2  # layers of ratio 2
    first = 1 + paired  # first layer of ratio 1
    sources = (*range(1, first, 6), first)
    return preset("flash").replace(
        num_hidden_layers=layers, compress_ratios=(0,) + (2,) * paired + (1,) * (layers - first) + (0,),
        kv_source_layer_ids=sources,
        index_source_layer_ids=sources + tuple(range(first, layers, 2 if layers == 6 else 4))[1:],
        candidate_source_layer_id=first, engram_layer_ids=(0,), engram_vocab_size=250007,
        engram_num_embeddings=(6003388,), num_nextn_predict_layers=1,
        dspark_target_layer_ids=tuple(range(layers - 3, layers)))
