"""DSpark: a small draft model that proposes a block of tokens, which the full model then checks in one step.

Idea: tapped streams of a few late layers are projected to one vector per committed token and cached
as keys by each draft stage. A round runs the block [newest token, noise, noise, ...] once through
the stages, window-only and not causal inside the block; a low-rank Markov head then walks left to
right and adds what the token just drafted says about the next. A confidence head estimates for each
draft whether it will be accepted. Verification keeps drafts as long as chance allows and draws the token
after them so that the text follows the full model's distribution p exactly, whatever the draft's q.

    main = rms(concat(taps) Wmain),  tap = mean of the streams entering the layer (V4: leaving it)
    logit_i = head(rms(x_i)) + markov_embed[token_i] markov_head^T
    conf_i = [x_i, markov_embed[token_i]] proj^T
    token_i holds while u_i q(token_i) < p(token_i);  next ~ max(p - q, 0) where one fell, p after the last

Judged as a block (`accept_block`), a draft that falls short alone may be carried by those before it:

    h_i = min(1, h_{i-1} p(token_i) / q(token_i));  the longest i holds with chance rho_i / (rho_i + 1 - h_i),
    rho_i = sum max(h_i p - q, 0), of the whole block h_i;  next ~ max(h_i p - q, 0)

Shapes: taps [T, D] each -> main_TD; block rows x [B, M, D], base logits [B, M, V] -> tokens [B, M],
logits, conf [B, M]; verified rows [T, V], packed; uniforms [B, U], one per draft and one to draw with.
State: per stage a window ring of keys made from main; the block's own keys are never kept.
Errors: none of its own.
Numerics: taps are stored in the dtype of values; Markov and confidence products are float32; verification in
float64.
Kernel: kernels/dspark.py (dspark.markov, dspark.confidence, dspark.accept)
Source: model.md 3.13; config fields dspark_*; drafting, acceptance and their use in the engine: dspark.md;
block verification: Sun et al., arXiv 2403.10444.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dskit import ops
from dskit.config import ModelConfig
from dskit.layers import mhc
from dskit.layers.linear import Linear, Numerics
from dskit.layers.norm import RMSNorm, up

GREEDY_BELOW = 1e-5  # temperature, as in sampling


def tap(X_TND: Tensor) -> Tensor:
    """What the draft sees of a layer: the mean over streams, [T, D] in the dtype of values."""
    return up(X_TND).mean(dim=1).to(X_TND.dtype)


@ops.op("dspark.markov")
def markov(base_BV: Tensor, m_BR: Tensor, head_VR: Tensor) -> Tensor:
    """Draft logits of one position: the block's own plus the bias from the previous token's embedding m."""
    return base_BV + up(m_BR) @ up(head_VR).T


@ops.op("dspark.confidence")
def confidence(x_BMD: Tensor, m_BMR: Tensor, proj_1F: Tensor) -> Tensor:
    """One logit per drafted token, [B, M], from the un-normed collapse and the Markov embedding before it."""
    return (torch.cat((up(x_BMD), up(m_BMR)), dim=-1) @ up(proj_1F).T).squeeze(-1)


@ops.op("dspark.accept", grad=False)
def accept(target_TV: Tensor, draft_BMV: Tensor, token_BM: Tensor, first_B: Tensor, length_B: Tensor,
           temperature_B: Tensor, u_BU: Tensor) -> tuple[Tensor, Tensor]:
    """How many drafts of each request hold, and the token that follows them: (accepted_B, next_B), int64.

    Row first + j of the target, j = 0 .. length, is p at draft j's place; drafts from `length` on are not
    verified.  Logits are float32 and minus infinity where a filter took a token away; draft_BMV must be those
    that the draft was drawn from (where it took the largest: minus infinity but for that one).  temperature
    and u are float64, u in [0, 1).  A temperature below 1e-5 is greedy: a draft holds while it is the
    target's largest logit, of equal ones the first, which is next otherwise.
    """
    step_U, p_BUV, q_BMV, p_BM, q_BM = _compared(target_TV, draft_BMV, token_BM, first_B, length_B,
                                                 temperature_B)
    holds_BM = (q_BM > 0) & (u_BU[:, :-1] * q_BM < p_BM) & (step_U[:-1] < length_B[:, None])
    accepted_B = holds_BM.long().cumprod(-1).sum(-1)
    return accepted_B, _following(p_BUV, q_BMV, accepted_B, accepted_B == length_B, u_BU)


def accept_block(target_TV: Tensor, draft_BMV: Tensor, token_BM: Tensor, first_B: Tensor, length_B: Tensor,
                 temperature_B: Tensor, u_BU: Tensor) -> tuple[Tensor, Tensor]:
    """`accept`, but the drafts are judged as a block: as many hold or more, and the law is the same."""
    step_U, p_BUV, q_BMV, p_BM, q_BM = _compared(target_TV, draft_BMV, token_BM, first_B, length_B,
                                                 temperature_B)
    ratio_BM = torch.where(q_BM > 0, p_BM / q_BM, 0)
    h_BU = torch.ones_like(u_BU)
    for i in range(ratio_BM.shape[1]):
        h_BU[:, i + 1] = (h_BU[:, i] * ratio_BM[:, i]).clamp_max(1)
    rho_BM = (h_BU[:, :-1, None] * p_BUV[:, :-1] - q_BMV).clamp_min(0).sum(-1)
    short_BM = 1 - h_BU[:, :-1]
    chance_BU = torch.nn.functional.pad(torch.where(short_BM > 0, rho_BM / (rho_BM + short_BM), 1), (0, 1))
    chance_BU = torch.where(step_U == length_B[:, None], h_BU, chance_BU)
    coin_BU = torch.nn.functional.pad(u_BU[:, :-1], (1, 0))  # no draft at all holds for sure
    holds_BU = (coin_BU < chance_BU) & (step_U <= length_B[:, None])
    accepted_B = (holds_BU * step_U).amax(-1)
    end_B = accepted_B == length_B
    carried_B = h_BU.gather(1, accepted_B[:, None])[:, 0].masked_fill(end_B, 1)
    return accepted_B, _following(carried_B[:, None, None] * p_BUV, q_BMV, accepted_B, end_B, u_BU)


def _compared(target_TV: Tensor, draft_BMV: Tensor, token_BM: Tensor, first_B: Tensor, length_B: Tensor,
              temperature_B: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(steps [U], p [B, U, V], q [B, M, V], and both of the drafted tokens [B, M])."""
    step_U = torch.arange(token_BM.shape[1] + 1, device=token_BM.device)
    row_BU = first_B[:, None] + torch.minimum(step_U, length_B[:, None])
    p_BUV = _chances(target_TV[row_BU], temperature_B)
    q_BMV = _chances(draft_BMV, temperature_B, token_BM)
    return step_U, p_BUV, q_BMV, *(x.gather(-1, token_BM[..., None]).squeeze(-1)
                                   for x in (p_BUV[:, :-1], q_BMV))


def _following(p_BUV: Tensor, q_BMV: Tensor, accepted_B: Tensor, end_B: Tensor, u_BU: Tensor) -> Tensor:
    """The token behind the accepted drafts: what q has left of p where one fell, p after the last."""
    request_B = torch.arange(len(accepted_B), device=accepted_B.device)
    p_BV = p_BUV[request_B, accepted_B]
    q_BV = q_BMV[request_B, accepted_B.clamp_max(q_BMV.shape[1] - 1)].masked_fill(end_B[:, None], 0)
    rest_BV = (p_BV - q_BV).clamp_min(0)
    rest_BV = torch.where(rest_BV.sum(-1, keepdim=True) > 0, rest_BV, p_BV)  # empty by rounding alone
    return _inverse_cdf(rest_BV, u_BU[:, -1:])


def _chances(logits_BMV: Tensor, temperature_B: Tensor, token_BM: Tensor | None = None) -> Tensor:
    """Probabilities, float64; of a greedy request all on the token given, else on the largest logit."""
    greedy_B = temperature_B < GREEDY_BELOW
    probs_BMV = (logits_BMV.double() / temperature_B.masked_fill(greedy_B, 1)[:, None, None]).softmax(-1)
    sure_BM = logits_BMV.argmax(-1) if token_BM is None else token_BM
    sure_BMV = torch.zeros_like(probs_BMV).scatter(-1, sure_BM[..., None], 1)
    return torch.where(greedy_B[:, None, None], sure_BMV, probs_BMV)


def _inverse_cdf(weight_BV: Tensor, u_B1: Tensor) -> Tensor:
    """The first id whose cumulative weight exceeds u times the total; never one of weight 0."""
    cdf_BV = weight_BV.cumsum(-1)
    total_B1 = cdf_BV[:, -1:]
    below_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))
    return torch.searchsorted(cdf_BV, torch.minimum(u_B1 * total_B1, below_B1), right=True).squeeze(-1)


class MarkovHead(nn.Module):
    """Embedding and output rows of the bigram bias, [V, rank] each."""

    def __init__(self, config: ModelConfig, numerics: Numerics):
        super().__init__()
        self.embed = Linear(config.dspark_markov_rank, config.vocab_size, numerics, fmt="bf16")
        self.head = Linear(config.dspark_markov_rank, config.vocab_size, numerics, fmt="bf16")


class DraftHeads(nn.Module):
    """The draft's parts that are not blocks; they live on its first and last stage, as in the checkpoint."""

    @staticmethod
    def attach(stages: nn.ModuleList, config: ModelConfig, numerics: Numerics) -> None:
        """Put main_proj and main_norm on the first stage, norm, Markov and confidence heads on the last."""
        D, first, last = config.hidden_size, stages[0], stages[-1]
        first.main_proj = Linear(D * len(config.dspark_target_layer_ids), D, numerics,
                                 block=config.weight_block_size)
        first.main_norm = RMSNorm(D, config.rms_norm_eps, numerics.dtype, numerics.steady)
        last.norm = RMSNorm(D, config.rms_norm_eps, numerics.dtype, numerics.steady)
        last.markov_head = MarkovHead(config, numerics)
        last.confidence_head = nn.Module()
        last.confidence_head.proj = Linear(D + config.dspark_markov_rank, 1, numerics, fmt="bf16")
        if not config.is_v41:
            mhc.add_collapse(last, config)


def main_projection(taps: list[Tensor], stages: nn.ModuleList, numerics: Numerics) -> Tensor:
    """Taps of the target layers -> main_TD, from which every stage makes its keys."""
    first = stages[0]
    return first.main_norm(first.main_proj(numerics.activation(torch.cat(taps, dim=-1))))


def likeliest(logits_BV: Tensor) -> Tensor:
    """The token of each row with the largest logit."""
    return logits_BV.argmax(-1)


def propose(x_BMD: Tensor, base_BMV: Tensor, token_B: Tensor, last: nn.Module,
            pick: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the block left to right: (tokens [B, M], logits [B, M, V], confidence logits [B, M]).

    token_B is the newest committed token; `pick` turns logits [B, V] into tokens [B] (`likeliest`, or a
    sampler).
    """
    tokens, logits, embeddings = [], [], []
    for i in range(x_BMD.shape[1]):
        embeddings.append(last.markov_head.embed.dense()[token_B])
        logits.append(markov(base_BMV[:, i], embeddings[-1], last.markov_head.head.dense()))
        token_B = pick(logits[-1])
        tokens.append(token_B)
    conf = confidence(x_BMD, torch.stack(embeddings, dim=1), last.confidence_head.proj.dense())
    return torch.stack(tokens, dim=1), torch.stack(logits, dim=1), conf
