"""Whole sequences at once: the Step of a training batch, and attention over it without caches.

Idea: a batch holds rows of packed conversations. Positions, n-grams and visibility restart with each conversation,
so that what is learned is what serving computes. Attention is dense with masks here (mla.attend_whole): in the warm-up
every visible entry is read, later only what the indexer selects. At a sample of rows the indexer's scores are pulled
towards the attention that they select for.

Shapes: ids, doc_start [B, T] -> Step of B*T rows; T is a multiple of the window.
Errors: ValueError when T is no multiple of the window or of a ratio.
Source: model.md 3.7 to 3.9; DeepSeek-V3.2's recipe for training an indexer (KL to the summed attention).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from dskit.config import ModelConfig
from dskit.layers import indexer as indexing
from dskit.layers.compress import GroupPlan
from dskit.layers.mla import Attention, Global, attend_whole
from dskit.layers.rope import angles
from dskit.layers.swa import RingPlan
from dskit.model import Model, Step


@dataclass
class Whole:
    """Visibility of a packed batch, and the index losses that its layers leave.

    band [B, T, 2W]; seen[ratio] [B, T, S] visible entries; probe [P] rows at which indexers learn; sparse: read the
    selection only.
    """

    shape: tuple[int, int]
    band: Tensor
    seen: dict[int, Tensor]
    rope: tuple[Tensor, Tensor]
    probe: Tensor
    sparse: bool
    index_losses: list[Tensor] = field(default_factory=list)
    selected: Tensor | None = None
    scorer: tuple[Tensor, Tensor, Tensor] | None = None

    def attend(self, layer: Attention, x_TD: Tensor, latent_TR: Tensor, q_TAH: Tensor, window_TH: Tensor,
               shared: Global) -> Tensor:
        """What `Attention.forward` asks of a whole-sequence step: the attention output [T, A, H]."""
        B, T = self.shape
        q, window = q_TAH.unflatten(0, (B, T)), window_TH.unflatten(0, (B, T))
        if not layer.ratio:
            o, _ = recompute(attend_whole, q, window, self.band, None, None, layer.attn_sink, q.dtype,
                             use_reentrant=False)
            return o.flatten(0, 1)
        entries = shared.entries.unflatten(0, (B, -1))
        if hasattr(layer, "indexer"):
            self._index(layer, x_TD.detach(), latent_TR.detach(), shared)
        seen = self.selected if self.sparse else self.seen[layer.ratio]
        learn = self.scorer is not None and torch.is_grad_enabled()
        o, given = recompute(attend_whole, q, window, self.band, entries, seen, layer.attn_sink, q.dtype,
                             self.probe if learn else None, use_reentrant=False)
        if learn:
            self.index_losses.append(index_loss(indexing.scores(*self.scorer), given, seen[:, self.probe]))
        return o.flatten(0, 1)

    def _index(self, layer: Attention, x: Tensor, latent: Tensor, shared: Global) -> None:
        B, T = self.shape
        q, weight = layer.indexer.query(x, latent, *self.rope)
        q, weight = q.unflatten(0, (B, T)), weight.unflatten(0, (B, T))
        keys = shared.keys.unflatten(0, (B, -1))
        self.scorer = q[:, self.probe], weight[:, self.probe], keys
        if self.sparse:
            with torch.no_grad():
                self._select(layer, q, weight, keys, shared)

    def _select(self, layer: Attention, q: Tensor, weight: Tensor, keys: Tensor, shared: Global) -> None:
        """Mask [B, T, S] of the selection of an index source, one sequence at a time."""
        seen, config = self.seen[layer.ratio], layer.config
        selected, candidates = torch.zeros_like(seen), []
        for b in range(self.shape[0]):
            score = indexing.scores(q[b, None], weight[b, None], keys[b, None])
            score = score.masked_fill(~seen[b, None], float("-inf"))
            if layer.layer == config.candidate_source_layer_id:
                newest = seen[b].long().cumsum(-1).argmax(-1)[None] + 1
                candidates.append(indexing.blocks(score, newest, config.candidate_block_size,
                                                  config.candidate_topk_blocks))
            elif shared.candidates is not None:
                score = score.masked_fill(~shared.candidates[b], float("-inf"))
            best = score.topk(min(config.index_topk, score.shape[-1]), dim=-1)
            selected[b].scatter_(1, best.indices[0], best.values[0] > float("-inf"))
        shared.candidates = candidates or shared.candidates
        self.selected = selected


def index_loss(score_BPS: Tensor, given_BPS: Tensor, seen_BPS: Tensor) -> Tensor:
    """Mean KL divergence of the indexer's softmax from the attention given to the entries, over rows that see some."""
    has = seen_BPS.any(dim=-1)
    log_q = score_BPS.float().masked_fill(~seen_BPS, -1e4).log_softmax(dim=-1)
    share = given_BPS / given_BPS.sum(dim=-1, keepdim=True).clamp(min=1e-9)
    kl = (share * (share.clamp(min=1e-9).log() - log_q)).masked_fill(~seen_BPS, 0).sum(dim=-1)
    return (kl * has).sum() / has.sum().clamp(min=1)


def whole_step(model: Model, folding: Tensor, ids: Tensor, doc_start: Tensor, *, sparse: bool, probes: int) -> Step:
    """The Step of a packed batch: ids and doc_start [B, T] int64; folding [V] on the device of ids."""
    config, (B, T) = model.config, ids.shape
    ratios = {config.ratio(s) for s in config.kv_source_layer_ids}
    if T % math.lcm(config.sliding_window, *ratios):
        raise ValueError(f"seq_len is {T}; it must be a multiple of the window {config.sliding_window} and of every ratio")
    pos = torch.arange(T, device=ids.device) - doc_start
    frequency = {flag: getattr(model, f"frequency_{flag:d}") for flag in (False, True)}
    rope = {flag: angles(pos.flatten(), frequency[flag]) for flag in (False, True)}
    seen = {r: _seen(doc_start, r) for r in ratios}
    probe = torch.randperm(T, device=ids.device)[:probes].sort().values
    whole = Whole((B, T), _band(doc_start, config.sliding_window), seen, rope[True], probe, sparse)
    groups = {r: _groups(pos, r, frequency[True]) for r in ratios}
    gram = _grams(folding[ids], pos, config, folding[config.engram_pad_token_id]) if config.engram_layer_ids else None
    nothing = RingPlan(ids.new_empty(0), None, None, ids.new_empty(0))
    return Step(ids.flatten(), pos.flatten(), rope, (nothing, nothing), groups, gram=gram, whole=whole)


def _seen(doc_start: Tensor, ratio: int) -> Tensor:
    T = doc_start.shape[1]
    entry = torch.arange(T // ratio, device=doc_start.device)
    done = (torch.arange(T, device=doc_start.device) + 1) // ratio
    return (entry < done[None, :, None]) & (entry >= (doc_start // ratio)[..., None])


def _band(doc_start: Tensor, window: int) -> Tensor:
    row = torch.arange(doc_start.shape[1], device=doc_start.device)
    key = (row[:, None] // window - 1) * window + torch.arange(2 * window, device=doc_start.device)
    near = (key <= row[:, None]) & (key > row[:, None] - window)
    return near & (key >= doc_start[..., None])


def _groups(pos: Tensor, ratio: int, frequency: Tensor) -> GroupPlan:
    first = pos[:, ::ratio].flatten()
    members = torch.arange(pos.numel(), device=pos.device).unflatten(0, (-1, ratio))
    empty = members.new_empty(0)
    ring = RingPlan(members, None, None, empty) if ratio > 1 else None
    return GroupPlan(ring, *angles(first, frequency), empty)


def _grams(folded: Tensor, pos: Tensor, config: ModelConfig, filler: Tensor) -> Tensor:
    """Folded n-grams [B*T, Q], newest first; what lies before the conversation is filler."""
    shifted = [torch.where(pos >= s, folded.roll(s, dims=1), filler) for s in range(config.engram_max_ngram_size)]
    return torch.stack(shifted, dim=-1).flatten(0, 1)
