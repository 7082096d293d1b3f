"""DSpark's heads and its verification: a bias of low rank, a dot product per draft, the accepted length.

Tiling
    markov       [BLOCK_M, BLOCK_V] logits per program, the rank in steps of BLOCK_K; the programs of a strip
                 of the vocabulary follow one another, so that its weights come from memory once.
    confidence   one row per program.
    accept       `_stats` cuts each verified row of p and q into blocks and keeps of each the largest logit,
                 where it is, and the sum of exponentials.  From these and two logits per draft every later
                 program judges its request's drafts.  `_rest` weighs max(p - q, 0) in the blocks of the
                 one row where a draft fell; `_pick` finds the block that u falls in, then the token.

Bytes
    markov: (2 rank + 8 B) V with bfloat16 weights and float32 logits: 67 MB for one row of 129,280, 199 MB
    for 128.  accept: 4 V per verified row of p and q, once, and of one row of each request once more; no
    probabilities are written.

Shapes
    As in layers/dspark.py.

Errors
    ValueError naming the argument whose shape or dtype is wrong.

Numerics
    Products and exponentials in float32, cumulative sums in float64.  A draft is judged by the exponential of
    a difference of logits, so that equal p and q give exactly 1; the result differs from the float64
    reference's only where u lies within about 1e-6 of a boundary.

Source
    kernels.md 1.9, dspark.md 3.3 and 8 (K6, K9).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dskit import ops
from dskit.kernels.common import (
    GREEDY_BELOW,
    cdiv,
    dot,
    first_beyond,
    ld,
    pow2,
    refuse,
    require,
    rows_of,
    softmax_scale,
    too_wide,
    tuned,
    up_to,
)


def _markov_tile(rows: int, vocab: int, rank: int, warps: int, stages: int) -> dict[str, int]:
    return {"BLOCK_M": rows, "BLOCK_V": vocab, "BLOCK_K": rank, "num_warps": warps, "num_stages": stages}


MARKOV = {16: _markov_tile(16, 128, 64, 4, 4), 32: _markov_tile(32, 128, 64, 4, 4),
          64: _markov_tile(64, 128, 64, 4, 3), 1 << 62: _markov_tile(128, 128, 64, 8, 3)}
CONFIDENCE = {"BLOCK": 2048, "num_warps": 4}
ACCEPT = {"BLOCK": 4096, "num_warps": 4}
CANDIDATES = {
    "dspark.markov": (*MARKOV.values(), _markov_tile(16, 64, 128, 4, 3), _markov_tile(16, 128, 128, 4, 2),
                      _markov_tile(16, 256, 64, 4, 3), _markov_tile(64, 256, 64, 8, 3),
                      _markov_tile(128, 256, 64, 8, 3)),
    "dspark.confidence": tuple({"BLOCK": block, "num_warps": warps} for block, warps in
                               ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (8192, 8), (8192, 16))),
    "dspark.accept": tuple({"BLOCK": block, "num_warps": warps} for block, warps in
                           ((1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16)))}


# ---- markov ------------------------------------------------------------------------------------------------

@triton.jit
def _markov_fwd_kernel(base_ptr, m_ptr, head_ptr, out_ptr, rows, vocab, rank, stride_base, stride_m,
                       BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr):
    b = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    b_rows, v_rows = b.to(tl.int64)[:, None], v.to(tl.int64)[:, None]
    inside = (b < rows)[:, None] & (v < vocab)[None, :]
    total = ld(base_ptr + b_rows * stride_base + v[None, :], inside)
    for start in range(0, rank, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        m = tl.load(m_ptr + b_rows * stride_m + k[None, :], (b < rows)[:, None] & (k < rank)[None, :], 0.0)
        head = tl.load(head_ptr + v_rows * rank + k[None, :], (v < vocab)[:, None] & (k < rank)[None, :], 0.0)
        total = dot(m, head.T, total)
    tl.store(out_ptr + b_rows * vocab + v[None, :], total, inside)


def _markov(base: Tensor, m: Tensor, head: Tensor) -> Tensor:
    rows, vocab, rank = *base.shape, m.shape[1]
    out = torch.empty(rows, vocab, device=base.device)
    if rows:
        tile = tuned("dspark.markov", (rows, vocab, rank), up_to(MARKOV, rows))
        base, m = rows_of(base), rows_of(m)
        _markov_fwd_kernel[(cdiv(rows, tile["BLOCK_M"]), cdiv(vocab, tile["BLOCK_V"]))](
            base, m, head.contiguous(), out, rows, vocab, rank, base.stride(0), m.stride(0), **tile)
    return out


class _Markov(torch.autograd.Function):
    """The gradients are two plain products of float32 matrices, which torch leaves to cuBLAS."""

    @staticmethod
    def forward(ctx, base, m, head):
        ctx.save_for_backward(m, head)
        return _markov(base, m, head)

    @staticmethod
    def backward(ctx, dout):
        m, head = ctx.saved_tensors
        return dout, (dout @ head.float()).to(m.dtype), (dout.T @ m.float()).to(head.dtype)


@ops.implement("dspark.markov", "triton", grad=True,
               when=lambda base_BV, m_BR, head_VR: too_wide(base_BV, m_BR, head_VR)
               or refuse(base_BV, m_BR, head_VR))
def markov(base_BV: Tensor, m_BR: Tensor, head_VR: Tensor) -> Tensor:
    """Draft logits of one position: the block's own plus the bias from the previous token's embedding m."""
    (rows, rank), vocab = m_BR.shape, head_VR.shape[0]
    require(base_BV.shape == (rows, vocab) and base_BV.dtype == torch.float32, "base_BV",
            "must be [B, V] float32")
    require(head_VR.shape[1] == rank, "head_VR", f"has rank {head_VR.shape[1]}, m_BR {rank}")
    require(head_VR.dtype == m_BR.dtype, "head_VR", f"is {head_VR.dtype}, m_BR {m_BR.dtype}")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (base_BV, m_BR, head_VR)):
        return _Markov.apply(base_BV, m_BR, head_VR)
    return _markov(base_BV, m_BR, head_VR)


# ---- confidence --------------------------------------------------------------------------------------------

@triton.jit
def _confidence_fwd_kernel(x_ptr, m_ptr, proj_ptr, out_ptr, width, rank, stride_x, stride_m,
                           BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += ld(x_ptr + row * stride_x + i, i < width) * ld(proj_ptr + i, i < width)
    for start in range(0, rank, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += ld(m_ptr + row * stride_m + i, i < rank) * ld(proj_ptr + width + i, i < rank)
    tl.store(out_ptr + row, tl.sum(total))


def _confidence(x: Tensor, m: Tensor, proj: Tensor) -> Tensor:
    out = torch.empty(x.shape[:-1], device=x.device)
    if out.numel():
        rows, more = rows_of(x), rows_of(m)
        config = tuned("dspark.confidence", (len(rows), x.shape[-1], m.shape[-1]), CONFIDENCE)
        _confidence_fwd_kernel[(out.numel(),)](rows, more, proj.contiguous(), out, x.shape[-1], m.shape[-1],
                                               rows.stride(0), more.stride(0), **config)
    return out


class _Confidence(torch.autograd.Function):
    """The gradients are an outer product and a sum over rows, which torch does as they stand."""

    @staticmethod
    def forward(ctx, x, m, proj):
        ctx.save_for_backward(x, m, proj)
        return _confidence(x, m, proj)

    @staticmethod
    def backward(ctx, dout):
        x, m, proj = ctx.saved_tensors
        both = torch.cat((x.float(), m.float()), dim=-1).flatten(0, 1)
        dboth = dout[..., None] * proj[0].float()
        dx, dm = dboth.split((x.shape[-1], m.shape[-1]), dim=-1)
        return dx.to(x.dtype), dm.to(m.dtype), (dout.flatten()[None] @ both).to(proj.dtype)


@ops.implement("dspark.confidence", "triton", grad=True,
               when=lambda x_BMD, m_BMR, proj_1F: too_wide(x_BMD, m_BMR, proj_1F)
               or refuse(x_BMD, m_BMR, proj_1F))
def confidence(x_BMD: Tensor, m_BMR: Tensor, proj_1F: Tensor) -> Tensor:
    """One logit per drafted token, [B, M] float32."""
    require(m_BMR.shape[:-1] == x_BMD.shape[:-1], "m_BMR", f"must have {tuple(x_BMD.shape[:-1])} rows")
    width = x_BMD.shape[-1] + m_BMR.shape[-1]
    require(proj_1F.shape == (1, width), "proj_1F", f"must be [1, {width}]")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x_BMD, m_BMR, proj_1F)):
        return _Confidence.apply(x_BMD, m_BMR, proj_1F)
    return _confidence(x_BMD, m_BMR, proj_1F)


# ---- accept ------------------------------------------------------------------------------------------------

@triton.jit
def _accept_stats_kernel(target_ptr, draft_ptr, first_ptr, length_ptr, temperature_ptr, peak_ptr, mass_ptr,
                         best_ptr, stride_target, stride_draft, stride_step, vocab, blocks,
                         DRAFTS: tl.constexpr, BLOCK: tl.constexpr):
    request, line = tl.program_id(0).to(tl.int64), tl.program_id(1)  # lines 0 .. DRAFTS: p, the others: q
    block = tl.program_id(2)
    length = tl.load(length_ptr + request)
    if line <= DRAFTS:
        row_ptr = target_ptr + (tl.load(first_ptr + request) + line) * stride_target
        used = line <= length
    else:
        row_ptr = draft_ptr + request * stride_draft + (line - DRAFTS - 1) * stride_step
        used = line - DRAFTS - 1 < length
    if used:
        i = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + i, i < vocab, float("-inf"))
        peak, best = tl.max(x, axis=0, return_indices=True)
        base = tl.where(peak > float("-inf"), peak, 0.0)
        scale = softmax_scale(tl.load(temperature_ptr + request))
        at = (request * (2 * DRAFTS + 1) + line) * blocks + block
        tl.store(peak_ptr + at, peak)
        tl.store(mass_ptr + at, tl.sum(tl.exp2((x - base) * scale)))
        tl.store(best_ptr + at, block * BLOCK + best)


@triton.jit
def _join(peak, mass, scale):
    """Of rows [LINES, BLOCKS]: (largest logit, its probability)."""
    top = tl.max(peak, axis=1)
    top = tl.where(top > float("-inf"), top, 0.0)
    total = tl.sum(mass * tl.exp2((peak - top[:, None]) * scale), axis=1)
    return top, 1.0 / tl.where(total > 0, total, 1.0)


@triton.jit
def _judge(target_ptr, draft_ptr, token_ptr, first, length, temperature, u_ptr, peak_ptr, mass_ptr, best_ptr,
           stride_target, stride_draft, stride_step, request, blocks, DRAFTS: tl.constexpr,
           LINES: tl.constexpr, BLOCKS: tl.constexpr):
    """(drafts that hold, best id of the row after them; of p and q there: largest logit, its probability)."""
    j, n = tl.arange(0, LINES), tl.arange(0, BLOCKS)
    scale = softmax_scale(temperature)
    at = (request * (2 * DRAFTS + 1) + j)[:, None] * blocks + n[None, :]
    inside = (j <= length)[:, None] & (n < blocks)[None, :]
    peak = tl.load(peak_ptr + at, inside, float("-inf"))
    p_top, p_share = _join(peak, tl.load(mass_ptr + at, inside, 0.0), scale)
    block = tl.min(tl.where(peak == p_top[:, None], n[None, :], BLOCKS), axis=1)  # the first of equal ones
    best = tl.sum(tl.where(n[None, :] == block[:, None], tl.load(best_ptr + at, inside, 0), 0), axis=1)
    at += (DRAFTS + 1) * blocks
    inside = (j < length)[:, None] & (n < blocks)[None, :]
    q_top, q_share = _join(tl.load(peak_ptr + at, inside, float("-inf")), tl.load(mass_ptr + at, inside, 0.0),
                          scale)

    drafted = j < length
    token = tl.load(token_ptr + request * DRAFTS + j, drafted, 0)
    p = tl.load(target_ptr + (first + j) * stride_target + token, drafted, 0.0)
    q = tl.load(draft_ptr + request * stride_draft + j * stride_step + token, drafted, 0.0)
    ratio = tl.exp2(((p - p_top) - (q - q_top)) * scale).to(tl.float64)
    ratio *= p_share.to(tl.float64) / q_share.to(tl.float64)  # float64 divides exactly: 1 where p = q
    u = tl.load(u_ptr + request * (DRAFTS + 1) + j, drafted, 0.0)
    holds = tl.where(temperature < GREEDY_BELOW, token == best, (q > float("-inf")) & (u < ratio))
    accepted = tl.min(tl.where(holds & drafted, LINES, j))
    here = j == accepted
    return (accepted, tl.sum(tl.where(here, best, 0)),
            tl.sum(tl.where(here, p_top, 0.0)), tl.sum(tl.where(here, p_share, 0.0)),
            tl.sum(tl.where(here, q_top, 0.0)), tl.sum(tl.where(here, q_share, 0.0)))


@triton.jit
def _left(p_ptr, q_ptr, i, vocab, fell, p_top, p_share, q_top, q_share, scale):
    """max(p - q, 0) at ids i, p itself unless a draft fell."""
    p = tl.load(p_ptr + i, i < vocab, float("-inf"))
    q = tl.load(q_ptr + i, i < tl.where(fell, vocab, 0), float("-inf"))
    return tl.maximum(tl.exp2((p - p_top) * scale) * p_share - tl.exp2((q - q_top) * scale) * q_share, 0.0)


@triton.jit
def _accept_rest_kernel(target_ptr, draft_ptr, token_ptr, first_ptr, length_ptr, temperature_ptr, u_ptr,
                        peak_ptr, mass_ptr, best_ptr, rest_ptr, stride_target, stride_draft, stride_step,
                        vocab, blocks, DRAFTS: tl.constexpr, LINES: tl.constexpr, BLOCKS: tl.constexpr,
                        BLOCK: tl.constexpr):
    request, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, length = tl.load(first_ptr + request), tl.load(length_ptr + request)
    temperature = tl.load(temperature_ptr + request)
    accepted, _, p_top, p_share, q_top, q_share = _judge(
        target_ptr, draft_ptr, token_ptr, first, length, temperature, u_ptr, peak_ptr, mass_ptr, best_ptr,
        stride_target, stride_draft, stride_step, request, blocks, DRAFTS, LINES, BLOCKS)
    fell = accepted < length
    if fell & (temperature >= GREEDY_BELOW):
        i = block * BLOCK + tl.arange(0, BLOCK)
        rest = _left(target_ptr + (first + accepted) * stride_target,
                     draft_ptr + request * stride_draft + accepted * stride_step,
                     i, vocab, fell, p_top, p_share, q_top, q_share, softmax_scale(temperature))
        tl.store(rest_ptr + request * blocks + block, tl.sum(rest))


@triton.jit
def _accept_pick_kernel(target_ptr, draft_ptr, token_ptr, first_ptr, length_ptr, temperature_ptr, u_ptr,
                        peak_ptr, mass_ptr, best_ptr, rest_ptr, accepted_ptr, next_ptr, stride_target,
                        stride_draft, stride_step, vocab, blocks, DRAFTS: tl.constexpr, LINES: tl.constexpr,
                        BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    first, length = tl.load(first_ptr + request), tl.load(length_ptr + request)
    temperature = tl.load(temperature_ptr + request)
    accepted, best, p_top, p_share, q_top, q_share = _judge(
        target_ptr, draft_ptr, token_ptr, first, length, temperature, u_ptr, peak_ptr, mass_ptr, best_ptr,
        stride_target, stride_draft, stride_step, request, blocks, DRAFTS, LINES, BLOCKS)
    if temperature >= GREEDY_BELOW:
        scale = softmax_scale(temperature)
        n = tl.arange(0, BLOCKS)
        rest = tl.load(rest_ptr + request * blocks + n, n < tl.where(accepted < length, blocks, 0), 0.0)
        fell = tl.sum(rest) > 0  # a rest that rounding left empty: p
        at = (request * (2 * DRAFTS + 1) + accepted) * blocks + n
        whole = tl.exp2((tl.load(peak_ptr + at, n < blocks, float("-inf")) - p_top) * scale) * p_share
        whole *= tl.load(mass_ptr + at, n < blocks, 0.0)
        weight = tl.where(fell, rest, whole).to(tl.float64)
        target = tl.load(u_ptr + request * (DRAFTS + 1) + DRAFTS) * tl.sum(weight)
        block = first_beyond(weight, target)
        target -= tl.sum(tl.where(n < block, weight, 0.0))
        left = _left(target_ptr + (first + accepted) * stride_target,
                     draft_ptr + request * stride_draft + accepted * stride_step,
                     block * BLOCK + tl.arange(0, BLOCK), vocab, fell, p_top, p_share, q_top, q_share, scale)
        best = block * BLOCK + first_beyond(left.to(tl.float64), target)
    tl.store(accepted_ptr + request, accepted.to(tl.int64))
    tl.store(next_ptr + request, best.to(tl.int64))


@ops.implement("dspark.accept", "triton", when=lambda target_TV, draft_BMV, *rest:
               too_wide(target_TV, draft_BMV) or refuse(target_TV, draft_BMV, *rest))
def accept(target_TV: Tensor, draft_BMV: Tensor, token_BM: Tensor, first_B: Tensor, length_B: Tensor,
           temperature_B: Tensor, u_BU: Tensor) -> tuple[Tensor, Tensor]:
    """(accepted_B, next_B), int64: how many drafts of each request hold, and the token after them."""
    requests, drafts, vocab = draft_BMV.shape
    require(target_TV.dim() == 2 and target_TV.shape[1] == vocab, "target_TV", f"must be [T, {vocab}]")
    for name, x in {"target_TV": target_TV, "draft_BMV": draft_BMV}.items():
        require(x.dtype == torch.float32, name, f"must be float32, not {x.dtype}")
    wanted = {"token_BM": (token_BM, (drafts,), torch.int64), "first_B": (first_B, (), torch.int64),
              "length_B": (length_B, (), torch.int64), "temperature_B": (temperature_B, (), torch.float64),
              "u_BU": (u_BU, (drafts + 1,), torch.float64)}
    for name, (x, shape, dtype) in wanted.items():
        require(x.shape == (requests, *shape) and x.dtype == dtype, name,
                f"must be {[requests, *shape]} {dtype}")
    accepted, following = torch.empty(2, requests, dtype=torch.int64, device=target_TV.device)
    if not requests:
        return accepted, following
    target, draft = rows_of(target_TV), draft_BMV if draft_BMV.stride(2) == 1 else draft_BMV.contiguous()
    token, first, length, temperature, u = (x.contiguous() for x, *_ in wanted.values())
    config = tuned("dspark.accept", (requests, drafts, vocab), ACCEPT)
    blocks = cdiv(vocab, config["BLOCK"])
    peak, mass = torch.empty(2, requests, 2 * drafts + 1, blocks, device=target.device)
    best = torch.empty(peak.shape, dtype=torch.int32, device=target.device)
    rest = torch.empty(requests, blocks, device=target.device)
    strides = target.stride(0), draft.stride(0), draft.stride(1)
    _accept_stats_kernel[(requests, 2 * drafts + 1, blocks)](
        target, draft, first, length, temperature, peak, mass, best, *strides, vocab, blocks, DRAFTS=drafts,
        **config)
    sizes = {"DRAFTS": drafts, "LINES": pow2(drafts + 1), "BLOCKS": pow2(blocks)}
    known = target, draft, token, first, length, temperature, u, peak, mass, best, rest
    _accept_rest_kernel[(requests, blocks)](*known, *strides, vocab, blocks, **sizes, **config)
    _accept_pick_kernel[(requests,)](*known, accepted, following, *strides, vocab, blocks, **sizes, **config)
    return accepted, following
