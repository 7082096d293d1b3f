"""MLA: 64 query heads attend to one shared key-and-value vector per token, through a low-rank query.

Idea: a token is remembered by a single vector that is key and value for every head. A query row reads its
window (swa.py) and the global entries that the indexer chose, in one softmax with a learned sink that only
adds to the denominator. Because the values carry a rotation, the output is rotated back; heads then leave in
groups, each through its own low-rank projection.

    q = rotate(rms(x Wq_a) Wq_b),  c = rotate(rms(x Wkv)),  z = q . e / sqrt(H)
    o = unrotate( sum_e exp(z_e) e / (sum_e exp(z_e) + exp(sink)) ),  y = concat_g(o_g Wo_a[g]) Wo_b

Shapes: x_TD -> y_TD; q [T, A, H]; window line [S, H] read by [T, W], pool [S', H] by [T, K], -1 for none;
line and pool are caches: numbers or packed bytes.
State: the window ring and, at KV sources, the global pool, index keys and open groups; see model.Step.
Errors: none of its own.
Numerics: scores and softmax in float32; probabilities rounded to bfloat16 only for the product with values.
Kernel: kernels/mla.py (mla.attend_cached), kernels/gemm.py (gemm.project)
Source: model.md 3.7, 6.2; config fields q_lora_rank, o_groups, o_lora_rank, sliding_window.
Try: notebooks/01_mla.ipynb
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dskit import ops
from dskit.config import ModelConfig
from dskit.layers.cache import Packing, is_packed, read, ready, store_, write_
from dskit.layers.compress import Compressor, GroupPlan
from dskit.layers.indexer import Indexer, Segment
from dskit.layers.linear import Linear, Numerics, few, quantize, unpack_fp8, widened
from dskit.layers.norm import RMSNorm, cast, ordered, rms, up
from dskit.layers.rope import rotate
from dskit.layers.swa import RingPlan, remember_

FLOOR = -1e30  # the running maximum starts here, so that a row without entries gives zeros and no NaN
GATHER_ELEMENTS = 1 << 24  # gathered values held at once; longer steps go in blocks of rows
MANY_ROWS = 512  # read the same packed rows again and again, so these are laid out as numbers before
MOST_LAID_OUT = 64  # entries for each of those rows


@dataclass
class Memory:
    """What attention reads and writes beyond the step itself; None pools: whole sequences without a cache.

    windows[layer], carries[source], index_carries[source]: rings.
    entries[source], keys[source]: pools by row. Windows, entries and keys are caches (cache.py).
    """

    windows: dict[int, Tensor] = field(default_factory=dict)
    entries: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    carries: dict[int, Tensor] = field(default_factory=dict)
    index_carries: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Global:
    """The global memory as the layers of one step see it, handed from source to consumer layers.

    chosen: rows of the entries or, where there is one, of the line (the step that it is for, numbers).
    """

    entries: Tensor | None = None
    keys: Tensor | None = None
    line: tuple[object, Tensor] | None = None
    chosen: Tensor | None = None
    candidates: list[Tensor | None] | None = None


@ops.op("mla.attend")
def attend(q_TAH: Tensor, window_SH: Tensor, read_TW: Tensor, entries_SH: Tensor | None,
           chosen_TK: Tensor | None, sink_A: Tensor, dtype: torch.dtype,
           packings: tuple[Packing, Packing] | None = None) -> Tensor:
    """Attention of every row over its window and chosen entries, [T, A, H] of `dtype`; -1 reads nothing.

    packings: of the window and of the entries, where they are packed.
    """
    T, seen = q_TAH.shape[0], read_TW.shape[1] + (0 if chosen_TK is None else chosen_TK.shape[1])
    held = max(1, GATHER_ELEMENTS // max(1, q_TAH.shape[-1] * seen))  # rows
    shared = window_SH, entries_SH, sink_A, dtype, packings or (None, None)
    if held >= T or torch.compiler.is_compiling():  # which would make a program for each block
        return _attend(q_TAH, read_TW, chosen_TK, *shared)
    chosen = [None] * -(-T // held) if chosen_TK is None else chosen_TK.split(held)
    blocks = zip(q_TAH.split(held), read_TW.split(held), chosen, strict=True)
    return torch.cat([_attend(*block, *shared) for block in blocks])


@ops.op("mla.attend_cached")
def attend_cached(q_TAH: Tensor, turn_T: Tensor, window_SH: Tensor, read_TW: Tensor,
                  entries_SH: Tensor | None, chosen_TK: Tensor | None, sink_A: Tensor, dtype: torch.dtype,
                  packings: tuple[Packing, Packing] | None = None, fmt: str | None = None,
                  steady: bool = False) -> Tensor:
    """`attend` with queries as they leave their projection: rotated before it, the outputs back after it.

    fmt: quantise and restore the outputs in it, as an FP8 output projection needs them; the release does not.
    steady: a row's bits must not depend on the rows beside it.
    """
    o = attend(rotate(q_TAH, turn_T), window_SH, read_TW, entries_SH, chosen_TK, sink_A, dtype, packings)
    o = rotate(o, turn_T, inverse=True)
    return o if fmt is None else quantize(o, fmt, dtype)


def _attend(q_TAH: Tensor, read_TW: Tensor, chosen_TK: Tensor | None, window_SH: Tensor,
            entries_SH: Tensor | None, sink_A: Tensor, dtype: torch.dtype, packings: tuple) -> Tensor:
    q, index = up(q_TAH), read_TW
    value = read(window_SH, read_TW, packings[0], q.dtype)
    if entries_SH is not None:
        value = torch.cat((value, read(entries_SH, chosen_TK, packings[1], q.dtype)), dim=1)
        index = torch.cat((read_TW, chosen_TK), dim=1)
    z = (q @ value.transpose(1, 2)) * q.shape[-1] ** -0.5
    z = z.masked_fill((index < 0)[:, None], float("-inf"))
    weight, total = _softmax_parts(z, sink_A)
    return cast((cast(cast(weight, dtype), z.dtype) @ value) / total, dtype)


def _softmax_parts(z: Tensor, sink_A: Tensor) -> tuple[Tensor, Tensor]:
    """Numerators and denominator of a softmax of z [T, A, S]; the sink is a logit of the denominator only."""
    top = z.detach().amax(dim=-1, keepdim=True).clamp(min=FLOOR)
    weight = (z - top).exp()
    return weight, weight.sum(dim=-1, keepdim=True) + (sink_A[:, None] - top).exp()


@ops.op("mla.attend_whole")
def attend_whole(q_BTAH: Tensor, key_BSH: Tensor, bias_BTS: Tensor, sink_A: Tensor) -> Tensor:
    """`attend` for whole sequences at once, as training needs it: dense, with masks in place of indices.

    The last 8 of the S keys are no entries but zeros: the first of them is the sink, whose logit
    comes in through a channel of its own. bias: 0 where a row sees a key (and the sink), -inf
    elsewhere, in the dtype of the keys.
    -> [B, T, A, H] in the dtype of q.
    """
    B, T, A, H = q_BTAH.shape
    dtype, q_BTAH = q_BTAH.dtype, cast(q_BTAH, key_BSH.dtype)
    q = torch.cat((q_BTAH, q_BTAH.new_ones(B, T, A, 1), q_BTAH.new_zeros(B, T, A, 7)), dim=-1)
    logit = F.pad((sink_A * H**0.5).to(q.dtype)[:, None, None], (0, 7, key_BSH.shape[1] - 8, 7))
    key = torch.cat((key_BSH[:, None].expand(-1, A, -1, -1), logit.expand(B, -1, -1, -1)), dim=-1)
    o = F.scaled_dot_product_attention(q.transpose(1, 2), key, key, attn_mask=bias_BTS[:, None],
                                       scale=H**-0.5)
    return cast(o[..., :H].transpose(1, 2), dtype)


@ops.op("gemm.project")
def project(o_TAH: Tensor, weight: Tensor, scale: Tensor | None, block: tuple[int, int], groups: int,
            dtype: torch.dtype, held: torch.dtype, row_tile: int | None = None) -> Tensor:
    """Grouped output projection: heads of group g times weight[g] of [G*O, A/G*H] -> [T, G*O] of `dtype`.

    scale, block, held: of a weight that is stored as FP8 (linear.fp8); None with numbers.
    """
    if scale is not None:
        weight = unpack_fp8(weight, scale, block, held)
    o_GTX = o_TAH.unflatten(1, (groups, -1)).flatten(2).transpose(0, 1)
    weight = widened(weight)
    o_GTX = cast(o_GTX, weight.dtype)
    w_GXO = weight.unflatten(0, (groups, -1)).transpose(1, 2)
    T = o_GTX.shape[1]
    if row_tile is not None:
        o_GTX = F.pad(o_GTX, (0, 0, 0, -T % row_tile))
        tiles = [tile @ w_GXO for tile in o_GTX.split(row_tile, dim=1)]
        y_GTO = torch.cat(tiles, dim=1)[:, :T] if tiles else o_GTX.new_empty(groups, 0, w_GXO.shape[-1])
    else:
        y_GTO = (w_GXO.mT @ o_GTX.mT).mT if few(o_GTX[0], weight) else o_GTX @ w_GXO
    return cast(y_GTO.transpose(0, 1).flatten(1), dtype)


class Attention(nn.Module):
    """The attention of one layer; which of compressor and indexer it owns follows from the config."""

    def __init__(self, config: ModelConfig, layer: int, numerics: Numerics):
        super().__init__()
        self.config, self.layer, self.numerics = config, layer, numerics
        self.ratio, self.source = config.ratio(layer), config.kv_source(layer)
        heads, width, rank = config.num_attention_heads, config.head_dim, config.q_lora_rank
        block = config.weight_block_size
        self.wq_a = Linear(config.hidden_size, rank, numerics, block=block)
        self.q_norm = RMSNorm(rank, config.rms_norm_eps, numerics.dtype, numerics.steady)
        self.wq_b = Linear(rank, heads * width, numerics, block=block)
        self.wkv = Linear(config.hidden_size, width, numerics, block=block)
        self.kv_norm = RMSNorm(width, config.rms_norm_eps, numerics.dtype, numerics.steady)
        self.attn_sink = nn.Parameter(torch.zeros(heads), requires_grad=False)
        self.wo_a = Linear(heads * width // config.o_groups, config.o_groups * config.o_lora_rank, numerics,
                           block=block)
        self.wo_b = Linear(config.o_groups * config.o_lora_rank, config.hidden_size, numerics, block=block)
        if layer in config.kv_source_layer_ids:
            self.compressor = Compressor(config, self.ratio, numerics, width)
        if layer in config.index_source_layer_ids:
            self.indexer = Indexer(config, layer, numerics)

    def forward(self, x_TD: Tensor, step, memory: Memory, shared: Global) -> Tensor:
        """x_TD (normed) -> y_TD; `step` is a model.Step, `shared` what earlier layers of this step left."""
        x = self.numerics.activation(x_TD)
        latent = self.numerics.activation(self.q_norm(self.wq_a(x)))
        rows = self.query(latent), self.wkv(x), x_TD, latent
        return self.output(step.meet(self.look, step, memory, shared, *rows))

    def look(self, step, memory: Memory, shared: Global, q_TAH: Tensor, kv_TH: Tensor, x_TD: Tensor,
             latent: Tensor) -> Tensor:
        """What queries find in their window, which takes the new keys, and in chosen entries: o_TAH."""
        turn, plan = step.rope[self.ratio > 0], step.window(self.layer)
        window = self.remember_(memory.windows.get(self.layer), kv_TH, turn, plan)
        if step.whole is not None:
            o = step.whole.attend(self, x_TD, latent, rotate(q_TAH, turn), window, shared)
            return rotate(o, turn, inverse=True)
        if self.many(step, window):
            every = torch.arange(len(window), device=window.device)
            window = read(window, every, self.packing("window"), self.numerics.dtype)
        entries = chosen = None
        if self.ratio:
            self.choose(x_TD, latent, step, shared)
            entries, chosen = shared.line[1] if shared.line else shared.entries, shared.chosen
        return attend_cached(q_TAH, turn, window, plan.read, entries, chosen, self.attn_sink,
                             self.numerics.dtype, (self.packing("window"), self.packing("entry")),
                             steady=self.numerics.steady)

    def query(self, latent: Tensor) -> Tensor:
        """Queries [T, A, H] of rounded latents [T, R], before their rotation; V4 also norms each head."""
        q = self.wq_b(latent).unflatten(-1, (-1, self.config.head_dim))
        if not self.config.is_v41:
            how = ordered(self.numerics.steady)
            q = rms(q, None, self.config.rms_norm_eps, self.numerics.dtype, **how)
        return q

    def key(self, x: Tensor, turn: Tensor) -> Tensor:
        """This layer's own key-and-value vectors [T, H] of rounded inputs, rotated and rounded as cached."""
        return self.ready(self.wkv(x), turn, packed=False)

    def ready(self, kv_TH: Tensor, turn: Tensor, packed: bool) -> Tensor:
        """Such vectors, as they leave their projection, as rows for a ring that holds numbers or bytes."""
        norm = self.kv_norm
        return ready(kv_TH, norm.weight, norm.eps, turn, self.packing("window"), packed,
                     **ordered(norm.steady))[0]

    def remember_(self, ring: Tensor | None, kv_TH: Tensor, turn: Tensor, plan: RingPlan) -> Tensor:
        """Commit projected keys to this layer's ring; returns the line that `plan.read` reads."""
        if ring is None or plan.history is not None:
            return remember_(ring, self.ready(kv_TH, turn, is_packed(ring)), plan)
        norm = self.kv_norm
        return write_(ring, kv_TH, norm.weight, norm.eps, turn, plan.slots, self.packing("window"),
                      **ordered(norm.steady))[0]

    def packing(self, what: str) -> Packing:
        """How a "window" vector or a global "entry" is rounded and packed."""
        return Packing.of(self.config, self.numerics, what)

    def compress(self, x_TD: Tensor, step, memory: Memory, shared: Global) -> None:
        """At a KV source: write the global entries and index keys of the groups that these rows complete."""
        if self.layer in self.config.kv_source_layer_ids:
            step.meet(self.publish, step, memory, shared, x_TD)

    def publish(self, step, memory: Memory, shared: Global, x_TD: Tensor) -> None:
        """Do so, and let this and later layers see them."""
        plan: GroupPlan = step.groups[self.ratio]
        pooled = self.compressor(x_TD, step.pos, memory.carries.get(self.layer), plan)
        shared.entries, latent = store_(memory.entries.get(self.layer), pooled, self.compressor.norm,
                                        plan.turn, plan.slots, self.packing("entry"), keep=True)
        shared.line = shared.chosen = None
        if hasattr(self, "indexer"):
            if not self.config.is_v41:
                latent = self.indexer.compressor(x_TD, step.pos, memory.index_carries.get(self.layer), plan)
            latent = latent.detach()  # the indexer learns from its own loss
            shared.keys = self.indexer.store_(memory.keys.get(self.layer), latent, plan)

    def choose(self, x_TD: Tensor, latent: Tensor, step, shared: Global) -> None:
        """At an index source: put the selection, as pool rows [T, K], where this and later layers read it."""
        segments: list[Segment] = step.segments[self.ratio]
        if hasattr(self, "indexer"):
            if all(self._all_fit(seg) for seg in segments):
                picked = [_everything(seg, self.config.index_topk) for seg in segments]
                shared.chosen = _rows(self.lay_out(step, shared), picked)
                return
            picked, shared.candidates = self.indexer.select(x_TD, latent, step.rope[True], shared.keys,
                                                            segments, shared.candidates)
            shared.chosen = _rows(self.lay_out(step, shared), picked)
        elif shared.chosen is None:  # V4 without an indexer attends to every visible entry
            picked = [_everything(seg, seg.table.shape[1]) for seg in segments]
            shared.chosen = _rows(self.lay_out(step, shared), picked)

    def many(self, step, cache: Tensor) -> bool:
        """Whether a step has so many rows that packed ones are laid out for it, as numbers of the same value.

        A kernel adds numbers up in another order, so not where a row's bits must be the same in any step.
        """
        return is_packed(cache) and len(step.ids) >= MANY_ROWS and not self.numerics.steady

    def lay_out(self, step, shared: Global) -> list[Segment]:
        """The step's segments with tables of what attention reads: rows of the entries or of their line."""
        segments: list[Segment] = step.segments[self.ratio]
        sizes = [seg.table.numel() for seg in segments]
        if not self.many(step, shared.entries) or sum(sizes) > MOST_LAID_OUT * len(step.ids):
            shared.line = None
            return segments
        if shared.line is None or shared.line[0] is not step:
            rows = torch.cat([seg.table.flatten() for seg in segments])
            shared.line = step, read(shared.entries, rows, self.packing("entry"), self.numerics.dtype)
        every = torch.arange(sum(sizes), device=shared.entries.device).split(sizes)
        return [replace(seg, table=own.view_as(seg.table)) for seg, own in zip(segments, every, strict=True)]

    def _all_fit(self, seg: Segment) -> bool:
        """True when every visible entry is chosen anyway, so that nothing needs a score."""
        pool = self.config.candidate_topk_blocks * self.config.candidate_block_size or self.config.index_topk
        return seg.table.shape[1] <= min(self.config.index_topk, pool)

    def output(self, o_TAH: Tensor) -> Tensor:
        """Project each group of heads, which are rotated back, and join: [T, A, H] -> y_TD."""
        wo_a, numerics = self.wo_a, self.numerics
        joined = project(o_TAH, wo_a.weight, wo_a.scale, wo_a.block, self.config.o_groups, numerics.dtype,
                         numerics.held, numerics.row_tile)
        return self.wo_b(self.numerics.activation(joined))


def _everything(seg: Segment, k: int) -> Tensor:
    """All visible entries of a segment in ascending order, [B, Q, k], -1 where there is none."""
    entry = torch.arange(k, device=seg.visible.device)
    return torch.where(entry < seg.visible[..., None], entry, -1)


def _rows(segments: list[Segment], picked: list[Tensor]) -> Tensor:
    """Entry numbers per segment [B, Q, K] -> pool rows of the whole step [T, K]; -1 stays."""
    rows = []
    for seg, chosen in zip(segments, picked, strict=True):
        if seg.table.shape[1]:
            table = seg.table[:, None].expand(-1, chosen.shape[1], -1)
            chosen = torch.where(chosen < 0, -1, table.gather(2, chosen.clamp(0, seg.table.shape[1] - 1)))
        rows.append(chosen.flatten(0, 1))
    width = max(r.shape[1] for r in rows)
    return torch.cat([F.pad(r, (0, width - r.shape[1]), value=-1) for r in rows])
