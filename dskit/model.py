"""The model: residual streams in, logits out.

One step, for any mixture of requests packed into T rows:

    embed -> N equal streams
    each block:
        [engram adds remembered n-grams]
        read one vector -> norm -> attention over window and chosen global entries -> write back, mixing
        read one vector -> norm -> experts                                        -> write back, mixing
    collapse the streams -> norm -> head

A `Step` says which rows there are and where they meet the caches; the engine's runner makes it
(engine/runner.py), training makes one for whole sequences (train/). Blocks hand two things on: the streams
with their read weights, and what the source layers published (`mla.Global`).

Shapes: ids_T -> logits [rows, V] float32. Legend: layers/__init__.py.
Errors: ConfigError when the config asks for what no layer can do.
Source: model.md 1.2, 3.14, 3.15, 6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dskit import ops
from dskit.config import ModelConfig
from dskit.layers import mhc
from dskit.layers.compress import GroupPlan
from dskit.layers.dspark import DraftHeads, main_projection, propose, tap
from dskit.layers.engram import Engram
from dskit.layers.indexer import Segment
from dskit.layers.linear import Linear, Numerics, matmul
from dskit.layers.mla import Attention, Global, Memory
from dskit.layers.moe import MoE
from dskit.layers.norm import RMSNorm, up
from dskit.layers.rope import frequencies
from dskit.layers.swa import RingPlan, remember_


@dataclass
class Step:
    """Everything that the rows of one forward pass need to know about themselves.

    ids, pos [T]; rope: {False: window-only layers, True: layers with global KV} -> turns (rope.turns); gram
    [T, Q] folded n-grams; image: bool [T] or None; windows: (encoder layers, decoder layers) ring plans;
    groups and segments per ratio; tail: (kept rows, their Step) when decoder layers run on the end of a
    prompt only (bounded replay); whole: set for whole sequences without a cache (training); wanted: rows
    whose logits are asked for.
    """

    ids: Tensor
    pos: Tensor
    rope: dict[bool, Tensor]
    windows: tuple[RingPlan, RingPlan]
    groups: dict[int, GroupPlan] = field(default_factory=dict)
    segments: dict[int, list[Segment]] = field(default_factory=dict)
    gram: Tensor | None = None
    image: Tensor | None = None
    tail: tuple[Tensor, Step] | None = None
    whole: object | None = None
    wanted: Tensor | None = None
    split: int = 1 << 30

    def window(self, layer: int) -> RingPlan:
        """The ring plan of a layer: decoder layers may see less under bounded replay."""
        return self.windows[layer >= self.split]


@dataclass
class State:
    """What blocks hand on: the streams, the next sublayer's read weights, and the draft's taps."""

    X: Tensor
    p: Tensor
    taps: list[Tensor] = field(default_factory=list)


class Block(nn.Module):
    """One layer: mHC around attention, mHC around the experts, n-gram memory where the config has one."""

    def __init__(self, config: ModelConfig, layer: int, numerics: Numerics,
                 sizes: tuple[int, int] | None = None):
        super().__init__()
        self.config, self.layer, self.numerics = config, layer, numerics
        self.attn = Attention(config, layer, numerics)
        self.ffn = MoE(config, layer, numerics, sizes)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, numerics.dtype)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, numerics.dtype)
        mhc.add_parameters(self, config, ("hc_attn", "hc_ffn"))
        if layer in config.engram_layer_ids:
            self.engram = Engram(config, layer, numerics)

    def forward(self, state: State, step: Step, memory: Memory, shared: Global) -> tuple[State, Step]:
        """(state, step) -> (state, step) after this layer; the step shrinks if bounded replay drops rows."""
        if hasattr(self, "engram"):
            state.X = self.engram(state.X, step.gram, step.image)
        if self.config.is_v41 and self.layer in self.config.dspark_target_layer_ids:
            state.taps.append(tap(state.X))
        X = up(state.X)
        p, q, C = self.mixes(X, "hc_attn")
        x = self.attn_norm(mhc.read(state.p if self.config.is_v41 else p, X, self.numerics.dtype))
        self.attn.compress(x, step, memory, shared)
        if step.tail is not None and self.layer == self.config.split:
            rows, step = step.tail
            x, X, p, q, C = x[rows], X[rows], p[rows], q[rows], C[rows]
            state.taps = [t[rows] for t in state.taps]
        y = self.attn(x, step, memory, shared)
        X = up(mhc.write(y, X, q, C, self.numerics.dtype))
        p_next, q, C = self.mixes(X, "hc_ffn")
        x = self.ffn_norm(mhc.read(p if self.config.is_v41 else p_next, X, self.numerics.dtype))
        y = self.ffn(x, step.ids, step.image)
        state = State(mhc.write(y, X, q, C, self.numerics.dtype), p_next, state.taps)
        if not self.config.is_v41 and self.layer in self.config.dspark_target_layer_ids:
            state.taps.append(tap(state.X))
        return state, step

    def mixes(self, X: Tensor, part: str) -> tuple[Tensor, Tensor, Tensor]:
        """Read, write and mix weights of one sublayer ("hc_attn", "hc_ffn")."""
        c = self.config
        fn, base, scale = (getattr(self, f"{part}_{name}") for name in ("fn", "base", "scale"))
        return mhc.mixes(X, fn, base, scale, c.rms_norm_eps, c.hc_eps, c.hc_sinkhorn_iters,
                         self.numerics.row_tile)


class Model(nn.Module):
    """The text model; parameter names are the checkpoint's, except that routed experts are stacked."""

    def __init__(self, config: ModelConfig, numerics: Numerics):
        super().__init__()
        ops.check_environment()
        self.config, self.numerics = config, numerics
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, dtype=numerics.dtype)
        self.embed.weight.requires_grad_(False)
        self.layers = nn.ModuleList(Block(config, i, numerics) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, numerics.dtype)
        self.head = Linear(config.hidden_size, config.vocab_size, numerics, fmt="bf16")
        if not config.is_v41:
            mhc.add_collapse(self, config)
        stages = range(config.num_nextn_predict_layers)
        self.mtp = nn.ModuleList(Block(config, config.num_hidden_layers + s, numerics, config.draft_experts)
                                 for s in stages)
        if stages:
            DraftHeads.attach(self.mtp, config, numerics)
        with torch.device("cpu"):  # real numbers, also in a model that is built on the meta device
            for compressed in (False, True):
                self.register_buffer(f"frequency_{compressed:d}", frequencies(config, compressed),
                                     persistent=False)

    def forward(self, step: Step, memory: Memory) -> Tensor:
        """Logits, float32 [rows, V], of the rows that the step wants (all rows when it names none)."""
        return self.logits(self.hidden(step, memory))

    def hidden(self, step: Step, memory: Memory) -> Tensor:
        """The collapsed streams after the last layer, normed, [rows, D]; writes the caches in `memory`."""
        X = self.embed(step.ids)[:, None].expand(-1, self.config.hc_mult, -1)
        state = State(X, mhc.first_read(X.shape[0], X.shape[1], X.device))
        shared = Global()
        for block in self.layers:
            state, step = block(state, step, memory, shared)
        if self.config.num_hidden_layers in memory.windows:
            self.absorb(state.taps, step, memory)
        if step.wanted is not None:
            state = State(state.X[step.wanted], state.p[step.wanted])
        return self.norm(self.collapse(state))

    def absorb(self, taps: list[Tensor], step: Step, memory: Memory) -> None:
        """Give the draft stages their keys of the rows just computed."""
        main = self.numerics.activation(main_projection(taps, self.mtp, self.numerics))
        for stage in self.mtp:
            key = stage.attn.key(main, step.rope[False])
            remember_(memory.windows[stage.layer], key, step.window(stage.layer))

    def draft(self, step: Step, memory: Memory, shape: tuple[int, int], pick: Callable[[Tensor], Tensor]
              ) -> tuple[Tensor, Tensor, Tensor]:
        """One drafting round for B requests of M rows: (tokens [B, M], logits [B, M, V], confidence [B, M]).

        The step's rows are [newest token, noise ...] of each request; its window plan commits nothing and
        lets every row read the ring and the whole block.
        """
        X = self.embed(step.ids)[:, None].expand(-1, self.config.hc_mult, -1)
        state = State(X, mhc.first_read(X.shape[0], X.shape[1], X.device))
        for stage in self.mtp:
            state, _ = stage(state, step, memory, Global())
        last = self.mtp[-1]
        p = state.p
        if not self.config.is_v41:
            p = mhc.collapse_weights(state.X, last, self.config, self.numerics.row_tile)
        x = mhc.read(p, state.X, self.numerics.dtype)
        base = self.logits(last.norm(x)).unflatten(0, shape)
        return propose(x.unflatten(0, shape), base, step.ids.unflatten(0, shape)[:, 0], last, pick)

    def collapse(self, state: State) -> Tensor:
        """Streams -> one vector: with the last FFN's read weights, or V4's own."""
        p = state.p
        if not self.config.is_v41:
            p = mhc.collapse_weights(state.X, self, self.config, self.numerics.row_tile)
        return mhc.read(p, state.X, self.numerics.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """Float32 logits [rows, V] of normed rows; the product is float32 even where weights are bfloat16."""
        return matmul(up(x), up(self.head.dense()), torch.float32, self.numerics.row_tile)
