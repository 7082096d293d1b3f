"""What a model would take on some GPUs, and the least time of its steps there, worked out without loading it.

Idea: the layout of a checkpoint says how many bytes each part has, the pools say what a cache takes, and a
step is no faster than its bytes over the memory's speed, or its arithmetic over the peak. Attention is data
parallel: each of G GPUs has all weights but the routed experts, of which it has 1/G, and its own requests.

    experts read in a step   E/G (1 - (1 - k/E)^rows) of a layer, for the rows of all GPUs
    exchange of a row        r = (G-1) (1 - (1-1/G)^k) other ranks; r (D + D/32) bytes there, r 2D back

Units: bytes; milliseconds and microseconds where a name ends so, else seconds; GiB in what is printed.
Errors: PlanError names the number that is not known, and how to give it.
Numerics: floors leave out launches, waiting for other ranks, and what a cache serves twice.
Source: kernels.md section 5; engine.md 11.3, 25. The H200's speeds were measured on one (products of 8192^3,
copies; fp8 is twice bf16, an upper bound). The H100 has the same processor; its memory's speed is 3.35 TB/s
of the datasheet, less as the H200 stays below its own 4.8. The speed of NVLink is assumed for both.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dskit.checkpoint.spec import NBYTES, Weight, layout, stored_form
from dskit.config import ModelConfig
from dskit.engine import engram, pools
from dskit.engine.config import EngineConfig
from dskit.layers.cache import Packing
from dskit.layers.linear import Numerics

USABLE = 0.94  # of a GPU's memory: the rest is the driver's, the working memory's and the graphs'
REQUESTS = (1, 32, 128)  # decoding on each GPU
CONTEXTS = (8192, 131072)
GIB = 2**30
EXPERTS, TABLES = ("routed experts", "draft's experts"), "Engram tables"
DENSE = ("projections", "head", "routers, compressors, norms, mHC")  # read in every step


class PlanError(ValueError):
    """A plan that lacks a number."""


@dataclass(frozen=True)
class Machine:
    """What a GPU can move and compute per second, and hold; `name` is part of what the driver calls it."""

    name: str
    bytes_per_s: float
    flop_per_s: dict[str, float]
    memory_bytes: float | None = None
    link_bytes_per_s: float = 370e9  # to the other GPUs, one way

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """Read one from a JSON file; raises ValueError when a field without a default is missing."""
        found = json.loads(Path(path).read_text())
        missing = [name for name in ("name", "bytes_per_s", "flop_per_s") if name not in found]
        if missing:
            raise ValueError(f"{path} lacks {missing[0]!r}; it needs name, bytes_per_s, flop_per_s")
        return cls(**{name: found[name] for name in cls.__dataclass_fields__ if name in found})


_PEAKS = {"bf16": 790e12, "fp8": 1580e12, "tf32": 395e12, "fp32": 60e12}
H200 = Machine("H200", 4.3e12, _PEAKS, 140.4 * GIB)
H100 = Machine("H100", 3.35e12 * 4.3 / 4.8, _PEAKS, 79.6 * GIB)
MACHINES = {machine.name: machine for machine in (H100, H200)}


def parse_gpus(words: str, constants: str | None = None) -> tuple[int, Machine]:
    """(count, machine) of "8xH200"; a JSON file may describe the machine. Raises PlanError."""
    match = re.fullmatch(r"(?:(\d+)x)?([A-Za-z][\w-]*)", words.strip())
    if not match or match[1] == "0":
        raise PlanError(f"--gpus is {words!r}; say how many of which, as in 8xH200")
    machine = Machine.load(constants) if constants else MACHINES.get(match[2].upper())
    if machine is None:
        raise PlanError(
            f"no GPU is called {match[2]!r} here, only {' and '.join(MACHINES)}; describe another one by "
            "--machine FILE, JSON with name, memory_bytes, bytes_per_s, flop_per_s of bf16 and fp8, "
            "link_bytes_per_s"
        )
    lacking = [f"flop_per_s.{peak}" for peak in ("bf16", "fp8") if peak not in machine.flop_per_s]
    lacking += [] if machine.memory_bytes else ["memory_bytes"]
    if lacking:
        raise PlanError(f"{constants} lacks {lacking[0]!r}, which a plan needs")
    return int(match[1] or 1), machine


class Plan:
    """One model on some GPUs; `settings` are the engine's: max_num_seqs, max_model_len."""

    def __init__(self, config: ModelConfig, gpus: int, machine: Machine, **settings: Any):
        self.config, self.gpus, self.machine = config, gpus, machine
        self.cfg = cfg = EngineConfig.of(config, **settings)
        self.numerics = Numerics.of(config, device="cuda")
        self.parts, self._products = parts(config), dict[int, tuple[float, float]]()
        self.tables, self.placement = self.parts.get(TABLES, 0), None
        here = dict.fromkeys(EXPERTS, 1 / gpus)
        if self.tables:
            self.placement = engram.suited(self.tables, machine.memory_bytes, math.inf, False, gpus)
            here[TABLES] = {"device": 1, "shard": 1 / gpus}.get(self.placement, 0)
        self.per_gpu = {part: here.get(part, 1) * size for part, size in self.parts.items()}
        caches = pools.allocate(config, self.numerics, num_blocks=cfg.num_blocks, block_size=cfg.block_size,
                                num_slots=cfg.max_num_seqs + cfg.num_snapshots, device="meta",
                                drafts=cfg.drafts, cache_storage="packed")
        self.state_bytes, self.block_bytes = (sum(tensor.nbytes for tensor in kind(caches))
                                              for kind in (pools.slot_tables, pools.block_tables))
        self.token_bytes = self.block_bytes / (cfg.num_blocks + 1) / cfg.block_size

    # ---- memory --------------------------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> float:
        """Of a GPU, with the Engram tables where they lie there."""
        return sum(self.per_gpu.values())

    @property
    def usable(self) -> float:
        """Bytes of a GPU that weights and caches may take."""
        return USABLE * self.machine.memory_bytes

    @property
    def left(self) -> float:
        """Bytes of a GPU that are left for global cache."""
        return self.usable - self.weight_bytes - self.state_bytes

    @property
    def cache_tokens(self) -> int:
        """Tokens of global cache that fit on a GPU."""
        return max(0, int(self.left // self.token_bytes))

    @property
    def fits(self) -> bool:
        """Whether weights, windows and the cache blocks of the settings fit."""
        return self.left >= self.block_bytes

    def placements(self) -> dict[str, dict[str, Any]]:
        """For each placement of the tables: bytes of a GPU and of a node, and whether the GPU has them."""
        if not self.tables:
            return {}
        there = self.left + self.per_gpu[TABLES] - self.block_bytes
        found = {"device": (self.tables, 0), "shard": (self.tables / self.gpus, 0),
                 "host": (0, engram.SPARE * self.tables), "mmap": (0, 0)}
        return {name: {"gpu_bytes": gpu, "host_bytes": host, "fits": gpu <= max(0, there)}
                for name, (gpu, host) in found.items() if name != "shard" or self.gpus > 1}

    # ---- time ----------------------------------------------------------------------------------------------

    def decode(self, requests: int, context: int, rows: int = 1) -> dict[str, Any]:
        """Floor of a step of so many requests on each GPU, each with so many rows (1 and its drafts)."""
        c, tokens, layers = self.config, requests * rows, self.config.num_hidden_layers
        entry, window, key = self._cached()
        moved = {
            "experts": self._experts_read(self.gpus * tokens),
            "dense": sum(self.parts.get(part, 0) for part in DENSE),
            "attention": tokens * entry * sum(self._chosen(layer, context) for layer in range(layers))
            + requests * layers * window * (c.sliding_window + rows - 1),
            "index": key * sum((tokens if self._narrowed(layer) else requests) * self._scored(layer, context)
                               for layer in c.index_source_layer_ids),
            "activations": tokens * layers * self._row_bytes,
        }
        seconds = max(sum(moved.values()) / self.machine.bytes_per_s,
                      tokens * self._token_seconds(context, layers))
        return {"requests": requests, "context": context, "rows": rows, "bytes": moved,
                "floor_ms": 1e3 * seconds, "tokens_per_s": tokens / seconds,
                "exchange_ms": 1e3 * tokens * self._exchange(layers)}

    def prefill(self, context: int, replay: bool = False) -> dict[str, Any]:
        """Floor of a token at the end of a context; `replay`: the decoder sees the end of prompts only."""
        layers = self.config.split if replay else self.config.num_hidden_layers
        seconds = self._token_seconds(context, layers)
        streamed = self._experts_read(math.inf) * layers / self.config.num_hidden_layers
        return {"context": context, "layers": layers, "us_per_token": 1e6 * seconds,
                "tokens_per_s": 1 / seconds, "exchange_us_per_token": 1e6 * self._exchange(layers),
                "experts_ms": 1e3 * streamed / self.machine.bytes_per_s}

    def layer(self, layer: int, requests: int, context: int, rows: int, experts: int) -> float:
        """Floor in seconds of one layer in a step of one GPU: so many rows of each request, the last of which
        sees `context`, meet so many of its experts. What several rows read alike is moved once.
        """
        c, tokens, ratio = self.config, requests * rows, self.config.ratio(layer)
        entry, window, key = self._cached()
        seen = range(context - rows + 1, context + 1)
        chosen = sum(self._chosen(layer, n) for n in seen) / rows
        scores = layer in c.index_source_layer_ids
        scored = sum(self._scored(layer, n) for n in seen) / rows if scores else 0
        there = requests * (context // ratio) if ratio else 0
        dense, expert = self._layer_bytes(layer)
        moved = (dense + experts * expert + entry * min(tokens * chosen, there)
                 + key * min(tokens * scored, there) + requests * window * (c.sliding_window + rows - 1)
                 + tokens * self._row_bytes)
        narrow, wide = (b - a for a, b in zip(products(c, layer), products(c, layer + 1), strict=True))
        narrow += 2 * c.index_n_heads * c.index_head_dim * scored
        wide += 4 * c.num_attention_heads * c.head_dim * (c.sliding_window + chosen)
        peak = self.machine.flop_per_s
        return max(moved / self.machine.bytes_per_s, tokens * (narrow / peak["fp8"] + wide / peak["bf16"]))

    def _cached(self) -> tuple[int, ...]:
        """Bytes of a global entry, a window's entry and an index key."""
        kinds = ("entry", "window", "key")
        return tuple(Packing.of(self.config, self.numerics, what).nbytes for what in kinds)

    @property
    def _row_bytes(self) -> float:
        """Bytes that a row's activations move in a layer."""
        return 60 * self.config.hidden_size + 4.06 * self.config.num_attention_heads * self.config.head_dim

    def _layer_bytes(self, layer: int) -> tuple[int, int]:
        """Bytes of a layer's weights without routed experts and tables, and of one of its experts."""
        dense = expert = 0
        for weight, _ in _kinds(self.config):
            if weight.name.startswith(f"layers.{layer}.") and not weight.table:
                size = _stored_bytes(weight, self.config)
                dense, expert = ((dense, expert + size) if ".experts." in weight.name
                                 else (dense + size, expert))
        return dense, expert

    def _experts_read(self, rows: float) -> float:
        """Bytes of a GPU's experts that so many rows of the group touch, if they choose evenly."""
        touched = 1 - (1 - self.config.num_experts_per_tok / self.config.n_routed_experts) ** rows
        return touched * self.per_gpu["routed experts"]

    def _exchange(self, layers: int) -> float:
        """Seconds on a GPU's links for a row: in FP8 to other ranks, sums in bfloat16 back."""
        G, D = self.gpus, self.config.hidden_size
        remote = (G - 1) * (1 - (1 - 1 / G) ** self.config.num_experts_per_tok)
        return layers * remote * (D + D / 32 + 2 * D) / self.machine.link_bytes_per_s

    def _token_seconds(self, context: int, layers: int) -> float:
        """Arithmetic of a token that sees so much context, in the first layers."""
        c, peak = self.config, self.machine.flop_per_s
        if layers not in self._products:
            self._products[layers] = products(c, layers)
        narrow, wide = self._products[layers]
        seen = layers * c.sliding_window + sum(self._chosen(layer, context) for layer in range(layers))
        scored = sum(self._scored(layer, context) for layer in c.index_source_layer_ids if layer < layers)
        attend, index = 4 * c.num_attention_heads * c.head_dim, 2 * c.index_n_heads * c.index_head_dim
        return (narrow + index * scored) / peak["fp8"] + (wide + attend * seen) / peak["bf16"]

    def _narrowed(self, layer: int) -> bool:
        """Whether an index source scores an earlier one's candidates only."""
        return 0 <= self.config.candidate_source_layer_id < layer

    def _scored(self, layer: int, context: int) -> int:
        """Entries that an index source scores."""
        c, entries = self.config, context // self.config.ratio(layer)
        most = c.candidate_topk_blocks * c.candidate_block_size if self._narrowed(layer) else entries
        return min(entries, most)

    def _chosen(self, layer: int, context: int) -> int:
        """Global entries that a layer attends to: those chosen, or all where nothing chooses."""
        c, ratio = self.config, self.config.ratio(layer)
        entries = context // ratio if ratio else 0
        return min(entries, c.index_topk) if c.is_v41 or layer in c.index_source_layer_ids else entries

    # ---- what is said --------------------------------------------------------------------------------------

    def floors(self) -> dict[str, list[dict[str, Any]]]:
        """Of decode steps and prompts, at contexts that the model has."""
        longest = self.config.max_position_embeddings
        contexts = [context for context in CONTEXTS if context <= longest] or [longest]
        replays = (True, False) if self.config.split < self.config.num_hidden_layers else (False,)
        return {"decode": [self.decode(n, context) for context in contexts for n in REQUESTS],
                "prefill": [self.prefill(context, replay) for context in contexts for replay in replays]}

    def to_dict(self) -> dict[str, Any]:
        """Everything, for `--json`."""
        settings = ("max_num_seqs", "max_model_len", "num_snapshots", "num_blocks", "block_size")
        return {"gpus": self.gpus, "machine": self.machine.name, "usable_bytes": self.usable,
                "weights_per_gpu": self.per_gpu, "weight_bytes": self.weight_bytes,
                "engram_placement": self.placement, "engram": self.placements(),
                "settings": {name: getattr(self.cfg, name) for name in settings},
                "state_bytes": self.state_bytes, "block_bytes": self.block_bytes,
                "token_bytes": self.token_bytes, "left_bytes": self.left, "cache_tokens": self.cache_tokens,
                "fits": self.fits, **self.floors()}

    def __str__(self) -> str:
        cfg, experts = self.cfg, self.config.n_routed_experts
        extra = f" and {cfg.num_snapshots} snapshots" if cfg.num_snapshots else ""
        rows = self.per_gpu | {f"windows of {cfg.max_num_seqs} requests{extra}": self.state_bytes,
                               "together": self.usable - self.left, "left for global cache": self.left}
        said = [f"{self.gpus} x {self.machine.name}, {self.machine.memory_bytes / GIB:.1f} GiB each, "
                f"{self.usable / GIB:.1f} to plan with; attention on every GPU, "
                f"{-(-experts // self.gpus)} of {experts} experts of a layer", "", "GiB per GPU"]
        said += [f"  {name:<44}{size / GIB:8.2f}" for name, size in rows.items()]
        said += [self._verdict(), *self._said_of_tables(), *self._said_of_time()]
        return "\n".join(said)

    def _verdict(self) -> str:
        cfg, asked = self.cfg, f"{self.block_bytes / GIB:.2f} GiB"
        what = f"--max-num-seqs {cfg.max_num_seqs} --max-model-len {cfg.max_model_len}"
        if not self.fits:
            return (f"does not fit: weights and windows take {(self.usable - self.left) / GIB:.1f} GiB, the "
                    f"cache of {what} {asked}, and there are {self.usable / GIB:.1f}")
        return (f"fits: {self.cache_tokens:,} tokens of cache per GPU at {self.token_bytes:.0f} bytes; "
                f"{what} reserve {cfg.num_blocks * cfg.block_size:,} ({asked})")

    def _said_of_tables(self) -> list[str]:
        said = ["", f"Engram tables, {self.tables / GIB:.1f} GiB: {self.placement} by default"]
        for name, place in self.placements().items():
            size = (f"{place['gpu_bytes'] / GIB:.1f} GiB of each GPU" if place["gpu_bytes"] else
                    f"{place['host_bytes'] / GIB:.1f} GiB of each node's memory" if place["host_bytes"] else
                    "the page cache of each node")
            said.append(f"  {name:<8}{size}{'' if place['fits'] else ', which are not free'}")
        return said if self.tables else []

    def _said_of_time(self) -> list[str]:
        floors = self.floors()
        said = ["", "decode, at least       ms a step   tokens/s per GPU   ms of exchange"]
        said += [f"{d['requests']:>5} x {d['context']:<9,}{d['floor_ms']:15.2f}{d['tokens_per_s']:19,.0f}"
                 f"{d['exchange_ms']:17.2f}" for d in floors["decode"]]
        said += ["", "prefill, at least     us a token   tokens/s per GPU   us of exchange   ms for experts"]
        said += [f"{p['layers']:>3} layers, {p['context']:<7,}{p['us_per_token']:13.1f}"
                 f"{p['tokens_per_s']:19,.0f}{p['exchange_us_per_token']:17.2f}{p['experts_ms']:17.1f}"
                 for p in floors["prefill"]]
        return [*said, "", "Prompts do better on few GPUs, whose loads differ less; decoding on many, which "
                           "share the reading of experts."]


# ---- what a model is made of -------------------------------------------------------------------------------


def parts(config: ModelConfig) -> dict[str, int]:
    """Bytes of a checkpoint by what they are for, the largest first."""
    found: Counter[str] = Counter()
    for weight, count in _kinds(config):
        draft = weight.name.startswith("mtp.")
        if weight.table:
            part = TABLES
        elif ".experts." in weight.name:
            part = EXPERTS[draft]
        elif draft:
            part = "the rest of the draft"
        elif weight.name in ("embed.weight", "head.weight"):
            part = weight.name.removesuffix(".weight").replace("embed", "embedding")
        else:
            part = DENSE[0] if weight.fmt == "fp8" else DENSE[2]
        found[part] += count * _stored_bytes(weight, config)
    return dict(found.most_common())


def _stored_bytes(weight: Weight, config: ModelConfig) -> int:
    """Bytes of a weight as a checkpoint holds it, scales included."""
    return sum(NBYTES[dtype] * math.prod(shape) for dtype, shape in stored_form(weight, config).values())


def products(config: ModelConfig, layers: int) -> tuple[float, float]:
    """FLOP of a token's products with FP8 and FP4 weights, and with wider ones, in the first layers.

    All tokens leave global entries for the decoder, so its source's compressor counts although it is later.
    """
    found = [0.0, 0.0]
    for weight, count in _kinds(config):
        room, _, name = weight.name.partition(".")
        if room != "layers" or len(weight.shape) != 2 or weight.table or weight.fmt == "int64":
            continue
        layer = int(name.partition(".")[0])
        if layer < layers or (layer == layers and ".compressor." in name):
            used = config.num_experts_per_tok if count > 1 else 1
            found[weight.fmt not in ("fp8", "fp4")] += 2 * used * math.prod(weight.shape)
    return found[0], found[1]


def _kinds(config: ModelConfig) -> Iterator[tuple[Weight, int]]:
    """Every weight, with how many there are of it: of equal experts the first stands for all."""
    for weight in layout(config):
        if ".experts." not in weight.name:
            yield weight, 1
        elif ".experts.0." in weight.name:
            draft = weight.name.startswith("mtp.")
            yield weight, config.draft_experts[0] if draft else config.n_routed_experts
