"""Sparse indexer: scores every global entry cheaply and selects the few that attention will read.

Idea: small index queries meet small index keys; rectified dot products are summed under
per-token head weights, and the K best visible entries are kept. A candidate source also
publishes the best blocks of entries, and later index layers let only those compete. Layers that
are no index source reuse the newest selection.

    score[t, s] = sum_h w[t, h] * max(0, q[t, h] . key[s]),   s visible when s < (t + 1) // ratio

Shapes: q [B, Q, X, Y] (X index heads of width Y), keys [B, S, Y] -> scores [B, Q, S] -> chosen [B, Q, K],
ascending, -1 where fewer are visible. Q is the rows per request of a segment.
State: index keys are a cache (cache.py): numbers or packed bytes.
Errors: none of its own.
Numerics: release scores are bfloat16 after the dot product, the head product and the sum; ties go to the
lower index.
Kernel: kernels/indexer.py (indexer.hadamard, indexer.scores_cached, indexer.blocks, indexer.topk)
Source: model.md 3.9, 6.2, 9; config fields index_topk, candidate_topk_blocks, candidate_block_size.
Try: notebooks/02_sliding_window.ipynb
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dskit import ops
from dskit.config import ModelConfig
from dskit.layers.cache import Packing, read, ready, store_
from dskit.layers.compress import Compressor, GroupPlan
from dskit.layers.linear import Linear, Numerics
from dskit.layers.norm import RMSNorm
from dskit.layers.rope import rotate

SCORE_ELEMENTS = 1 << 24  # products held at once; longer prefills are scored in blocks of rows
SCORES_HELD = 1 << 29  # scores of a segment held at once: of 8,192 rows with 131,072 positions behind them


@dataclass
class Segment:
    """Consecutive rows of requests that add equally many rows, for one ratio.

    rows: slice of the step; visible [B, Q]: how many entries each row may see;
    table [B, S]: pool rows of the entries, in runs of `run` neighbours that begin at a multiple of it.
    """

    rows: slice
    shape: tuple[int, int]
    visible: Tensor
    table: Tensor
    run: int = 1


@ops.op("indexer.scores")
def scores(q_BQXY: Tensor, weight_BQX: Tensor, key_BSY: Tensor, row_tile: int | None = None) -> Tensor:
    """Scores [B, Q, S] in the dtype of `weight`, which also holds the products (bfloat16 in release)."""
    dtype, wide = weight_BQX.dtype, torch.promote_types(weight_BQX.dtype, torch.float32)
    B, Q, X, Y = q_BQXY.shape
    S = key_BSY.shape[1]
    tile = row_tile or 1
    key = F.pad(key_BSY, (0, 0, 0, -S % tile)).to(wide)
    held = SCORE_ELEMENTS * (16 if key.is_cuda else 1)
    step = max(1, held // max(1, B * X * key.shape[1]))
    parts = []
    for q, weight in zip(q_BQXY.to(wide).split(step, dim=1), weight_BQX.split(step, dim=1), strict=True):
        if row_tile is None:
            dot = q.flatten(1, 2) @ key.transpose(1, 2)  # [B, q*X, S]
            dot = dot.unflatten(1, (-1, X))
        else:  # fixed shapes: tiles of keys times the heads of one query
            tiles = key.unflatten(1, (-1, tile))[:, None]
            dot = (tiles @ q.transpose(2, 3)[:, :, None]).flatten(2, 3).transpose(2, 3)
        parts.append((dot.to(dtype).relu() * weight[..., None]).sum(dim=2)[..., :S])
    return torch.cat(parts, dim=1) if parts else key.new_zeros(B, Q, S, dtype=dtype)


@ops.op("indexer.scores_cached", grad=False)
def scores_cached(q_BQXY: Tensor, weight_BQX: Tensor, pool: Tensor, table_BS: Tensor, visible_BQ: Tensor,
                  packing: Packing, dtype: torch.dtype, row_tile: int | None = None,
                  block_BQC: Tensor | None = None, size: int = 1, run: int = 1) -> Tensor:
    """`scores` of the keys in rows `table` of a cache, read as `dtype`; -inf outside what a row may see.

    Queries are numbers that are rounded as keys are. Given blocks of `size` entries (-1: none), only those:
    [B, Q, C * size]. What `run` promises (Segment) lets a kernel read keys side by side.
    """
    of = scores(q_BQXY, weight_BQX, read(pool, table_BS, packing, dtype), row_tile)
    S = of.shape[-1]
    of = of.masked_fill(torch.arange(S, device=of.device) >= visible_BQ[..., None], float("-inf"))
    if block_BQC is None:
        return of
    entry = (block_BQC[..., None] * size + torch.arange(size, device=of.device)).flatten(-2)
    here = (entry >= 0) & (entry < S)
    return of.gather(-1, entry.where(here, 0)).masked_fill(~here, float("-inf"))


@ops.op("indexer.blocks")
def blocks(score_BQS: Tensor, visible_BQ: Tensor, size: int, count: int) -> Tensor:
    """Candidates: the `count` best blocks of `size` entries, as `topk` gives them; the newest visible block
    is always one: int64 [B, Q, count].
    """
    S = score_BQS.shape[-1]
    best = F.pad(score_BQS, (0, -S % size), value=float("-inf")).unflatten(-1, (-1, size)).amax(dim=-1)
    best.scatter_(-1, ((visible_BQ - 1).clamp(min=0) // size)[..., None], float("inf"))
    return topk(best, count)


@ops.op("indexer.topk")
def topk(score_BQS: Tensor, k: int) -> Tensor:
    """The k best entries of each row with a score above -inf, ascending, padded with -1: int64 [B, Q, k]."""
    S = score_BQS.shape[-1]
    best = _ranks(score_BQS).topk(min(k, S), dim=-1, sorted=False).values
    index = S - 1 - (best & 0xFFFFFFFF)
    index = index.masked_fill(best >> 32 == _MINUS_INFINITY, S).sort(dim=-1).values
    return F.pad(index.masked_fill(index == S, -1), (0, k - index.shape[-1]), value=-1)


_MINUS_INFINITY = -0x7F800001  # the rank of -inf before its place is added


def _ranks(score: Tensor) -> Tensor:
    """One int64 per score, in the scores' order; of equals the earlier ranks higher, so none are equal."""
    bits = (score.float() + 0.0).view(torch.int32)  # -0 becomes 0, its equal
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # floats of either sign in the order of integers
    return (order << 32) + torch.arange(score.shape[-1] - 1, -1, -1, device=score.device)


@ops.op("indexer.hadamard")
def hadamard(v: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last axis, a power of two wide."""
    width, y = v.shape[-1], v.float()
    half = 1
    while half < width:
        a, b = y.unflatten(-1, (-1, 2, half)).unbind(dim=-2)
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        half *= 2
    return (y * width**-0.5).to(v.dtype)


class Indexer(nn.Module):
    """Index queries of one index source; a KV source also makes the index keys."""

    def __init__(self, config: ModelConfig, layer: int, numerics: Numerics):
        super().__init__()
        self.config, self.layer, self.numerics = config, layer, numerics
        self.heads, self.width = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.width, numerics,
                           block=config.weight_block_size)
        self.weights_proj = Linear(config.hidden_size, self.heads, numerics, fmt="bf16")
        if layer in config.kv_source_layer_ids:
            if config.is_v41:
                self.wk = Linear(config.head_dim, self.width, numerics, fmt="bf16")
                self.k_norm = RMSNorm(self.width, config.rms_norm_eps, numerics.dtype, numerics.steady)
            else:
                self.compressor = Compressor(config, config.ratio(layer), numerics, self.width)

    @property
    def packing(self) -> Packing:
        """How index keys and queries are rounded, and keys packed."""
        return Packing.of(self.config, self.numerics, "key")

    def store_(self, pool: Tensor | None, latent: Tensor, plan: GroupPlan) -> Tensor:
        """Put the index keys [E, Y] of new entries in the pool and return it; without one they are the pool.

        latent: the entries' normed, un-rotated latents; in V4 what its own compressor pooled, not normed.
        """
        if self.config.is_v41:
            return store_(pool, self.wk(latent), self.k_norm, plan.turn, plan.slots, self.packing)[0]
        key = self._spread(rotate(self.compressor.norm(latent), plan.turn))
        return store_(pool, key, None, None, plan.slots, self.packing)[0]

    def _spread(self, v: Tensor) -> Tensor:
        """V4 spreads what a channel says over all of them, so that four bits lose less."""
        return hadamard(v) if self.numerics.release else v

    def query(self, x_TD: Tensor, latent_TR: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
        """Index queries [T, X, Y] and head weights [T, X]; latent_TR is rounded for wq_b."""
        q = self.wq_b(latent_TR).unflatten(-1, (self.heads, self.width))
        if not self.config.is_v41:
            q, turn = self._spread(rotate(q, turn)), None
        q, _ = ready(q, None, 0.0, turn, self.packing, False)
        return q, self.weights_proj(x_TD) * (self.width**-0.5 * self.heads**-0.5)

    def select(self, x_TD: Tensor, latent_TR: Tensor, turn: Tensor, pool: Tensor, segments: list[Segment],
               candidates: list[Tensor | None] | None) -> tuple[list[Tensor], list[Tensor | None] | None]:
        """(chosen entries [B, Q, K] per segment, candidate blocks, to which later index sources keep)."""
        source = self.layer == self.config.candidate_source_layer_id
        q_TXY, weight_TX = self.query(x_TD, latent_TR, turn)
        chosen, kept = [], []
        for i, seg in enumerate(segments):
            given = [of[seg.rows].unflatten(0, seg.shape) for of in (q_TXY, weight_TX)] + [seg.visible]
            if candidates is not None and not source and candidates[i] is not None:
                given.append(candidates[i])
            step = max(1, SCORES_HELD // max(1, seg.table.numel()))  # rows of each request
            entries, best = zip(*(self._select(pool, seg, source, *part)
                                  for part in zip(*(of.split(step, dim=1) for of in given), strict=True)),
                                strict=True)
            chosen.append(_joined(entries))
            kept.append(None if best[0] is None else _joined(best))
        return chosen, kept if source else candidates

    def _select(self, pool: Tensor, seg: Segment, source: bool, q_BQXY: Tensor, weight_BQX: Tensor,
                visible_BQ: Tensor, block_BQC: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(chosen entries, the best blocks, None where all are or nobody asks) of some rows of a segment;
        block: those that compete (None: all entries do).
        """
        count, size = self.config.candidate_topk_blocks, self.config.candidate_block_size
        of = scores_cached(q_BQXY, weight_BQX, pool, seg.table, visible_BQ, self.packing,
                           self.numerics.compute, self.numerics.row_tile, block_BQC, size, seg.run)
        best = blocks(of, visible_BQ, size, count) if source and of.shape[-1] > count * size else None
        return _entries(topk(of, self.config.index_topk), block_BQC, size), best


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    """Rows of requests [B, Q, ...] one after the other; one part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _entries(place: Tensor, block_BQC: Tensor | None, size: int) -> Tensor:
    """Entries at places of a row of candidates, which is ascending as they are; -1 stays."""
    if block_BQC is None:
        return place
    at = place.clamp(min=0)
    return (block_BQC.gather(-1, at // size) * size + at % size).masked_fill(place < 0, -1)


def members(block_BQC: Tensor, size: int, entries: int) -> Tensor:
    """Mask [B, Q, entries] of what lies in blocks."""
    count = -(-entries // size)
    mask = block_BQC.new_zeros(*block_BQC.shape[:-1], count + 1, dtype=torch.bool)
    mask.scatter_(-1, block_BQC.where(block_BQC >= 0, count), True)
    return mask[..., :count].repeat_interleave(size, dim=-1)[..., :entries]
