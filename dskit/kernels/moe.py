"""Mixture of experts but for its products (experts.py): router, plan, permutation, activation, combination.

Idea
    router    logits[T, E] = x W^T, cut into tiles of tokens x experts x a part of K, so that one token keeps
              the memory as busy as thousands do; each part is written, and a second kernel adds the parts in
              order and chooses: J rounds of "largest, then lowest index" over a row in a warp's registers
    plan      one program per chunk of slots: histograms of all slots and of those before it say where its
              experts' rows begin and how many are taken, comparing the chunk's slots with each other gives
              the rank; nothing is sorted.  Many slots are counted by chunks first, so that none reads all;
              a few are compared with all others, and nothing is counted
    permute   one program per token and piece of its row: read once, written to J places
    combine   one program per token and piece of its row: J reads in flight, added in slot order, written once
    swiglu    tiles of whole quantisation groups, [groups, 32], so that clamp, SiLU, routing weight, both
              roundings and the scale are one pass over gate and linear
    How tiles are cut by rows stands in the tables below.

Shapes
    As in layers/moe.py; the channels of a row side by side, rows at any stride.

Units
    Bytes per token (per row, swiglu) at D = 5120, E = 384, J = 6, I = 2304, bfloat16: router 2 D, and 2 D E
    once; plan 40 J; permute 2 D (1 + J); combine 2 D (J + 2); swiglu 6 I.

Errors
    ValueError names an argument whose shape does not fit.

Numerics
    Products of bfloat16 are exact and summed in float32; the order of the sum depends on how many rows there
    are, unless `row_tile` asks for the same bits in any batch.  A NaN stays one in swiglu, and is never
    chosen before a number by the router.

Source
    kernels.md 1.8; model.md 3.11.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

import dskit.kernels.experts  # noqa: F401 - registers moe.experts, which builds on this file
from dskit import ops
from dskit.kernels.common import (
    cdiv,
    dot,
    layout,
    ld,
    narrow,
    pow2,
    refuse,
    require,
    restored,
    rows_of,
    tuned,
    up_to,
)


def _router(tokens: int, experts: int, more: int, channels: int, parts: int, warps: int, stages: int,
            tma: int = 0) -> dict[str, int]:
    """Tokens, experts, more experts of a tile; channels of a step; parts of K; whether an engine copies."""
    return {"tokens": tokens, "experts": experts, "more": more, "channels": channels, "parts": parts,
            "num_warps": warps, "num_stages": stages, "tma": tma}


ROUTER = {16: _router(16, 64, 0, 128, 20, 4, 3), 64: _router(32, 64, 0, 128, 20, 4, 3),
          256: _router(64, 64, 0, 128, 10, 4, 4, 1), 1024: _router(64, 128, 0, 64, 5, 4, 4),
          1 << 62: _router(64, 128, 64, 64, 1, 4, 6, 1)}
ROUTER_WIDE = _router(16, 64, 0, 32, 8, 4, 3)  # float32 operands: no tensor core multiplies them exactly
CHUNKS = {4096: 64, 16384: 128, 1 << 31: 256}  # most slots -> those of a program of plan
FEW = 64  # slots that are compared with each other; six were timed on an H200: 1.7 us, counted 5.4
AT_ONCE = 2048  # slots that each program counts by itself
MOVE = {"piece": 1024, "num_warps": 4}  # channels of a row that one program moves
ACTIVATE = {"channels": 2048, "num_warps": 4}  # channels that one program of swiglu computes, in groups
PIECES = tuple({"piece": piece, "num_warps": warps} for piece, warps in
               ((512, 1), (512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8), (8192, 8)))
GROUPS = tuple({"channels": channels, "num_warps": warps} for channels, warps in
               ((512, 1), (512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8)))
CANDIDATES = {
    "moe.gate": (*ROUTER.values(), _router(16, 128, 0, 128, 20, 4, 3), _router(16, 64, 0, 256, 20, 4, 3),
                 _router(64, 64, 0, 128, 10, 4, 4), _router(64, 128, 0, 128, 10, 4, 3),
                 _router(128, 256, 128, 64, 4, 8, 3), _router(256, 128, 64, 64, 4, 8, 3, 1),
                 *(_router(*each, tma=1) for each in (
                     (64, 256, 128, 64, 2, 8, 4), (64, 256, 128, 64, 2, 4, 4), (128, 128, 64, 64, 2, 4, 5),
                     (128, 128, 64, 64, 2, 8, 4), (128, 128, 64, 64, 3, 4, 5), (128, 128, 64, 32, 2, 4, 8),
                     (128, 128, 0, 64, 1, 4, 6)))),
    "moe.permute": PIECES, "moe.combine": PIECES, "moe.swiglu": GROUPS, "moe.swiglu_quantize": GROUPS}
ELEMENT = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


# ---- router: logits ----------------------------------------------------------------------------------------

@triton.jit
def _read(row_ptr, desc, row, step, k, D: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile of rows: by the threads, or by the engine, which puts zeros where there is nothing."""
    if desc is not None:
        return desc.load([row, step * BLOCK_K])
    elif D % BLOCK_K == 0:
        return tl.load(row_ptr + k)
    else:
        return tl.load(row_ptr + k, mask=k < D, other=0.0)


@triton.jit
def _times(x, w, acc):
    """acc + x w^T; operands of one dtype stay narrow."""
    if x.dtype == w.dtype:
        return dot(x, tl.trans(w), acc)
    return dot(x.to(tl.float32), tl.trans(w.to(tl.float32)), acc)


@triton.jit
def _put(part_ptr, acc, t, e, T, E):
    inside = (t[:, None] < T) & (e[None, :] < E)
    tl.store(part_ptr + t.to(tl.int64)[:, None] * E + e[None, :], acc, mask=inside)


@triton.jit
def _router_kernel(x_ptr, x_desc, w_ptr, w_desc, more_desc, part_ptr, T, E, stride_x, stride_w,
                   D: tl.constexpr, STEPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
                   MORE_E: tl.constexpr, BLOCK_K: tl.constexpr):
    """One part of K of a tile of logits, BLOCK_E + MORE_E experts wide: 192 is 128 + 64.

    Rows and experts beyond the last repeat it: they are read and multiplied, but not written.
    """
    first, at = tl.program_id(1) * (BLOCK_E + MORE_E), tl.program_id(0) * BLOCK_T
    part = tl.program_id(2)
    t = at + tl.arange(0, BLOCK_T)
    e = first + tl.arange(0, BLOCK_E)
    x_row = x_ptr + tl.minimum(t, T - 1).to(tl.int64)[:, None] * stride_x
    w_row = w_ptr + tl.minimum(e, E - 1).to(tl.int64)[:, None] * stride_w
    acc = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    if MORE_E > 0:
        e2 = first + BLOCK_E + tl.arange(0, MORE_E)
        w2_row = w_ptr + tl.minimum(e2, E - 1).to(tl.int64)[:, None] * stride_w
        acc2 = tl.zeros((BLOCK_T, MORE_E), tl.float32)
    for step in range(part * STEPS, tl.minimum((part + 1) * STEPS, tl.cdiv(D, BLOCK_K))):
        k = (step * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        x = _read(x_row, x_desc, at, step, k, D, BLOCK_K)
        acc = _times(x, _read(w_row, w_desc, first, step, k, D, BLOCK_K), acc)
        if MORE_E > 0:
            acc2 = _times(x, _read(w2_row, more_desc, first + BLOCK_E, step, k, D, BLOCK_K), acc2)
    part_ptr += part.to(tl.int64) * T * E
    _put(part_ptr, acc, t, e, T, E)
    if MORE_E > 0:
        _put(part_ptr, acc2, t, e2, T, E)


def _logit_parts(x_TD: Tensor, weight_ED: Tensor, steady: bool) -> Tensor:
    """Float32 [parts of K, T, E], whose sum over the first axis are the logits."""
    (T, D), E = x_TD.shape, weight_ED.shape[0]
    x, weight = rows_of(x_TD), rows_of(weight_ED)
    config = up_to(ROUTER, 128 if steady else T)
    if x.dtype == torch.float32 or weight.dtype == torch.float32:
        config = ROUTER_WIDE
    elif not steady:
        config = tuned("moe.gate", (T, D, E), config)
    tokens, experts, more, channels, parts, warps, stages, tma = config.values()
    more = more if experts < E else 0
    experts = max(16, min(experts, pow2(E)))
    channels = max(16, min(channels, pow2(D)))
    steps = cdiv(cdiv(D, channels), parts)
    parts = cdiv(cdiv(D, channels), steps)
    part_STE = torch.empty(parts, T, E, dtype=torch.float32, device=x.device)
    grid = (cdiv(T, tokens), cdiv(E, experts + more), parts)
    if not T:
        return part_STE
    tma = tma and refuse(x, sm=90) is None and all(rows.stride(0) % 8 == 0 and rows.data_ptr() % 16 == 0
                                                   for rows in (x, weight))
    descs = [TensorDescriptor.from_tensor(rows, [height, channels]) if tma and height else None
             for rows, height in ((x, tokens), (weight, experts), (weight, more))]
    _router_kernel[grid](x, descs[0], weight, *descs[1:], part_STE, T, E, x.stride(0), weight.stride(0), D,
                         steps, tokens, experts, more, channels, num_warps=warps, num_stages=stages)
    return part_STE


# ---- router: choice ----------------------------------------------------------------------------------------

@triton.jit
def _softplus(z):
    """log(1 + exp(z)) = max(z, 0) + log(1 + w), w = exp(-|z|): a polynomial, since a GPU's logarithm costs 20
    instructions.  Fitted to log(1 + w) / w on [0, 1], relative error 3e-7.
    """
    w = tl.exp2(tl.abs(z) * -1.4426950408889634)
    p = 0.04408948868513107 - w * 0.008539168164134026
    p = 0.17745228111743927 - w * (0.1076815202832222 - w * p)
    p = 0.33275479078292847 - w * (0.24495458602905273 - w * p)
    p = 0.9999998211860657 - w * (0.4999740421772003 - w * p)
    return tl.maximum(z, 0.0) + w * p


@triton.jit
def _score(z_ptr, inside, stride_part, PARTS: tl.constexpr, TEMPERATURE: tl.constexpr):
    """sqrt(softplus(logit)), the logit's parts added in order."""
    z = ld(z_ptr, inside)
    for part in tl.static_range(1, PARTS):
        z += ld(z_ptr + part * stride_part, inside)
    if TEMPERATURE != 1:
        z = z / TEMPERATURE
    return tl.sqrt(_softplus(z))


@triton.jit
def _ordered(x):
    """float32 -> int32 in the same order, for which a warp has a maximum in one instruction; -0 equals 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _choices(z_ptr, bias_ptr, e, E, stride_part, PARTS: tl.constexpr, TEMPERATURE: tl.constexpr):
    """Scores with bias of experts e in the order of `_ordered`, what is no expert below all numbers."""
    choice = _score(z_ptr + e, e < E, stride_part, PARTS, TEMPERATURE)
    if bias_ptr is not None:
        choice += ld(bias_ptr + e, e < E)
    # a NaN counts as the lowest number
    return tl.where(e < E, _ordered(tl.where(choice >= -3e38, choice, -3e38)), -0x80000000)


@triton.jit
def _route_fwd_kernel(z_ptr, bias_ptr, image_ptr, image_bias_ptr, fixed_ptr, topk_ptr, weight_ptr,
                      score_ptr, E, stride_part, stride_bias, factor, PARTS: tl.constexpr, J: tl.constexpr,
                      NORMALISE: tl.constexpr, TEMPERATURE: tl.constexpr, BLOCK_E: tl.constexpr,
                      PIECES: tl.constexpr, BLOCK_J: tl.constexpr):
    """One token in one warp, so that no round of the choice waits for another warp.

    Its experts lie in pieces of BLOCK_E, so that 384 are no 512; what was taken is put below all numbers.
    """
    t = tl.program_id(0).to(tl.int64)
    z_ptr += t * E
    slot = tl.arange(0, BLOCK_J)
    if fixed_ptr is None:
        e = tl.arange(0, BLOCK_E)
        if bias_ptr is not None:
            bias_ptr += t * stride_bias
            if image_ptr is not None:
                bias_ptr = tl.where(tl.load(image_ptr + t) != 0, image_bias_ptr, bias_ptr)
        choices = ()
        for i in tl.static_range(PIECES):
            choices += (_choices(z_ptr, bias_ptr, e + i * BLOCK_E, E, stride_part, PARTS, TEMPERATURE),)
        chosen = tl.zeros((BLOCK_J,), tl.int32)
        for j in tl.static_range(J):
            most = choices[0]
            for i in tl.static_range(1, PIECES):
                most = tl.maximum(most, choices[i])
            best, at, rest = tl.max(most, axis=0), tl.full((BLOCK_E,), E - 1, tl.int32), ()
            for i in tl.static_range(PIECES):
                at = tl.minimum(at, tl.where(choices[i] == best, e + i * BLOCK_E, E - 1))
            at = tl.min(at, axis=0)
            for i in tl.static_range(PIECES):
                rest += (tl.where(e + i * BLOCK_E == at, -0x80000000, choices[i]),)
            choices, chosen = rest, tl.where(slot == j, at, chosen)
    else:
        chosen = tl.load(fixed_ptr + t * J + slot, mask=slot < J, other=0).to(tl.int32)
    score = tl.where(slot < J, _score(z_ptr + chosen, slot < J, stride_part, PARTS, TEMPERATURE), 0.0)
    if score_ptr is not None:
        tl.store(score_ptr + t * J + slot, score, mask=slot < J)
    if NORMALISE:
        score = score / (tl.sum(score, axis=0) + 1e-20)
    tl.store(topk_ptr + t * J + slot, chosen.to(tl.int64), mask=slot < J)
    tl.store(weight_ptr + t * J + slot, score * factor, mask=slot < J)


@triton.jit
def _route_bwd_kernel(topk_ptr, score_ptr, push_ptr, dz_ptr, T, E, factor, J: tl.constexpr,
                      NORMALISE: tl.constexpr, TEMPERATURE: tl.constexpr, BLOCK_E: tl.constexpr,
                      BLOCK_J: tl.constexpr):
    """A token's row of logit gradients: zero but at its choices."""
    t = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK_J)
    e = tl.arange(0, BLOCK_E)
    at = tl.load(topk_ptr + t * J + j, mask=j < J, other=-1).to(tl.int32)
    g = ld(score_ptr + t * J + j, j < J)
    push = ld(push_ptr + t * J + j, j < J) * factor
    if NORMALISE:
        total = tl.sum(g) + 1e-20
        push = (push - tl.sum(push * g) / total) / total
    # d sqrt(softplus(z)) / dz = sigmoid(z) / 2g, and sigmoid(z) = 1 - exp(-g^2), a series where g is small
    s = g * g
    slope = tl.where(s < 0.01, g * (0.5 - s * (0.25 - s / 12)), (0.5 - 0.5 * tl.exp(-s)) / tl.maximum(g, 0.1))
    push *= slope / TEMPERATURE
    dz = tl.sum(tl.where(at[:, None] == e[None, :], push[:, None], 0.0), axis=0)
    tl.store(dz_ptr + t * E + e, dz, mask=e < E)


def _choose(z_STE: Tensor, bias: Tensor | None, k: int, normalise: bool, factor: float, temperature: float,
            fixed_TJ: Tensor | None, image_T: Tensor | None, image_bias_E: Tensor | None, keep: bool
            ) -> tuple[Tensor, Tensor, Tensor | None]:
    """(topk_TJ, weight_TJ, the chosen experts' scores when `keep`) of logits given in parts."""
    parts, T, E = z_STE.shape
    k = k if fixed_TJ is None else fixed_TJ.shape[1]
    require(fixed_TJ is not None or 0 < k <= E, "k", f"is {k}; there are {E} experts to choose from")
    topk = torch.empty(T, k, dtype=torch.int64, device=z_STE.device)
    weight = torch.empty(T, k, dtype=torch.float32, device=z_STE.device)
    score = torch.empty_like(weight) if keep else None
    if image_T is None or image_bias_E is None:
        image_T, image_bias_E = None, None
    stride = 0
    if bias is not None:
        require(bias.shape in ((E,), (T, E)), "bias", f"is {tuple(bias.shape)}, not {(E,)} or {(T, E)}")
        bias = rows_of(bias) if bias.dim() == 2 else bias.contiguous()
        stride = bias.stride(0) if bias.dim() == 2 else 0
    wide = min(pow2(E), max(128, pow2(E) // 4))
    if T:
        _route_fwd_kernel[(T,)](
            z_STE, bias, image_T, image_bias_E, None if fixed_TJ is None else fixed_TJ.contiguous(), topk,
            weight, score, E, z_STE.stride(0), stride, factor, parts, k, normalise and k > 1, temperature,
            wide, cdiv(E, wide), pow2(k), num_warps=1)
    return topk, weight, score


def _logit_gradient(topk: Tensor, score: Tensor, push: Tensor, E: int, normalise: bool, factor: float,
                    temperature: float) -> Tensor:
    """Float32 [T, E] from the gradient of weight_TJ."""
    T, k = topk.shape
    dz = torch.empty(T, E, dtype=torch.float32, device=push.device)
    if T:
        _route_bwd_kernel[(T,)](topk, score, push.contiguous(), dz, T, E, factor, k, normalise and k > 1,
                                temperature, pow2(E), pow2(k))
    return dz


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logit, bias, k, normalise, factor, fixed):
        topk, weight, score = _choose(rows_of(logit)[None], bias, k, normalise, factor, 1.0, fixed, None,
                                      None, keep=ctx.needs_input_grad[0])
        ctx.save_for_backward(topk, score)
        ctx.how = logit.shape[1], normalise, factor, 1.0
        ctx.mark_non_differentiable(topk)
        return topk, weight

    @staticmethod
    def backward(ctx, _, push):
        return _logit_gradient(*ctx.saved_tensors, push, *ctx.how), None, None, None, None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, k, normalise, factor, temperature, fixed, image, image_bias, steady):
        parts = _logit_parts(x, weight, steady)
        topk, share, score = _choose(parts, bias, k, normalise, factor, temperature, fixed, image, image_bias,
                                     keep=any(ctx.needs_input_grad[:2]))
        ctx.save_for_backward(x, weight, topk, score)
        ctx.how = weight.shape[0], normalise, factor, temperature
        ctx.mark_non_differentiable(topk)
        return topk, share

    @staticmethod
    def backward(ctx, _, push):
        """The two products are the library's: dense, float32, and no slower than a kernel of ours."""
        x, weight, topk, score = ctx.saved_tensors
        dz = _logit_gradient(topk, score, push, *ctx.how)
        dx = (dz @ weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
        dweight = (dz.T @ x.float()).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dweight, *[None] * 9


def _wide(*tensors: Tensor) -> str | None:
    return "float64 is the oracle's dtype" if any(t.dtype == torch.float64 for t in tensors) else None


@ops.implement("moe.route", "triton", grad=True,
               when=lambda logit, *_, **__: refuse(logit) or _wide(logit))
def route(logit_TE: Tensor, bias_TE: Tensor | None, k: int, normalise: bool, factor: float,
          fixed_TJ: Tensor | None = None, steady: bool = False) -> tuple[Tensor, Tensor]:
    """Logits -> (topk_TJ, weight_TJ); a row's bits depend on nothing beside it, steady or not."""
    return _Route.apply(logit_TE, bias_TE, k, normalise, factor, fixed_TJ)


@ops.implement("moe.gate", "triton", grad=True, when=lambda x, w, *_, **__: refuse(x, w) or _wide(x, w))
def gate(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, k: int, normalise: bool, factor: float,
         temperature: float = 1.0, fixed_TJ: Tensor | None = None, image_T: Tensor | None = None,
         image_bias_E: Tensor | None = None, row_tile: int | None = None) -> tuple[Tensor, Tensor]:
    """x_TD -> (topk_TJ, weight_TJ): the whole router in two launches."""
    require(x_TD.shape[1] == weight_ED.shape[1], "weight_ED",
            f"is {tuple(weight_ED.shape)}; x_TD has {x_TD.shape[1]} channels")
    return _Gate.apply(x_TD, weight_ED, bias_E, k, normalise, factor, temperature, fixed_TJ, image_T,
                       image_bias_E, row_tile is not None)


# ---- plan --------------------------------------------------------------------------------------------------

@triton.jit
def _experts_of(topk_ptr, slot, R, E, first):
    """Experts of slots, from `first` on; E: another one, E + 1: beyond the last slot."""
    expert = tl.load(topk_ptr + slot, mask=slot < R, other=-1).to(tl.int32) - first
    expert = tl.where((expert >= 0) & (expert < E), expert, E)
    return tl.where(slot < R, expert, E + 1)


@triton.jit
def _count_kernel(topk_ptr, count_ptr, R, E, first, BLOCK: tl.constexpr, BINS: tl.constexpr):
    chunk = tl.program_id(0)
    e = tl.arange(0, BINS)
    expert = _experts_of(topk_ptr, chunk * BLOCK + tl.arange(0, BLOCK), R, E, first)
    tl.store(count_ptr + chunk * BINS + e, tl.histogram(expert, BINS))


@triton.jit
def _plan_kernel(topk_ptr, count_ptr, expert_ptr, order_ptr, place_ptr, end_ptr, R, E, first, chunks,
                 BLOCK: tl.constexpr, BINS: tl.constexpr, ALL: tl.constexpr):
    """Rows of one chunk of slots: its experts' first rows, what earlier chunks took, and a rank within."""
    chunk = tl.program_id(0)
    e = tl.arange(0, BINS)
    if count_ptr is None:
        lane = tl.arange(0, ALL)
        every = _experts_of(topk_ptr, lane, R, E, first)
        total = tl.histogram(every, BINS)
        before = tl.histogram(tl.where(lane < chunk * BLOCK, every, E + 1), BINS)
    else:
        totals = tl.zeros((16, BINS), tl.int32)
        earlier = tl.zeros((16, BINS), tl.int32)
        for start in range(0, chunks, 16):
            row = start + tl.arange(0, 16)[:, None]
            count = tl.load(count_ptr + row * BINS + e[None, :], mask=row < chunks, other=0)
            totals += count
            earlier += tl.where(row < chunk, count, 0)
        total = tl.sum(totals, axis=0)
        before = tl.sum(earlier, axis=0)
    end = tl.cumsum(total, axis=0)
    if chunk == 0:
        tl.store(end_ptr + e, end, mask=e < E)
    slot = chunk * BLOCK + tl.arange(0, BLOCK)
    expert = _experts_of(topk_ptr, slot, R, E, first)
    row = tl.gather(end - total + before, expert, 0)
    for start in range(chunk * BLOCK, (chunk + 1) * BLOCK, 32):
        other = (start + tl.arange(0, 32))[:, None]
        same = (_experts_of(topk_ptr, other, R, E, first) == expert[None, :]) & (other < slot[None, :])
        row += tl.sum(same.to(tl.int32), axis=0)
    tl.store(place_ptr + slot, row.to(tl.int64), mask=slot < R)
    tl.store(order_ptr + row, slot.to(tl.int64), mask=slot < R)
    tl.store(expert_ptr + row, expert.to(tl.int64), mask=slot < R)


@triton.jit
def _cut(tile_ptr, expert, begin, row, end, tiles, E, TOKENS: tl.constexpr, SLOTS: tl.constexpr):
    """Tiles of TOKENS rows, as experts.py's, of slots that know their expert's first row, their own and the
    expert's last + 1: each that begins one writes it.
    """
    begins = ((row - begin) % TOKENS == 0) & (expert < E)
    tile = tl.sum((begins[:, None] & (row[:, None] < row[None, :])).to(tl.int32), axis=0)
    at = tile_ptr + 4 * tile
    tl.store(at, expert, mask=begins)
    tl.store(at + 1, row, mask=begins)
    tl.store(at + 2, tl.minimum(row + TOKENS, end), mask=begins)
    tl.store(at + 3, 0, mask=begins)
    other = tl.arange(0, SLOTS)
    tl.store(tile_ptr + 4 * other, E, mask=(other >= tl.sum(begins.to(tl.int32), axis=0)) & (other < tiles))


@triton.jit
def _plan_few_kernel(topk_ptr, expert_ptr, order_ptr, place_ptr, end_ptr, tile_ptr, tile2_ptr, R, E, first,
                     tiles, SLOTS: tl.constexpr, BINS: tl.constexpr, TOKENS: tl.constexpr,
                     TOKENS2: tl.constexpr):
    """The plan of so few slots that comparing each with all others is faster than counting, and its tiles."""
    e, slot = tl.arange(0, BINS), tl.arange(0, SLOTS)
    expert = _experts_of(topk_ptr, slot, R, E, first)
    other, others = slot[:, None], _experts_of(topk_ptr, slot, R, E, first)[:, None]
    tl.store(end_ptr + e, tl.sum((others <= e[None, :]).to(tl.int32), axis=0), mask=e < E)
    begin = tl.sum((others < expert[None, :]).to(tl.int32), axis=0)
    same = others == expert[None, :]
    row = begin + tl.sum((same & (other < slot[None, :])).to(tl.int32), axis=0)
    tl.store(place_ptr + slot, row.to(tl.int64), mask=slot < R)
    tl.store(order_ptr + row, slot.to(tl.int64), mask=slot < R)
    tl.store(expert_ptr + row, expert.to(tl.int64), mask=slot < R)
    end = begin + tl.sum(same.to(tl.int32), axis=0)
    if tile_ptr is not None:
        _cut(tile_ptr, expert, begin, row, end, tiles, E, TOKENS, SLOTS)
    if tile2_ptr is not None:
        _cut(tile2_ptr, expert, begin, row, end, tiles, E, TOKENS2, SLOTS)


@ops.implement("moe.plan", "triton", when=lambda topk, *_, **__: refuse(topk))
def plan(topk_TJ: Tensor, n_experts: int, first: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(expert_R, order_R, place_TJ, end_E), counted on the device."""
    return _planned(topk_TJ, n_experts, first)


def _planned(topk_TJ: Tensor, n_experts: int, first: int, tile: Tensor | None = None, tokens: int = 1,
             tile2: Tensor | None = None, tokens2: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The plan; of up to FEW slots with tables of tiles of so many tokens, where they are wanted."""
    topk = topk_TJ.contiguous()
    R, E = topk.numel(), n_experts
    require(R < 1 << 31, "topk_TJ", f"has {R} slots; a plan counts in 32 bits")
    expert, order = topk.new_empty(R), topk.new_empty(R)
    place = torch.empty_like(topk)
    end = torch.empty(E, dtype=torch.int32, device=topk.device)
    if R <= FEW:
        _plan_few_kernel[(1,)](topk, expert, order, place, end, tile, tile2, R, E, first,
                               0 if tile is None else len(tile), max(16, pow2(R)), pow2(E), tokens, tokens2)
        return expert, order, place, end
    block, bins = min(up_to(CHUNKS, R), max(32, pow2(R))), pow2(E + 2)
    chunks, count = max(1, cdiv(R, block)), None
    if R > AT_ONCE:
        count = torch.empty(chunks, bins, dtype=torch.int32, device=topk.device)
        _count_kernel[(chunks,)](topk, count, R, E, first, block, bins)
    _plan_kernel[(chunks,)](topk, count, expert, order, place, end, R, E, first, chunks, block, bins,
                            max(32, pow2(min(R, AT_ONCE))), num_warps=8)
    return expert, order, place, end


# ---- permute and combine: each is the other's gradient -----------------------------------------------------

@triton.jit
def _piece(PIECES: tl.constexpr, BLOCK_D: tl.constexpr):
    """(token, channels) of a program: neighbours share a token, so that its rows are read in one go."""
    return ((tl.program_id(0) // PIECES).to(tl.int64),
            tl.program_id(0) % PIECES * BLOCK_D + tl.arange(0, BLOCK_D))


@triton.jit
def _permute_kernel(x_ptr, weight_ptr, place_ptr, row_ptr, row_weight_ptr, D, stride_x, J: tl.constexpr,
                    PIECES: tl.constexpr, BLOCK_D: tl.constexpr):
    t, d = _piece(PIECES, BLOCK_D)
    x = tl.load(x_ptr + t * stride_x + d, mask=d < D)
    for j in tl.static_range(J):
        row = tl.load(place_ptr + t * J + j)
        tl.store(row_ptr + row * D + d, x, mask=d < D)
        if weight_ptr is not None:
            first = tl.program_id(0) % PIECES == 0
            tl.store(row_weight_ptr + row, tl.load(weight_ptr + t * J + j), mask=first)


@triton.jit(do_not_specialize=["R"])
def _combine_kernel(y_ptr, place_ptr, shared_ptr, rows_ptr, out_ptr, R, D, stride_y, stride_shared,
                    J: tl.constexpr, PIECES: tl.constexpr, BLOCK_D: tl.constexpr):
    """A token's piece; rows from `rows` on, of experts that are held elsewhere, count for nothing.

    A place that is none of the R rows reads nothing and makes the token NaN, which nobody overlooks.
    """
    t, d = _piece(PIECES, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for j in tl.static_range(J):
        row = t * J + j
        if place_ptr is not None:
            row = tl.load(place_ptr + row)
        at = tl.broadcast_to(row, (BLOCK_D,))
        if rows_ptr is not None:
            total += ld(y_ptr + row * stride_y + d, (d < D) & (at < tl.load(rows_ptr)))
        else:
            total += ld(y_ptr + row * stride_y + d, (d < D) & (at >= 0) & (at < R), float("nan"))
    if shared_ptr is not None:
        total += ld(shared_ptr + t * stride_shared + d, d < D)
    tl.store(out_ptr + t * D + d, narrow(total, out_ptr.dtype.element_ty), mask=d < D)


def _pieces(name: str, T: int, D: int, J: int) -> tuple[int, int, int]:
    """(pieces of a token, channels of a piece, warps)."""
    config = tuned(name, (T, D, J), MOVE)
    piece = min(config["piece"], pow2(D))
    return cdiv(D, piece), piece, min(config["num_warps"], max(1, piece // 256))


def _spread(x_TD: Tensor, weight_TJ: Tensor | None, place_TJ: Tensor) -> tuple[Tensor, Tensor | None]:
    (T, D), J = x_TD.shape, place_TJ.shape[1]
    x, rows = rows_of(x_TD), x_TD.new_empty(T * J, D)
    weight = None if weight_TJ is None else weight_TJ.contiguous()
    row_weight = None if weight is None else weight.new_empty(T * J)
    pieces, piece, warps = _pieces("moe.permute", T, D, J)
    if rows.numel():
        _permute_kernel[(T * pieces,)](x, weight, place_TJ, rows, row_weight, D, x.stride(0), J, pieces,
                                       piece, num_warps=warps)
    return rows, row_weight


def _collect(y_RD: Tensor, place_TJ: Tensor | None, shared_TD: Tensor | None, dtype: torch.dtype,
             rows: Tensor | None = None) -> Tensor:
    R, D = y_RD.shape
    T, J = (1, R) if place_TJ is None else place_TJ.shape
    y, shared = rows_of(y_RD), None if shared_TD is None else rows_of(shared_TD)
    out = torch.empty(T, D, dtype=dtype, device=y.device)
    pieces, piece, warps = _pieces("moe.combine", T, D, J)
    if out.numel():
        _combine_kernel[(T * pieces,)](y, place_TJ, shared, rows, out, R, D, y.stride(0),
                                       0 if shared is None else shared.stride(0), J, pieces, piece,
                                       num_warps=warps)
    return out


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, place):
        ctx.save_for_backward(place)
        ctx.dtype = x.dtype
        return _spread(x, weight, place)

    @staticmethod
    def backward(ctx, push_RD, push_R):
        place, = ctx.saved_tensors
        return _collect(push_RD, place, None, ctx.dtype), push_R[place], None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, place, shared, dtype):
        ctx.place, ctx.dtypes, ctx.rows = place, (y.dtype, None if shared is None else shared.dtype), len(y)
        return _collect(y, place, shared, dtype)

    @staticmethod
    def backward(ctx, push):
        mine, others = ctx.dtypes
        if ctx.place is None:
            dy = push.to(mine).expand(ctx.rows, -1)
        elif ctx.place.numel() == ctx.rows:
            dy, _ = _spread(push.to(mine), None, ctx.place)
        else:  # rows of several ranks: some may be placed again and again, some nowhere
            each = push.to(mine).repeat_interleave(ctx.place.shape[1], 0)
            dy = each.new_zeros(ctx.rows, each.shape[1]).index_add_(0, ctx.place.flatten(), each)
        return dy, None, None if others is None else push.to(others), None


@ops.implement("moe.permute", "triton", grad=True, when=lambda x, *_: refuse(x))
def permute(x_TD: Tensor, weight_TJ: Tensor, order_R: Tensor, place_TJ: Tensor) -> tuple[Tensor, Tensor]:
    """(rows_RD, weight_R) in the plan's order: written by place, so that every token is read once."""
    require(weight_TJ.shape == place_TJ.shape, "weight_TJ",
            f"is {tuple(weight_TJ.shape)}, place_TJ {tuple(place_TJ.shape)}")
    return _Permute.apply(x_TD, weight_TJ, place_TJ.contiguous())


@ops.implement("moe.combine", "triton", grad=True,
               when=lambda y, place, shared, dtype: refuse(y, shared) or _wide(y))
def combine(y_RD: Tensor, place_TJ: Tensor | None, shared_TD: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Each token's results in slot order, then the shared expert's, [T, D] of `dtype`.

    Where there are as many places as rows, each row has one; the rows of several ranks may have any number.
    A place beyond the rows makes its token NaN: to look for one beforehand would take a wait for the GPU.
    """
    return _Combine.apply(y_RD, None if place_TJ is None else place_TJ.contiguous(), shared_TD, dtype)


# ---- activation --------------------------------------------------------------------------------------------

@triton.jit
def _clamped(gate, linear, limit, LIMITED: tl.constexpr):
    if LIMITED:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        linear = tl.clamp(linear, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return gate, linear


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)) by the square of a root, which a GPU has in one instruction and a quotient not."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def _swiglu_fwd_kernel(gate_ptr, linear_ptr, weight_ptr, out_ptr, R, stride_gate, stride_linear, limit,
                       I: tl.constexpr, LIMITED: tl.constexpr, DTYPE: tl.constexpr, KIND: tl.constexpr,
                       GROUP: tl.constexpr, BLOCK: tl.constexpr):
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = (group // tl.cdiv(I, GROUP)).to(tl.int64)
    column = (group % tl.cdiv(I, GROUP) * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    inside = row[:, None] < R
    if I % GROUP != 0:
        inside = inside & (column < I)
    gate, linear = _clamped(ld(gate_ptr + row[:, None] * stride_gate + column, inside),
                            ld(linear_ptr + row[:, None] * stride_linear + column, inside), limit, LIMITED)
    hidden = gate * _sigmoid(gate) * linear
    if weight_ptr is not None:
        hidden *= ld(weight_ptr + row, row < R)[:, None]
    if KIND is not None:
        hidden = restored(narrow(hidden, DTYPE).to(tl.float32), KIND)
    tl.store(out_ptr + row[:, None] * I + column, narrow(hidden, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_bwd_kernel(gate_ptr, linear_ptr, weight_ptr, push_ptr, dgate_ptr, dlinear_ptr, dweight_ptr,
                       stride_gate, stride_linear, stride_push, limit, I: tl.constexpr, LIMITED: tl.constexpr,
                       BLOCK: tl.constexpr):
    """A row; a clamp passes the gradient of what it left alone."""
    row = tl.program_id(0).to(tl.int64)
    weight = 1.0 if weight_ptr is None else ld(weight_ptr + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, I, BLOCK):
        i = start + tl.arange(0, BLOCK)
        raw_gate = ld(gate_ptr + row * stride_gate + i, i < I)
        raw_linear = ld(linear_ptr + row * stride_linear + i, i < I)
        push = ld(push_ptr + row * stride_push + i, i < I)
        gate, linear = _clamped(raw_gate, raw_linear, limit, LIMITED)
        share = _sigmoid(gate)
        total += push * gate * share * linear
        push *= weight
        dgate = push * linear * share * (1.0 + gate * (1.0 - share))
        dlinear = push * gate * share
        if LIMITED:
            dgate = tl.where(raw_gate <= limit, dgate, 0.0)
            dlinear = tl.where(tl.abs(raw_linear) <= limit, dlinear, 0.0)
        tl.store(dgate_ptr + row * I + i, narrow(dgate, dgate_ptr.dtype.element_ty), mask=i < I)
        tl.store(dlinear_ptr + row * I + i, narrow(dlinear, dlinear_ptr.dtype.element_ty), mask=i < I)
    if weight_ptr is not None:
        tl.store(dweight_ptr + row, narrow(tl.sum(total), dweight_ptr.dtype.element_ty))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, linear, weight, limit, dtype, fmt, compute):
        (R, I), weight = gate.shape, None if weight is None else weight.contiguous()
        ctx.save_for_backward(gate, linear, weight)
        ctx.limit = limit
        kind, group = layout(fmt) if fmt else (None, 32)
        out = torch.empty(R, I, dtype=compute, device=gate.device)
        name = "moe.swiglu_quantize" if fmt else "moe.swiglu"
        config = tuned(name, (R, I), ACTIVATE)
        block = max(1, config["channels"] // group)
        if out.numel():
            _swiglu_fwd_kernel[(cdiv(R * cdiv(I, group), block),)](
                gate, linear, weight, out, R, gate.stride(0), linear.stride(0), limit, I, limit > 0,
                ELEMENT[dtype], kind, group, block, num_warps=config["num_warps"])
        return out

    @staticmethod
    def backward(ctx, push):
        """Both roundings pass the gradient, which arrives in the dtype of the result."""
        gate, linear, weight = ctx.saved_tensors
        (R, I), push = gate.shape, rows_of(push)
        dgate = torch.empty(R, I, dtype=gate.dtype, device=gate.device)
        dlinear = torch.empty(R, I, dtype=linear.dtype, device=gate.device)
        dweight = None if weight is None else torch.empty_like(weight)
        if dgate.numel():
            _swiglu_bwd_kernel[(R,)](
                gate, linear, weight, push, dgate, dlinear, dweight, gate.stride(0), linear.stride(0),
                push.stride(0), ctx.limit, I, ctx.limit > 0, min(512, pow2(I)), num_warps=2)
        return dgate, dlinear, dweight, *[None] * 4


def _activation(gate: Tensor, linear: Tensor, weight: Tensor | None, limit: float, dtype: torch.dtype,
                fmt: str | None, compute: torch.dtype) -> Tensor:
    require(gate.shape == linear.shape, "linear", f"is {tuple(linear.shape)}, gate {tuple(gate.shape)}")
    rows = gate.numel() // max(1, gate.shape[-1])
    require(weight is None or weight.numel() == rows, "weight", f"is not one number for each of {rows} rows")
    return _SwiGLU.apply(rows_of(gate), rows_of(linear), weight, limit, dtype, fmt, compute).view(gate.shape)


@ops.implement("moe.swiglu", "triton", grad=True, when=lambda x, y, *_, **__: refuse(x, y) or _wide(x, y))
def swiglu(gate: Tensor, linear: Tensor, weight: Tensor | None, limit: float, dtype: torch.dtype,
           steady: bool = False) -> Tensor:
    """weight * silu(min(gate, limit)) * clamp(linear, -limit, limit), rounded once."""
    return _activation(gate, linear, weight, limit, dtype, None, dtype)


@ops.implement("moe.swiglu_quantize", "triton", grad=True,
               when=lambda x, y, *_, **__: refuse(x, y) or _wide(x, y))
def swiglu_quantize(gate: Tensor, linear: Tensor, weight: Tensor | None, limit: float, dtype: torch.dtype,
                    fmt: str, compute: torch.dtype, steady: bool = False) -> Tensor:
    """The same, then quantised in `fmt` and restored, in one pass."""
    return _activation(gate, linear, weight, limit, dtype, fmt, compute)
