"""Logits become one token per sequence.

Idea: order of work: logit bias; repetition, presence and frequency penalties; grammar; temperature; top-k,
top-p, min-p; draw. A draw depends on (seed, position, purpose) alone: a hash gives a number u in [0, 1), and
the token is the first one whose cumulative probability exceeds u. So the same request gives the same tokens
in any batch, in any order.

Shapes: logits_RV [R sequences, V vocabulary] float32, on any device; one Sampled per row comes back.
Units: log-probabilities are natural, of the distribution before step one.
Errors: a row with NaN or an infinity gives a Sampled whose `error` is set, and so does one whose grammar has
failed; the other rows are untouched.
Numerics: bias, penalties, probabilities and their sums in float64; edited logits are rounded to float32.
Kernel: kernels/sampler.py (sampler.draw)
Source: engine.md section 10; SplitMix64 is Steele, Lea and Flood, OOPSLA 2014.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dskit import ops
from dskit.engine import grammar
from dskit.engine.host import Fetch, send
from dskit.engine.seq import GREEDY_BELOW, Ahead, Sampled, SamplingParams, Sequence

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


@dataclass
class Drawn:
    """Chosen tokens: `ids_R` can be used on the device at once, `read` waits for them."""

    ids_R: Tensor
    fetch: Fetch
    scored: list[int]  # rows whose log-probabilities were asked for
    errors: dict[int, str]  # by row

    def read(self) -> list[Sampled]:
        """One Sampled per row."""
        ids, finite, *scores = self.fetch.wait()
        out = [
            Sampled(i) if math.isfinite(s) else Sampled(None, error=NOT_FINITE)
            for i, s in zip(ids.tolist(), finite.tolist(), strict=True)
        ]
        for row, error in self.errors.items():
            out[row] = Sampled(None, error=error)
        for i, chosen, values, best in zip(self.scored, scores[::3], scores[1::3], scores[2::3], strict=True):
            if out[i].error is None:
                top = list(zip(best.tolist(), values.tolist(), strict=True))
                out[i] = Sampled(out[i].token_id, chosen.item(), top)
        return out


def sample(logits_RV: Tensor, seqs: list[Sequence | Ahead]) -> list[Sampled]:
    """Choose the next token of every sequence, row i for seqs[i]."""
    return start(logits_RV, seqs).read()


def start(logits_RV: Tensor, seqs: list[Sequence | Ahead], ids: Tensor | None = None) -> Drawn:
    """`sample` without waiting for the device; `ids`: tokens that have been chosen already."""
    if len(logits_RV) != len(seqs):
        raise ValueError(f"{len(seqs)} sequences wait for a token, but the runner gave {len(logits_RV)} rows")
    finite = logits_RV.sum(-1)  # as soon as one logit of the row is not, the sum is not
    if ids is None:
        ids = choose(logits_RV, seqs)
    scored = [i for i, seq in enumerate(seqs) if seq.params.logprobs is not None]
    scores = [t for i in scored for t in _logprobs(logits_RV[i], ids[i], seqs[i].params.logprobs)]
    errors = {i: seq.grammar.error for i, seq in enumerate(seqs) if seq.grammar and seq.grammar.error}
    return Drawn(ids, Fetch([ids, finite, *scores]), scored, errors)


def choose(logits_RV: Tensor, seqs: list[Sequence | Ahead]) -> Tensor:
    """Edit where a request asks for it, filter and draw: ids_R on the device of the logits."""
    logits_RV, params = _edited(logits_RV, seqs), [seq.params for seq in seqs]
    if all(p.greedy for p in params):
        return logits_RV.argmax(-1)
    u_R = [uniform(seq.seed, seq.position) for seq in seqs]
    temperature_R, top_p_R, min_p_R, top_k_R, u_R = _columns(params, logits_RV.device, u_R)
    return draw(logits_RV, temperature_R, top_k_R.long(), top_p_R, min_p_R, u_R)


def allowed(logits_RV: Tensor, seqs: list[Sequence | Ahead]) -> Tensor:
    """Logits as they are drawn from, but for the temperature: edited, minus infinity for what is filtered."""
    logits_RV, params = _edited(logits_RV, seqs), [seq.params for seq in seqs]
    if not any(p.filters for p in params):
        return logits_RV
    temperature_R, top_p_R, min_p_R, top_k_R = _columns(params, logits_RV.device)
    probs_RV = _filtered(_probabilities(logits_RV, temperature_R), top_k_R, top_p_R, min_p_R)
    return logits_RV.masked_fill((probs_RV == 0) & ~_greedy(temperature_R)[:, None], -math.inf)


def choose_allowed(logits_RV: Tensor, seqs: list[Sequence | Ahead], u_R: list[float]) -> Tensor:
    """Draw with the numbers u from logits that `allowed` gave."""
    temperature_R, *_, u_R = _columns([seq.params for seq in seqs], logits_RV.device, u_R)
    none = torch.zeros_like(u_R)
    return draw(logits_RV, temperature_R, none.long(), none + 1, none, u_R)


def _edited(logits_RV: Tensor, seqs: list[Sequence | Ahead]) -> Tensor:
    edited = [i for i, seq in enumerate(seqs) if seq.params.edits_logits]
    if edited:
        logits_RV = logits_RV.clone()
    for i in edited:
        row_V = logits_RV[i].double()
        _edit(row_V, seqs[i])
        logits_RV[i] = row_V
    if rows := [i for i, seq in enumerate(seqs) if seq.grammar]:
        logits_RV[rows] = logits_RV[rows].masked_fill(~_masks(logits_RV, [seqs[i] for i in rows]), -math.inf)
    return logits_RV


def _masks(logits_RV: Tensor, seqs: list[Sequence | Ahead]) -> Tensor:
    """Which tokens the grammars let follow, bool [R, V]."""
    bits_RW = grammar.blank(len(seqs), logits_RV.shape[-1])
    for row, seq in enumerate(seqs):
        text, more = (seq.seq, seq.more) if isinstance(seq, Ahead) else (seq, ())
        seq.grammar.fill(bits_RW, row, text.tokens, more)
    return grammar.unpack(send(bits_RW, logits_RV.device), logits_RV.shape[-1])


def _columns(params: list[SamplingParams], device: torch.device, *more: list[float]) -> Tensor:
    """Temperature, top_p, min_p, top_k and what else there is, float64 [4 + more, R]."""
    names = ("temperature", "top_p", "min_p", "top_k")
    rows = [*([getattr(p, name) for p in params] for name in names), *more]
    return send(torch.tensor(rows, dtype=torch.float64), device)


@ops.op("sampler.draw", grad=False)
def draw(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, u_R: Tensor
) -> Tensor:
    """One id per row, int64: scale, filter, and the first id whose cumulative probability exceeds u.

    logits float32; temperature, top_p, min_p, u float64; top_k int64.  A temperature below 1e-5 takes the
    largest logit; top_k <= 0, top_p >= 1 and min_p = 0 take nothing away.  Of equal logits the lower id is
    the better one.  A logit of minus infinity has probability 0; each row needs one that is finite.
    """
    probs_RV = _probabilities(logits_RV, temperature_R)
    if bool(((top_k_R > 0) | (top_p_R < 1) | (min_p_R > 0)).any()):
        probs_RV = _filtered(probs_RV, top_k_R, top_p_R, min_p_R)
    drawn_R = inverse_cdf(probs_RV, u_R[:, None]).clamp_max(logits_RV.shape[-1] - 1)  # a row of NaN: some id
    return torch.where(_greedy(temperature_R), logits_RV.argmax(-1), drawn_R)


def _greedy(temperature_R: Tensor) -> Tensor:
    return temperature_R < GREEDY_BELOW


def _probabilities(logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
    scale_R = temperature_R.masked_fill(_greedy(temperature_R), 1)
    return (logits_RV.double() / scale_R[:, None]).softmax(-1)


def _edit(row_V: Tensor, seq: Sequence) -> None:
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


def _filtered(probs_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Zero for the tokens that a filter takes away. The most probable token stays."""
    top_k = top_k_R.double().masked_fill(top_k_R <= 0, math.inf)[:, None]
    top_p = top_p_R.masked_fill(top_p_R >= 1, math.inf)[:, None]
    sorted_RV, order_RV = probs_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(probs_RV.shape[-1], device=probs_RV.device)
    sorted_RV = sorted_RV.masked_fill(rank_V >= top_k, 0)
    sorted_RV = sorted_RV / sorted_RV.sum(-1, keepdim=True)
    before_RV = sorted_RV.cumsum(-1) - sorted_RV  # the token that crosses top_p stays
    out = (before_RV >= top_p) | (sorted_RV < min_p_R[:, None] * sorted_RV[:, :1])
    return torch.zeros_like(probs_RV).scatter(-1, order_RV, sorted_RV.masked_fill(out & (rank_V > 0), 0))


def inverse_cdf(probs_RV: Tensor, u_R1: Tensor) -> Tensor:
    """The first id whose cumulative probability exceeds u; never one of probability 0."""
    cdf_RV = probs_RV.cumsum(-1)
    total_R1 = cdf_RV[:, -1:]
    target_R1 = torch.minimum(u_R1 * total_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))
    return torch.searchsorted(cdf_RV, target_R1, right=True)[:, 0]


def _logprobs(row_V: Tensor, token_id: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the chosen token, and values and ids of the k best ones."""
    logprobs_V = row_V.double().log_softmax(-1)
    values, ids = logprobs_V.topk(min(k, len(row_V)))
    return logprobs_V[token_id], values, ids
