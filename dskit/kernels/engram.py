"""Engram: hash of n-grams, lookup of their rows, gate.

Idea
    hash      a tile of tokens x hash columns per n-gram length, the running xor in registers
    gather    tiles of whole scale groups [groups, 32]: 16 codes a thread and many threads, since what binds
              is how many random rows of 256 bytes are on their way at once; restored on the way out.  From
              runs: the same, each row by the address of the run that has it
    gate      as many programs as the GPU holds at once, each with one stream's gains in its registers, walk
              down the tokens: stream, key and value are loaded together, three sums are made, the value is
              added.  A token's streams are worked on side by side, so that its value comes from memory once
    gate, backward    from the sums that the forward pass kept: first the gradient that each opening receives,
              then one walk down the tokens for every piece of the channels, which also adds up the gains'

Shapes
    As in layers/engram.py; channels side by side, streams and tokens at any stride, so that key and value
    are read where the projection left them.

Units
    Bytes per token at N = 4, D = 5120, 24 rows of 256: hash 224; gather 24 (8 + 264 + 512); gate
    2 D (3 N + 1), backward 2 D (6 N + 3).

Errors
    ValueError names an argument whose shape does not fit.

Numerics
    Hash and gather are exact; the gate sums in float32.

Source
    kernels.md 1.7; model.md 3.10.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dskit import ops
from dskit.kernels.common import (
    cdiv,
    from_e4m3,
    from_e8m0,
    ld,
    narrow,
    pow2,
    processors,
    refuse,
    require,
    tuned,
    up_to,
)

HASH = {"tokens": 16, "num_warps": 4}
GATHER = {4096: {"groups": 32, "num_warps": 1}, 1 << 62: {"groups": 256, "num_warps": 4}}  # groups of 32
# channels that a program holds side by side, and programs per multiprocessor, by their registers
GATE = {"piece": 1024, "resident": 3, "num_warps": 4}
PIECE = 1024  # channels of a program of the backward pass
CANDIDATES = {
    "engram.hash": tuple({"tokens": tokens, "num_warps": warps} for tokens, warps in
                         ((4, 1), (16, 1), (16, 4), (32, 2), (64, 4), (128, 4))),
    "engram.gather": tuple({"groups": groups, "num_warps": warps} for groups, warps in
                           ((8, 1), (16, 1), (32, 1), (64, 1), (64, 2), (128, 4), (256, 4), (256, 8))),
    "engram.gate": tuple({"piece": piece, "resident": resident, "num_warps": warps} for piece, resident, warps
                         in ((1024, 2, 4), (1024, 3, 4), (1024, 4, 4), (1024, 8, 4), (1024, 4, 2),
                             (2048, 2, 8), (2048, 3, 8), (512, 8, 2)))}
SPAN = 32  # tokens that one program of the backward pass walks down


# ---- hash --------------------------------------------------------------------------------------------------

@triton.jit
def _hash_kernel(gram_ptr, multiplier_ptr, prime_ptr, offset_ptr, row_ptr, T, stride_gram, Q: tl.constexpr,
                 C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    gram_ptr += t * stride_gram
    out_ptr = row_ptr + (t * (Q - 1) * C)[:, None] + c[None, :]
    h = tl.load(gram_ptr, mask=t < T, other=0) * tl.load(multiplier_ptr)
    for s in tl.static_range(1, Q):
        h = h ^ (tl.load(gram_ptr + s, mask=t < T, other=0) * tl.load(multiplier_ptr + s))
        prime = tl.load(prime_ptr + (s - 1) * C + c, mask=c < C, other=1)
        offset = tl.load(offset_ptr + (s - 1) * C + c, mask=c < C, other=0)
        row = offset[None, :] + h[:, None] % prime[None, :]
        tl.store(out_ptr + (s - 1) * C, row, mask=(t[:, None] < T) & (c[None, :] < C))


@ops.implement("engram.hash", "triton", when=lambda gram, *_: refuse(gram))
def hash_rows(gram_TQ: Tensor, multiplier_Q: Tensor, prime_SC: Tensor, offset_SC: Tensor) -> Tensor:
    """Table rows [T, (Q-1)*C], int64."""
    (T, Q), C = gram_TQ.shape, prime_SC.shape[1]
    require(prime_SC.shape == offset_SC.shape == (Q - 1, C), "prime_SC",
            f"is {tuple(prime_SC.shape)}, offset_SC {tuple(offset_SC.shape)}; n-grams have up to {Q} ids")
    gram = gram_TQ if gram_TQ.stride(1) == 1 else gram_TQ.contiguous()
    rows = torch.empty(T, (Q - 1) * C, dtype=torch.int64, device=gram.device)
    config = tuned("engram.hash", (T, Q, C), HASH)
    if T:
        _hash_kernel[(cdiv(T, config["tokens"]),)](
            gram, multiplier_Q.contiguous(), prime_SC.contiguous(), offset_SC.contiguous(), rows, T,
            gram.stride(0), Q, C, config["tokens"], pow2(C), num_warps=config["num_warps"])
    return rows


# ---- gather ------------------------------------------------------------------------------------------------

@triton.jit
def _restore(code_ptr, scale_ptr, held, out_ptr, group, inside):
    """Write groups of codes as numbers; held: the place of each in its table."""
    i = tl.arange(0, 32)[None, :]
    code = tl.load((code_ptr + held * 32)[:, None] + i, mask=inside[:, None], other=0)
    scale = from_e8m0(tl.load(scale_ptr + held, mask=inside, other=127))
    value = from_e4m3(code) * scale[:, None]
    tl.store(out_ptr + group[:, None] * 32 + i, narrow(value, out_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _gather_kernel(code_ptr, scale_ptr, row_ptr, out_ptr, R, PER_ROW: tl.constexpr, BLOCK: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = group < R * PER_ROW
    row = tl.load(row_ptr + group // PER_ROW, mask=inside, other=0)
    _restore(code_ptr, scale_ptr, row * PER_ROW + group % PER_ROW, out_ptr, group, inside)


@triton.jit
def _gather_runs_kernel(code_ptrs, scale_ptrs, row_ptr, out_ptr, R, per, RUNS: tl.constexpr,
                        PER_ROW: tl.constexpr, BLOCK: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = group < R * PER_ROW
    row = tl.load(row_ptr + group // PER_ROW, mask=inside, other=0)
    code_ptr, scale_ptr = code_ptrs[0] + 0 * row, scale_ptrs[0] + 0 * row  # of the run that has the row
    for k in tl.static_range(1, RUNS):
        code_ptr = tl.where(row >= k * per, code_ptrs[k], code_ptr)
        scale_ptr = tl.where(row >= k * per, scale_ptrs[k], scale_ptr)
    _restore(code_ptr, scale_ptr, row % per * PER_ROW + group % PER_ROW, out_ptr, group, inside)


def _cannot_gather(weight: Tensor, scale: Tensor | None, row_TC: Tensor, dtype: torch.dtype) -> str | None:
    if scale is None:
        return "a table of numbers is read by plain indexing, which has a gradient"
    return refuse(weight, scale, row_TC)


@ops.implement("engram.gather", "triton", when=_cannot_gather)
def gather(weight: Tensor, scale: Tensor | None, row_TC: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [T, C] of a table of codes -> [T, C*Y] numbers of `dtype`; 64-bit offsets."""
    (T, C), Y = row_TC.shape, weight.shape[1]
    require(Y % 32 == 0, "weight", f"has rows of {Y} codes; scales stand for 32")
    require(scale.shape == (weight.shape[0], Y // 32), "scale", f"is {tuple(scale.shape)}, not "
            f"{(weight.shape[0], Y // 32)}")
    out = torch.empty(T, C * Y, dtype=dtype, device=weight.device)
    config = tuned("engram.gather", (T * C, Y), up_to(GATHER, T * C))
    block = config["groups"]
    if out.numel():
        _gather_kernel[(cdiv(T * C * Y // 32, block),)](
            weight.contiguous().view(torch.uint8), scale.contiguous().view(torch.uint8), row_TC.contiguous(),
            out, T * C, Y // 32, block, num_warps=config["num_warps"])
    return out


@ops.implement("engram.gather_runs", "triton", when=lambda weight, scale, row, dtype: refuse(*weight, row))
def gather_runs(weight: tuple[Tensor, ...], scale: tuple[Tensor, ...], row_TC: Tensor, dtype: torch.dtype
                ) -> Tensor:
    """The same from runs of equally many rows, wherever this GPU can read them."""
    (T, C), (per, Y) = row_TC.shape, weight[0].shape
    require(Y % 32 == 0, "weight", f"has rows of {Y} codes; scales stand for 32")
    for codes, scales in zip(weight, scale, strict=True):
        require(codes.shape == (per, Y) and codes.is_contiguous(), "weight",
                f"has a run of {tuple(codes.shape)}, not of {(per, Y)} side by side")
        require(scales.shape == (per, Y // 32) and scales.is_contiguous(), "scale",
                f"has a run of {tuple(scales.shape)}, not of {(per, Y // 32)} side by side")
    out = torch.empty(T, C * Y, dtype=dtype, device=row_TC.device)
    config = tuned("engram.gather", (T * C, Y), up_to(GATHER, T * C))
    block = config["groups"]
    if out.numel():
        _gather_runs_kernel[(cdiv(T * C * Y // 32, block),)](
            tuple(t.view(torch.uint8) for t in weight), tuple(t.view(torch.uint8) for t in scale),
            row_TC.contiguous(), out, T * C, per, len(weight), Y // 32, block, num_warps=config["num_warps"])
    return out


# ---- gate --------------------------------------------------------------------------------------------------

@triton.jit
def _gain(q_ptr, k_ptr, n, d, inside, D: tl.constexpr):
    """What a channel of the product of stream and key is multiplied by."""
    return ld(q_ptr + n * D + d, inside) * ld(k_ptr + n * D + d, inside)


@triton.jit
def _opening(fit):
    """sigmoid of the signed root of the fit; a NaN stays one."""
    root = tl.sqrt(tl.maximum(tl.abs(fit), 1e-6, propagate_nan=tl.PropagateNan.ALL))
    root = tl.where(fit.to(tl.int32, bitcast=True) < 0, -root, root)
    return 1.0 / (1.0 + tl.exp(-root))


@triton.jit
def _gate_fwd_kernel(X_ptr, key_ptr, value_ptr, q_ptr, k_ptr, image_ptr, out_ptr, sum_ptr, T, span, stride_x,
                     stride_xn, stride_key, stride_keyn, stride_value, eps, N: tl.constexpr, D: tl.constexpr,
                     PIECE: tl.constexpr):
    n = tl.program_id(0)
    d = tl.arange(0, PIECE)
    gains = ()
    for start in tl.static_range(0, D, PIECE):
        gains = gains + (_gain(q_ptr, k_ptr, n, start + d, start + d < D, D),)
    first = tl.program_id(1) * span
    for step in range(first, tl.minimum(first + span, T)):
        t = tl.cast(step, tl.int64)
        xs, values = (), ()
        xx = tl.zeros((PIECE,), tl.float32)
        kk = tl.zeros((PIECE,), tl.float32)
        xk = tl.zeros((PIECE,), tl.float32)
        for start in tl.static_range(0, D, PIECE):
            inside = start + d < D
            xs = xs + (tl.load(X_ptr + t * stride_x + n * stride_xn + start + d, mask=inside, other=0.0),)
            values = values + (tl.load(value_ptr + t * stride_value + start + d, mask=inside, other=0.0),)
            key = ld(key_ptr + t * stride_key + n * stride_keyn + start + d, inside)
            x = xs[start // PIECE].to(tl.float32)
            xx += x * x
            kk += key * key
            xk += x * key * gains[start // PIECE]
        x_norm = tl.rsqrt(tl.sum(xx) / D + eps)
        key_norm = tl.rsqrt(tl.sum(kk) / D + eps)
        fit = tl.sum(xk) * x_norm * key_norm * D**-0.5
        opening = _opening(fit)
        at = t * N + n
        if sum_ptr is not None:
            tl.store(sum_ptr + at, x_norm)
            tl.store(sum_ptr + at + T * N, key_norm)
            tl.store(sum_ptr + at + 2 * T * N, fit)
        for start in tl.static_range(0, D, PIECE):
            x = xs[start // PIECE].to(tl.float32)
            mixed = x + opening * values[start // PIECE].to(tl.float32)
            if image_ptr is not None:
                mixed = tl.where(tl.load(image_ptr + t) != 0, x, mixed)
            mixed = narrow(mixed, out_ptr.dtype.element_ty)
            tl.store(out_ptr + at * D + start + d, mixed, mask=start + d < D)


@triton.jit
def _opening_bwd_kernel(push_ptr, value_ptr, image_ptr, sum_ptr, part_ptr, T, stride_value, N: tl.constexpr,
                        D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Of a token's stream: its opening; what multiplies key (for X) and X (for key); and their own shares,
    which come from the norms.
    """
    n = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    at = t * N + n
    total = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.static_range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        total += ld(push_ptr + at * D + d, d < D) * ld(value_ptr + t * stride_value + d, d < D)
    x_norm = tl.load(sum_ptr + at)
    key_norm = tl.load(sum_ptr + at + T * N)
    fit = tl.load(sum_ptr + at + 2 * T * N)
    opening = _opening(fit)
    if image_ptr is not None:
        opening = tl.where(tl.load(image_ptr + t) != 0, 0.0, opening)
    slope = tl.where(tl.abs(fit) >= 1e-6, 0.5 * tl.rsqrt(tl.maximum(tl.abs(fit), 1e-6)), 0.0)
    dfit = tl.sum(total) * opening * (1.0 - opening) * slope
    tl.store(part_ptr + at, opening)
    tl.store(part_ptr + at + T * N, dfit * x_norm * key_norm * D**-0.5)
    tl.store(part_ptr + at + 2 * T * N, dfit * fit * x_norm * x_norm / D)
    tl.store(part_ptr + at + 3 * T * N, dfit * fit * key_norm * key_norm / D)


@triton.jit
def _gate_bwd_kernel(X_ptr, key_ptr, push_ptr, q_ptr, k_ptr, part_ptr, dX_ptr, dkey_ptr, dvalue_ptr,
                     dgain_ptr, T, stride_x, stride_xn, stride_key, stride_keyn, N: tl.constexpr,
                     D: tl.constexpr, SPAN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    n = tl.arange(0, BLOCK_N)[:, None]
    inside = (n < N) & (d < D)
    gain = _gain(q_ptr, k_ptr, n, d, inside, D)
    dgain = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    first = tl.program_id(1) * SPAN
    for step in range(first, tl.minimum(first + SPAN, T)):
        t = tl.cast(step, tl.int64)
        x = ld(X_ptr + t * stride_x + n * stride_xn + d, inside)
        key = ld(key_ptr + t * stride_key + n * stride_keyn + d, inside)
        push = ld(push_ptr + (t * N + n) * D + d, inside)
        at = part_ptr + t * N + n
        opening = ld(at, n < N)
        both = ld(at + T * N, n < N)
        dX = push + both * key * gain - ld(at + 2 * T * N, n < N) * x
        dkey = both * x * gain - ld(at + 3 * T * N, n < N) * key
        dvalue = tl.sum(opening * push, axis=0)[None, :]
        dgain += both * x * key
        tl.store(dX_ptr + (t * N + n) * D + d, narrow(dX, dX_ptr.dtype.element_ty), mask=inside)
        tl.store(dkey_ptr + (t * N + n) * D + d, narrow(dkey, dkey_ptr.dtype.element_ty), mask=inside)
        tl.store(dvalue_ptr + t * D + d, narrow(dvalue, dvalue_ptr.dtype.element_ty), mask=d < D)
    tl.store(dgain_ptr + (tl.program_id(1).to(tl.int64) * N + n) * D + d, dgain, mask=inside)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, key, value, q_weight, k_weight, eps, image, steady):
        T, N, D = X.shape
        out = torch.empty(T, N, D, dtype=X.dtype, device=X.device)
        sums = torch.empty(3, T, N, device=X.device) if any(ctx.needs_input_grad) else None
        ctx.save_for_backward(X, key, value, q_weight, k_weight, image, sums)
        config = GATE if steady else tuned("engram.gate", (T, N, D), GATE)
        piece = min(config["piece"], pow2(D))
        span = cdiv(T * N, config["resident"] * processors(X))
        if out.numel():
            _gate_fwd_kernel[(N, cdiv(T, span))](
                X, key, value, q_weight, k_weight, image, out, sums, T, span, X.stride(0), X.stride(1),
                key.stride(0), key.stride(1), value.stride(0), eps, N, D, piece,
                num_warps=min(config["num_warps"], max(1, piece // 256)))
        return out

    @staticmethod
    def backward(ctx, push):
        X, key, value, q_weight, k_weight, image, sums = ctx.saved_tensors
        (T, N, D), push = X.shape, push.contiguous()
        dX, dkey = (torch.empty(T, N, D, dtype=like.dtype, device=X.device) for like in (X, key))
        dvalue = torch.empty(T, D, dtype=value.dtype, device=X.device)
        part, dgain = torch.empty(4, T, N, device=X.device), torch.zeros(cdiv(T, SPAN), N, D, device=X.device)
        if dX.numel():
            _opening_bwd_kernel[(N, T)](push, value, image, sums, part, T, value.stride(0), N, D,
                                        min(PIECE, pow2(D)))
            piece = min(512, pow2(D))
            _gate_bwd_kernel[(cdiv(D, piece), cdiv(T, SPAN))](
                X, key, push, q_weight, k_weight, part, dX, dkey, dvalue, dgain, T, X.stride(0), X.stride(1),
                key.stride(0), key.stride(1), N, D, SPAN, pow2(N), piece)
        dgain = dgain.sum(dim=0)
        dq, dk = (dgain * k_weight).to(q_weight.dtype), (dgain * q_weight).to(k_weight.dtype)
        return dX, dkey, dvalue, dq, dk, None, None, None


def _cannot_gate(X: Tensor, key: Tensor, *_, **__) -> str | None:
    return refuse(X, key) or ("float64 is the oracle's dtype" if X.dtype == torch.float64 else None)


@ops.implement("engram.gate", "triton", when=_cannot_gate, grad=True)
def gate(X_TND: Tensor, key_TND: Tensor, value_TD: Tensor, q_weight_ND: Tensor, k_weight_ND: Tensor,
         eps: float, image_T: Tensor | None = None, steady: bool = False) -> Tensor:
    """Every stream plus as much of the value as its key fits it, [T, N, D]; image rows as they were."""
    T, N, D = X_TND.shape
    for name, tensor, shape in (("key_TND", key_TND, (T, N, D)), ("value_TD", value_TD, (T, D)),
                                ("q_weight_ND", q_weight_ND, (N, D)), ("k_weight_ND", k_weight_ND, (N, D))):
        require(tensor.shape == shape, name, f"is {tuple(tensor.shape)}, not {shape}")
    X, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (X_TND, key_TND, value_TD))
    q_weight, k_weight = q_weight_ND.contiguous(), k_weight_ND.contiguous()
    return _Gate.apply(X, key, value, q_weight, k_weight, eps, image_T, steady)
