"""Logits become one token per sequence.

Idea: order of work: logit bias; repetition, presence and frequency penalties; temperature; top-k, top-p,
min-p; draw. A draw depends on (seed, position, purpose) alone: a hash gives a number u in [0, 1), and the
token is the first one whose cumulative probability exceeds u. So the same request gives the same tokens in
any batch, in any order.

Shapes: logits_RV [R sequences, V vocabulary] float32, on any device; one Sampled per row comes back.
Units: log-probabilities are natural, of the distribution before step one.
Errors: a row with NaN or an infinity gives a Sampled whose `error` is set; the other rows are untouched.
Numerics: probabilities and their sums in float64.
Source: engine.md section 10; SplitMix64 is Steele, Lea and Flood, OOPSLA 2014.
"""

from __future__ import annotations

import math

import torch

from dskit.engine.seq import Sampled, SamplingParams, Sequence

MASK64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
NOT_FINITE = (
    "the model produced logits that are not finite; check the checkpoint's weights (dskit convert --dry-run)"
)


def uniform(seed: int, position: int, purpose: int = 0) -> float:
    """The number in [0, 1) of this seed (64 bits), position and purpose (0: a token of the model)."""
    s = ((3 * position + purpose) * GOLDEN) & MASK64
    return (_splitmix64((seed + (s ^ (s << 13))) & MASK64) >> 11) / 2**53


def _splitmix64(x: int) -> int:
    """One output of the SplitMix64 generator in state x."""
    z = (x + GOLDEN) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def sample(logits_RV: torch.Tensor, seqs: list[Sequence]) -> list[Sampled]:
    """Choose the next token of every sequence, row i for seqs[i]."""
    if len(logits_RV) != len(seqs):
        raise ValueError(f"{len(seqs)} sequences wait for a token, but the runner gave {len(logits_RV)} rows")
    best, sums = (
        logits_RV.argmax(-1).tolist(),
        logits_RV.sum(-1).tolist(),
    )  # greedy and unedited: all there is to do
    out = [
        Sampled(i) if math.isfinite(s) else Sampled(None, error=NOT_FINITE)
        for i, s in zip(best, sums, strict=True)
    ]
    good = [i for i, one in enumerate(out) if one.error is None]
    drawn = [i for i in good if not seqs[i].params.greedy or seqs[i].params.edits_logits]
    if drawn:
        for i, token in zip(drawn, _draw(logits_RV[drawn].double(), [seqs[i] for i in drawn]), strict=True):
            out[i] = Sampled(token)
    for i in good:
        if seqs[i].params.logprobs is not None:
            out[i] = _with_logprobs(logits_RV[i], out[i].token_id, seqs[i].params.logprobs)
    return out


def _draw(logits_RV: torch.Tensor, seqs: list[Sequence]) -> list[int]:
    """Edit, scale, filter and draw; greedy rows take the largest edited logit. Changes its float64 rows."""
    for row_V, seq in zip(logits_RV, seqs, strict=True):
        if seq.params.edits_logits:
            _edit(row_V, seq)

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits_RV.device)[:, None]

    params = [seq.params for seq in seqs]
    probs_RV = (logits_RV / column([1.0 if p.greedy else p.temperature for p in params])).softmax(-1)
    if any(p.filters for p in params):
        probs_RV = _filter(
            probs_RV,
            column([p.top_k if p.top_k > 0 else math.inf for p in params]),
            column([p.top_p if p.top_p < 1 else math.inf for p in params]),
            column([p.min_p for p in params]),
        )
    drawn = inverse_cdf(probs_RV, column([uniform(s.seed, len(s.tokens)) for s in seqs])).tolist()
    best = logits_RV.argmax(-1).tolist()
    return [b if p.greedy else d for b, d, p in zip(best, drawn, params, strict=True)]


def _edit(row_V: torch.Tensor, seq: Sequence) -> None:
    """Bias and penalties, in place; repetition counts the prompt too, the others new tokens only."""
    p: SamplingParams = seq.params
    if p.logit_bias:
        row_V[list(p.logit_bias)] += torch.tensor(
            list(p.logit_bias.values()), dtype=row_V.dtype, device=row_V.device
        )
    if p.repetition_penalty != 1:
        seen = torch.tensor(seq.tokens, device=row_V.device).unique()
        row_V[seen] = torch.where(
            row_V[seen] > 0, row_V[seen] / p.repetition_penalty, row_V[seen] * p.repetition_penalty
        )
    new = torch.tensor(seq.tokens[seq.prompt_len :], dtype=torch.long, device=row_V.device)
    if (p.presence_penalty or p.frequency_penalty) and len(new):
        ids, counts = new.unique(return_counts=True)
        row_V[ids] -= p.presence_penalty + p.frequency_penalty * counts


def _filter(
    probs_RV: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Zero for the tokens that a filter takes away; columns [R, 1]. The most probable token stays."""
    sorted_RV, order_RV = probs_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(probs_RV.shape[-1], device=probs_RV.device)
    sorted_RV = sorted_RV.masked_fill(rank_V >= top_k, 0)
    sorted_RV = sorted_RV / sorted_RV.sum(-1, keepdim=True)
    before_RV = sorted_RV.cumsum(-1) - sorted_RV  # the token that crosses top_p stays
    out = (before_RV >= top_p) | (sorted_RV < min_p * sorted_RV[:, :1])
    return torch.zeros_like(probs_RV).scatter(-1, order_RV, sorted_RV.masked_fill(out & (rank_V > 0), 0))


def inverse_cdf(probs_RV: torch.Tensor, u_R1: torch.Tensor) -> torch.Tensor:
    """The first id whose cumulative probability exceeds u; never one of probability 0."""
    cdf_RV = probs_RV.cumsum(-1)
    total_R1 = cdf_RV[:, -1:]
    target_R1 = torch.minimum(u_R1 * total_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))
    return torch.searchsorted(cdf_RV, target_R1, right=True)[:, 0]


def _with_logprobs(row_V: torch.Tensor, token_id: int, k: int) -> Sampled:
    """The chosen token with its log-probability and the k best ones."""
    logprobs_V = row_V.double().log_softmax(-1)
    values, ids = logprobs_V.topk(min(k, len(row_V)))
    top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return Sampled(token_id, logprobs_V[token_id].item(), top)
