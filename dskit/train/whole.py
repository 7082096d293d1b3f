"""Whole sequences at once: the Step of a training batch, and attention over it without caches.

Idea: a batch holds rows of packed conversations. Positions, n-grams and visibility restart with each
conversation, so that what is learned is what serving computes. Attention is dense with masks here
(mla.attend_whole): in the warm-up every visible entry is read, later only what the indexer selects. At a
sample of rows the indexer's scores are pulled towards the attention that they select for.

Shapes: ids, doc_start [B, T] -> Step of B*T rows; T is a multiple of the window.
Errors: ValueError when T is no multiple of the window or of a ratio.
Source: model.md 3.7 to 3.9; DeepSeek-V3.2's recipe for training an indexer (KL to the summed attention).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from dskit.config import ModelConfig
from dskit.layers import indexer as indexing
from dskit.layers.compress import GroupPlan
from dskit.layers.mla import Attention, Global, attend_whole
from dskit.layers.norm import up
from dskit.layers.rope import turns
from dskit.layers.swa import RingPlan
from dskit.model import Model, Step

SINK_KEYS = 8  # key slots that mla.attend_whole takes for the sink


@dataclass
class Whole:
    """Visibility of a packed batch, and the index losses that its layers leave.

    near [B*T/W, W, 2W] and band [B, T, T]: the window within blocks of W rows, and over the row; seen[ratio]
    [B, T, S] visible entries; probe [P] rows at which indexers learn; sparse: read the selection only.
    """

    shape: tuple[int, int]
    near: Tensor
    band: Tensor
    seen: dict[int, Tensor]
    turn: Tensor
    probe: Tensor
    sparse: bool
    index_losses: list[Tensor] = field(default_factory=list)
    biases: dict[int, Tensor] = field(default_factory=dict)
    reads: Tensor | None = None
    scorer: tuple[Tensor, Tensor, Tensor] | None = None

    def attend(self, layer: Attention, x_TD: Tensor, latent_TR: Tensor, q_TAH: Tensor, window_TH: Tensor,
               shared: Global) -> Tensor:
        """What `Attention.forward` asks of a whole-sequence step: the attention output [T, A, H]."""
        B, T = self.shape
        if not layer.ratio:
            return self._window_only(layer, q_TAH, window_TH)
        q, keys = q_TAH.unflatten(0, (B, T)), shared.entries.unflatten(0, (B, -1))
        if hasattr(layer, "indexer"):
            self._index(layer, x_TD.detach(), latent_TR.detach(), shared)
        elif layer.ratio not in self.biases:  # nothing selects: every visible entry is read
            self._see(layer.ratio, self.seen[layer.ratio], q.dtype)
        keys = F.pad(torch.cat((window_TH.unflatten(0, (B, T)), keys), dim=1), (0, 0, 0, SINK_KEYS))
        bias = self.biases[layer.ratio]
        o = attend_whole(q, keys, bias, layer.attn_sink)
        if torch.is_grad_enabled() and self.scorer is not None:
            given = self._given(q, keys, bias, layer.attn_sink)
            score = indexing.scores(*self.scorer)
            self.index_losses.append(index_loss(score, given, self.reads[:, self.probe]))
        return o.flatten(0, 1)

    def _window_only(self, layer: Attention, q_TAH: Tensor, window_TH: Tensor) -> Tensor:
        W = self.near.shape[1]
        block = window_TH.unflatten(0, (-1, self.shape[1] // W, W))
        before = F.pad(block[:, :-1], (0, 0, 0, 0, 1, 0))
        keys = F.pad(torch.cat((before, block), dim=2).flatten(0, 1), (0, 0, 0, SINK_KEYS))
        bias = additive_mask(self.near, window_TH.dtype)
        return attend_whole(q_TAH.unflatten(0, (-1, W)), keys, bias, layer.attn_sink).flatten(0, 1)

    def _index(self, layer: Attention, x: Tensor, latent: Tensor, shared: Global) -> None:
        """At an index source: what layers read from now on, and how its choice is scored at the probes."""
        B, T = self.shape
        q, weight = layer.indexer.query(x, latent, self.turn)
        q, weight = q.unflatten(0, (B, T)), weight.unflatten(0, (B, T))
        keys = shared.keys.unflatten(0, (B, -1))
        self.scorer = q[:, self.probe], weight[:, self.probe], keys
        self.reads = self.seen[layer.ratio]
        if self.sparse:
            with torch.no_grad():
                self.reads = self._select(layer, indexing.scores(q, weight, keys), shared)
        elif layer.ratio in self.biases:
            return
        self._see(layer.ratio, self.reads, shared.entries.dtype)

    def _see(self, ratio: int, reads: Tensor, dtype: torch.dtype) -> None:
        """What layers of a ratio see from now on: their window, and these entries [B, T, S]."""
        self.biases[ratio] = additive_mask(torch.cat((self.band, reads), dim=-1), dtype)

    def _select(self, layer: Attention, score: Tensor, shared: Global) -> Tensor:
        """Mask [B, T, S] of the selection of an index source."""
        seen, config = self.seen[layer.ratio], layer.config
        score = score.masked_fill(~seen, float("-inf"))
        if layer.layer == config.candidate_source_layer_id:
            last = (seen * torch.arange(1, seen.shape[-1] + 1, device=seen.device)).amax(dim=-1)
            best = indexing.blocks(score, last, config.candidate_block_size, config.candidate_topk_blocks)
            shared.candidates = indexing.members(best, config.candidate_block_size, score.shape[-1])
        elif shared.candidates is not None:
            score = score.masked_fill(~shared.candidates, float("-inf"))
        best = score.topk(min(config.index_topk, score.shape[-1]), dim=-1)
        return torch.zeros_like(seen).scatter_(-1, best.indices, best.values > float("-inf"))

    @torch.no_grad()
    def _given(self, q: Tensor, keys: Tensor, bias: Tensor, sink_A: Tensor) -> Tensor:
        """What the heads on average give each entry at the probes, float32 [B, P, S]."""
        B, T = self.shape
        q, bias = up(q[:, self.probe]), bias[:, self.probe]
        z = ((q.flatten(1, 2) @ up(keys).transpose(1, 2)).unflatten(1, q.shape[1:3]) * q.shape[-1] ** -0.5
             + bias[:, :, None])
        z[..., -SINK_KEYS] = sink_A
        return z.softmax(dim=-1)[..., T:-SINK_KEYS].mean(dim=2)


def index_loss(score_BPS: Tensor, given_BPS: Tensor, reads_BPS: Tensor) -> Tensor:
    """Mean KL of the indexer's softmax from the attention given to the entries, over rows that read some."""
    has = reads_BPS.any(dim=-1)
    log_q = score_BPS.float().masked_fill(~reads_BPS, -1e4).log_softmax(dim=-1)
    share = given_BPS / given_BPS.sum(dim=-1, keepdim=True).clamp(min=1e-9)
    kl = (share * (share.clamp(min=1e-9).log() - log_q)).masked_fill(~reads_BPS, 0).sum(dim=-1)
    return (kl * has).sum() / has.sum().clamp(min=1)


def whole_step(model: Model, folding: Tensor, ids: Tensor, doc_start: Tensor, *,
               sparse: bool, probes: int) -> Step:
    """The Step of a packed batch: ids and doc_start [B, T] int64; folding [V] on the device of ids."""
    config, (B, T) = model.config, ids.shape
    ratios = {config.ratio(s) for s in config.kv_source_layer_ids}
    if T % math.lcm(config.sliding_window, *ratios):
        raise ValueError(f"seq_len is {T}; it must be a multiple of the window {config.sliding_window} "
                         "and of every ratio")
    pos = torch.arange(T, device=ids.device) - doc_start
    frequency = {flag: getattr(model, f"frequency_{flag:d}") for flag in (False, True)}
    rope = {flag: turns(pos.flatten(), frequency[flag]) for flag in (False, True)}
    probe = torch.rand(T, device=ids.device).argsort()[:probes]
    whole = Whole((B, T), _near(doc_start, config.sliding_window), _band(doc_start, config.sliding_window),
                  {r: _seen(doc_start, r) for r in ratios}, rope[True], probe, sparse)
    groups = {r: _groups(pos, r, frequency[True]) for r in ratios}
    gram = (_grams(folding[ids], pos, config, folding[config.engram_pad_token_id])
            if config.engram_layer_ids else None)
    nothing = RingPlan(ids.new_empty(0), None, None, ids.new_empty(0))
    return Step(ids.flatten(), pos.flatten(), rope, (nothing, nothing), groups, gram=gram, whole=whole)


def additive_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask for attend_whole: 0 where seen, -inf elsewhere, the sink's slots appended."""
    sink = torch.arange(SINK_KEYS, device=seen.device) == 0
    seen = torch.cat((seen, sink.expand(*seen.shape[:-1], -1)), dim=-1)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def _seen(doc_start: Tensor, ratio: int) -> Tensor:
    T = doc_start.shape[1]
    entry = torch.arange(T // ratio, device=doc_start.device)
    done = (torch.arange(T, device=doc_start.device) + 1) // ratio
    return (entry < done[None, :, None]) & (entry >= (doc_start // ratio)[..., None])


def _band(doc_start: Tensor, window: int) -> Tensor:
    row = torch.arange(doc_start.shape[1], device=doc_start.device)
    near = (row <= row[:, None]) & (row > row[:, None] - window)
    return near & (row >= doc_start[..., None])


def _near(doc_start: Tensor, window: int) -> Tensor:
    """The window of each row among the 2W tokens of its block and the block before, [B*T/W, W, 2W]."""
    row = torch.arange(doc_start.shape[1], device=doc_start.device)
    key = (row[:, None] // window - 1) * window + torch.arange(2 * window, device=doc_start.device)
    near = (key <= row[:, None]) & (key > row[:, None] - window) & (key >= doc_start[..., None])
    return near.flatten(0, 1).unflatten(0, (-1, window))


def _groups(pos: Tensor, ratio: int, frequency: Tensor) -> GroupPlan:
    first = pos[:, ::ratio].flatten()
    members = torch.arange(pos.numel(), device=pos.device).unflatten(0, (-1, ratio))
    empty = members.new_empty(0)
    ring = RingPlan(members, None, None, empty) if ratio > 1 else None
    return GroupPlan(ring, turns(first, frequency), empty)


def _grams(folded: Tensor, pos: Tensor, config: ModelConfig, filler: Tensor) -> Tensor:
    """Folded n-grams [B*T, Q], newest first; what lies before the conversation is filler."""
    shifted = [torch.where(pos >= s, folded.roll(s, dims=1), filler)
               for s in range(config.engram_max_ngram_size)]
    return torch.stack(shifted, dim=-1).flatten(0, 1)
