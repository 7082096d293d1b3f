"""The model: residual streams in, logits out.

One step, for any mixture of requests packed into T rows:

    embed -> N equal streams
    each block:
        [engram adds remembered n-grams]
        boundary -> attention over window and chosen global entries
        boundary -> experts
    write -> collapse the streams -> norm -> head

A boundary writes what the sublayer before it left, mixing the streams, reads one vector of them and norms it:
one pass over the streams instead of four.

A `Step` says which rows there are and where they meet the caches; the engine's runner makes it
(engine/runner.py), training makes one for whole sequences (train/). Blocks hand two things on: the streams
with what is still to be written to them, and what the source layers published (`mla.Global`). What looks at
caches is called through `Step.meet`, and everything else knows no row but its own.

Shapes: ids_T -> logits [rows, V] float32. Legend: layers/__init__.py.
Errors: ConfigError when the config asks for what no layer can do.
Source: model.md 1.2, 3.14, 3.15, 6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dskit import ops
from dskit.config import ModelConfig
from dskit.layers import mhc
from dskit.layers.compress import GroupPlan
from dskit.layers.dspark import DraftHeads, main_projection, propose, tap
from dskit.layers.engram import Engram, Found
from dskit.layers.indexer import Segment
from dskit.layers.linear import Linear, Numerics, matmul
from dskit.layers.mla import Attention, Global, Memory
from dskit.layers.moe import MoE
from dskit.layers.norm import RMSNorm, cast
from dskit.layers.rope import frequencies
from dskit.layers.swa import RingPlan


def directly(work: Callable[..., Any], *args: Any) -> Any:
    """Call something here and now."""
    return work(*args)


@dataclass
class Step:
    """Everything that the rows of one forward pass need to know about themselves.

    ids, pos [T]; rope: {False: window-only layers, True: layers with global KV} -> turns (rope.turns); gram
    [T, Q] folded n-grams; found: what tables that lie elsewhere say of them, or None; image: bool [T] or
    None; windows: (encoder layers, decoder layers) ring plans;
    groups and segments per ratio; tail: (kept rows, their Step) when decoder layers run on the end of a
    prompt only (bounded replay); whole: set for whole sequences without a cache (training); wanted: rows
    whose logits are asked for; run, meet: how layers and halves of layers, and what in them meets the
    caches, are called, with the step among their arguments.
    """

    ids: Tensor
    pos: Tensor
    rope: dict[bool, Tensor]
    windows: tuple[RingPlan, RingPlan]
    groups: dict[int, GroupPlan] = field(default_factory=dict)
    segments: dict[int, list[Segment]] = field(default_factory=dict)
    gram: Tensor | None = None
    found: Found | None = None
    image: Tensor | None = None
    tail: tuple[Tensor, Step] | None = None
    whole: object | None = None
    wanted: Tensor | None = None
    split: int = 1 << 30
    run: Callable[..., State] = directly
    meet: Callable[..., Tensor | None] = directly

    def window(self, layer: int) -> RingPlan:
        """The ring plan of a layer: decoder layers may see less under bounded replay."""
        return self.windows[layer >= self.split]


@dataclass
class State:
    """What blocks hand on: the streams X, the last sublayer's weights p, q, C and output y, the draft's taps.

    y is still to be written to X, with q and C (None: nothing is); the next sublayer reads with p. Without a
    draft to read them taps is None. x: inside a block, what attention reads.
    """

    X: Tensor
    p: Tensor
    q: Tensor | None = None
    C: Tensor | None = None
    y: Tensor | None = None
    taps: list[Tensor] | None = field(default_factory=list)
    x: Tensor | None = None

    def written(self, dtype: torch.dtype) -> Tensor:
        """The streams, once the last sublayer has been written to them."""
        if self.y is not None:
            self.X = cast(mhc.write(self.y, self.X, self.q, self.C, dtype), self.X.dtype)
            self.y = None
        return self.X

    def rows(self, rows: Tensor) -> State:
        """Some rows of everything."""
        X, p, q, C, y, x = (part if part is None else part[rows] for part in (
            self.X, self.p, self.q, self.C, self.y, self.x))
        return State(X, p, q, C, y, self.taps and [part[rows] for part in self.taps], x)


class Block(nn.Module):
    """One layer: mHC around attention, mHC around the experts, n-gram memory where the config has one."""

    def __init__(self, config: ModelConfig, layer: int, numerics: Numerics,
                 sizes: tuple[int, int] | None = None):
        super().__init__()
        self.config, self.layer, self.numerics = config, layer, numerics
        self.attn = Attention(config, layer, numerics)
        self.ffn = MoE(config, layer, numerics, sizes)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, numerics.dtype, numerics.steady)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, numerics.dtype, numerics.steady)
        mhc.add_parameters(self, config, ("hc_attn", "hc_ffn"))
        if layer in config.engram_layer_ids:
            self.engram = Engram(config, layer, numerics)

    def forward(self, state: State, step: Step, memory: Memory, shared: Global) -> tuple[State, Step]:
        """(state, step) -> (state, step) after this layer; the step shrinks if bounded replay drops rows."""
        if step.tail is None or self.layer != self.config.split:
            return self.finish(self.begin(state, step, memory, shared), step, memory, shared), step
        rows, tail = step.tail
        state = step.run(self.begin, state, step, memory, shared).rows(rows)
        return step.run(self.finish, state, tail, memory, shared), tail

    def begin(self, state: State, step: Step, memory: Memory, shared: Global) -> State:
        """Up to what all rows leave in the caches, also those that go no further."""
        if hasattr(self, "engram"):
            X = self.engram(state.written(self.numerics.dtype), step.gram, step.image, step.found)
            state.X = cast(cast(X, self.numerics.dtype), X.dtype)  # rounded, held as wide as it came
        state.x = self.enter("attn", state)
        if self.config.is_v41:
            self.tap(state)
        self.attn.compress(state.x, step, memory, shared)
        return state

    def finish(self, state: State, step: Step, memory: Memory, shared: Global) -> State:
        """Attention and experts."""
        state.y, state.x = self.attn(state.x, step, memory, shared), None
        x = self.enter("ffn", state)
        state.y = self.ffn(x, step.ids, step.image)
        if not self.config.is_v41:
            self.tap(state)
        return state

    def enter(self, part: str, state: State) -> Tensor:
        """The boundary before a sublayer ("attn", "ffn"): moves the state on, returns the input x_TD."""
        c, gain = self.config, getattr(self, f"{part}_norm").weight
        fn, base, scale = (getattr(self, f"hc_{part}_{name}") for name in ("fn", "base", "scale"))
        state.X, x, state.p, state.q, state.C = mhc.boundary(
            state.y, state.X, state.p if c.is_v41 else None, state.q, state.C, fn, base, scale, gain,
            c.rms_norm_eps, c.hc_eps, c.hc_sinkhorn_iters, self.numerics.dtype, self.numerics.row_tile)
        state.y = None
        return x

    def tap(self, state: State) -> None:
        """Keep what the draft sees of a target layer: what enters it (V4: what leaves it)."""
        if state.taps is not None and self.layer in self.config.dspark_target_layer_ids:
            X = state.written(self.numerics.dtype)
            state.taps.append(cast(tap(X), self.numerics.dtype))


class Model(nn.Module):
    """The text model; parameter names are the checkpoint's, except that routed experts are stacked."""

    def __init__(self, config: ModelConfig, numerics: Numerics):
        super().__init__()
        ops.check_environment()
        self.config, self.numerics = config, numerics
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, dtype=numerics.dtype)
        self.embed.weight.requires_grad_(False)
        self.layers = nn.ModuleList(Block(config, i, numerics) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, numerics.dtype, numerics.steady)
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
        state, shared, run, first = self.streams(step.ids), Global(), step.run, 0
        if self.config.num_hidden_layers not in memory.windows:
            state.taps = None
        if step.tail is not None:
            split = self.config.split
            state = run(self.through, state, step, memory, shared, range(split))
            state, step = self.layers[split](state, step, memory, shared)
            first = split + 1
        state = run(self.through, state, step, memory, shared, range(first, len(self.layers)))
        if state.taps is not None:
            self.absorb(state, step, memory)
        if step.wanted is not None:
            state = state.rows(step.wanted)
        return self.norm(self.collapse(state, self))

    def through(self, state: State, step: Step, memory: Memory, shared: Global, layers: range) -> State:
        """What some layers, none of which drops rows, make of a state."""
        for layer in layers:
            state, step = self.layers[layer](state, step, memory, shared)
        return state

    def streams(self, ids: Tensor) -> State:
        """The embedding in every stream, of which the first sublayer reads stream 0."""
        X = cast(self.embed(ids), self.numerics.compute)[:, None].expand(-1, self.config.hc_mult, -1)
        return State(X, mhc.first_read(X.shape[0], X.shape[1], X.device))

    def absorb(self, state: State, step: Step, memory: Memory) -> None:
        """Give the draft stages their keys of the rows just computed; takes the taps from the state."""
        taps, state.taps = state.taps, None
        main = self.numerics.activation(main_projection(taps, self.mtp, self.numerics))
        for stage in self.mtp:
            ring, plan = memory.windows[stage.layer], step.window(stage.layer)
            stage.attn.remember_(ring, stage.attn.wkv(main), step.rope[False], plan)

    def draft(self, step: Step, memory: Memory, shape: tuple[int, int], pick: Callable[[Tensor], Tensor]
              ) -> tuple[Tensor, Tensor, Tensor]:
        """One drafting round for B requests of M rows: (tokens [B, M], logits [B, M, V], confidence [B, M]).

        The step's rows are [newest token, noise ...] of each request; its window plan commits nothing and
        lets every row read the ring and the whole block.
        """
        return self.walk(*self.guess(step, memory), step.ids.unflatten(0, shape)[:, 0], shape, pick)

    def walk(self, x: Tensor, base: Tensor, newest_B: Tensor, shape: tuple[int, int],
             pick: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The end of a round: pick token by token from what `guess` gave."""
        return propose(x.unflatten(0, shape), base.unflatten(0, shape), newest_B, self.mtp[-1], pick)

    def guess(self, step: Step, memory: Memory) -> tuple[Tensor, Tensor]:
        """A round as far as nothing is picked: the collapsed streams [B*M, D] and the logits [B*M, V]."""
        state = self.streams(step.ids)
        for stage in self.mtp:
            state, _ = stage(state, step, memory, Global())
        x = self.collapse(state, self.mtp[-1])
        return x, self.logits(self.mtp[-1].norm(x))

    def collapse(self, state: State, owner: nn.Module) -> Tensor:
        """Streams -> one vector: with the last FFN's read weights, or V4's own, which `owner` holds."""
        X, p = state.written(self.numerics.dtype), state.p
        if not self.config.is_v41:
            p = mhc.collapse_weights(X, owner, self.config, self.numerics.row_tile)
        return mhc.read(p, X, self.numerics.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """Float32 logits [rows, V] of normed rows; sums are float32 even where weights are bfloat16."""
        return matmul(x, self.head.dense(), torch.float32, self.numerics.row_tile)
