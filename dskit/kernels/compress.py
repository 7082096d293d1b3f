"""Groups of tokens pooled into entries: both float32 products in one pass, and the pooling in another.

Products
    A program has TOKENS rows and FEATURES of one of the two weights, which it reads as they are stored and
    cuts into two bfloat16 pieces in registers, one above the other in the left operand: their sums are added
    at the end, and the gate's get what a row's place in its group adds.  What the pieces leave out is below
    2^-17 of a weight, as much as float32 sums are off; tensor cores do the rest.

Pooling
    A tile is [ROWS entries, STEP members, BLOCK channels]; every channel has a softmax of its own over the
    group's members, with a running maximum from step to step.  Few groups take many members at once, so that
    their rows are on the way together; many groups walk, and a lane needs no other lane.

        entry e, channels    step 0: g v | g v    step 1: g v | g v    ...    ->    sum p v

    Fused because the parts would copy each member (gather), copy its gates (mask), weigh and sum: 8 kB an
    entry are moved three times, here once.  The backward pass weighs again instead of keeping the weights;
    a row plays a role once, so that it stores gradients where the row stands, without adding up.

Shapes
    x [T, D] bfloat16, weights [X, D] and ape [R, X] float32 -> line [T, 2, X].
    line [S, 2, X] contiguous, read [E, U] int64 -> [E, width]; X = width, or twice that for two roles.

Units
    Products: 8 X D bytes of weights, 2 D and 8 X a row; 8 X D operations a row, in bfloat16.
    Bytes per entry: 8 U width of float32 members, and the result; 6 operations per member and channel.

Errors
    ValueError names an argument whose shape does not fit.  float64 is refused, and products of anything but
    bfloat16 rows with float32 weights, or in tiles of fixed rows.

Source
    kernels.md 1.4 (compress2).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dskit import ops
from dskit.kernels.common import (
    cdiv,
    dot,
    ld,
    narrow,
    pow2,
    refuse,
    require,
    rows_of,
    to_bf16,
    too_wide,
    tuned,
    up_to,
)


def _config(rows: int, step: int, block: int, warps: int) -> dict[str, int]:
    """Entries, members and channels of a tile."""
    return {"rows": rows, "step": step, "block": block, "num_warps": warps}


def _product(tokens: int, features: int, step: int, warps: int, stages: int) -> dict[str, int]:
    """Rows of x, rows of a weight and channels of a step of a tile."""
    return {"tokens": tokens, "features": features, "step": step, "num_warps": warps, "num_stages": stages}


# largest number of rows -> tile of a product
PRODUCTS = {8: _product(8, 8, 256, 4, 4), 32: _product(16, 16, 256, 4, 3), 256: _product(64, 16, 128, 4, 4),
            1 << 62: _product(256, 64, 64, 8, 3)}
# largest number of members of all groups -> tile
CONFIGS = {4096: _config(1, 64, 64, 4), 1 << 16: _config(1, 8, 256, 4), 1 << 62: _config(2, 1, 512, 4)}
BACKWARD = _config(2, 1, 512, 4)
CANDIDATES = {
    "compress.project": (*PRODUCTS.values(), *(_product(*sizes) for sizes in (
        (8, 8, 512, 4, 3), (8, 16, 256, 4, 3), (16, 8, 256, 4, 4), (16, 32, 128, 4, 4), (32, 16, 128, 4, 4),
        (128, 32, 64, 4, 4), (128, 64, 64, 4, 3), (128, 64, 64, 8, 4)))),
    "compress.pool": tuple(_config(*sizes) for sizes in (
        (1, 128, 32, 4), (1, 128, 32, 8), (1, 64, 64, 4), (1, 32, 128, 8), (1, 8, 128, 2), (1, 8, 256, 4),
        (1, 4, 512, 4), (1, 2, 512, 4), (1, 1, 512, 2), (2, 1, 512, 4), (1, 1, 256, 1), (4, 8, 128, 4))),
}


# ---- products ----------------------------------------------------------------------------------------------

@triton.jit
def _compress_project_kernel(x_ptr, stride_x, wkv_ptr, wgate_ptr, ape_ptr, pos_ptr, line_ptr, T, X, R,
                             D: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
                             STEP: tl.constexpr):
    gate = tl.program_id(0) % 2
    n = tl.program_id(0) // 2 * FEATURES + tl.arange(0, FEATURES)[:, None]
    t = (tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[None, :]
    w_ptr = wkv_ptr
    if gate:
        w_ptr = wgate_ptr
    w_row, x_row = w_ptr + n * D, x_ptr + t * stride_x
    acc = tl.zeros((2 * FEATURES, TOKENS), tl.float32)
    for first in range(0, D, STEP):
        d = first + tl.arange(0, STEP)
        w = tl.load(w_row + d[None, :], mask=(n < X) & (d < D)[None, :], other=0.0)
        x = tl.load(x_row + d[:, None], mask=(t < T) & (d < D)[:, None], other=0.0)
        rest = w - to_bf16(w).to(tl.float32)
        pieces = to_bf16(tl.where(tl.arange(0, 2)[:, None, None] == 0, w, rest))
        acc = dot(pieces.reshape(2 * FEATURES, STEP), x, acc)
    y = tl.sum(acc.reshape(2, FEATURES, TOKENS), axis=0)
    there = (n < X) & (t < T)
    if ape_ptr is not None:
        place = tl.load(pos_ptr + t, mask=t < T, other=0) % R
        y += tl.load(ape_ptr + place * X + n, mask=(n < gate * X) & (t < T), other=0.0)
    tl.store(line_ptr + (2 * t + gate) * X + n, y, mask=there)


def _unfit(x: Tensor, wkv: Tensor, wgate: Tensor, ape: Tensor | None, pos: Tensor,
           row_tile: int | None = None) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    if row_tile is not None:
        return "tiles of fixed rows are the reference's"
    if x.dtype != torch.bfloat16 or wkv.dtype != torch.float32 or wgate.dtype != torch.float32:
        return f"it multiplies bfloat16 by float32, not {x.dtype} by {wkv.dtype} and {wgate.dtype}"
    return refuse(x, wkv, wgate, ape, pos)


@ops.implement("compress.project", "triton", when=_unfit)
def project(x_TD: Tensor, wkv_XD: Tensor, wgate_XD: Tensor, ape_RX: Tensor | None, pos_T: Tensor,
            row_tile: int | None = None) -> Tensor:
    """(v, g) of each row, line [T, 2, X] in float32."""
    (T, D), X = x_TD.shape, len(wkv_XD)
    require(wkv_XD.shape == wgate_XD.shape == (X, D), "wgate_XD",
            f"is {list(wgate_XD.shape)}, wkv_XD {list(wkv_XD.shape)}; x_TD has {D} channels")
    require(ape_RX is None or ape_RX.shape[1:] == (X,) and pos_T.shape == (T,), "ape_RX",
            f"must have {X} channels, and pos_T {T} rows")
    line, x = torch.empty(T, 2, X, dtype=torch.float32, device=x_TD.device), rows_of(x_TD)
    config = tuned("compress.project", (T, X, D), up_to(PRODUCTS, T))
    grid = 2 * cdiv(X, config["features"]), cdiv(T, config["tokens"])
    if T:
        _compress_project_kernel[grid](
            x, x.stride(0), wkv_XD.contiguous(), wgate_XD.contiguous(),
            None if ape_RX is None else ape_RX.contiguous(), pos_T.contiguous(), line, T, X,
            1 if ape_RX is None else len(ape_RX), D, config["tokens"], config["features"], config["step"],
            num_warps=config["num_warps"], num_stages=config["num_stages"])
    return line


# ---- pooling -----------------------------------------------------------------------------------------------

@triton.jit
def _members(line_ptr, read_ptr, entry, real, u, col, MEMBERS: tl.constexpr, WIDTH: tl.constexpr,
             HELD: tl.constexpr):
    """(v, g, where v stands, whether it does) of members u of each entry; an absent one weighs nothing."""
    row = tl.load(read_ptr + entry * MEMBERS + u, mask=real & (u < MEMBERS), other=-1)
    at = row * (2 * HELD) + (HELD - WIDTH) * (2 * u // MEMBERS) + col
    there = (row >= 0) & (col < WIDTH)
    return ld(line_ptr + at, there), ld(line_ptr + at + HELD, there, float("-inf")), at, there


@triton.jit
def _weigh(line_ptr, read_ptr, entry, real, col, MEMBERS: tl.constexpr, WIDTH: tl.constexpr,
           HELD: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """(weighted mean, largest gate, sum of exp(gate - largest)) over the members, each [ROWS, 1, BLOCK]."""
    top = tl.full([ROWS, 1, BLOCK], -1e38, tl.float32)  # finite, so that an absent member gives 0 and no NaN
    total = tl.zeros([ROWS, 1, BLOCK], tl.float32)
    mean = tl.zeros([ROWS, 1, BLOCK], tl.float32)
    for first in range(0, MEMBERS, STEP):
        u = first + tl.arange(0, STEP)[None, :, None]
        v, g, _, _ = _members(line_ptr, read_ptr, entry, real, u, col, MEMBERS, WIDTH, HELD)
        higher = tl.maximum(top, tl.max(g, axis=1, keep_dims=True))
        keep, weight = tl.exp(top - higher), tl.exp(g - higher)
        total = total * keep + tl.sum(weight, axis=1, keep_dims=True)
        mean = mean * keep + tl.sum(weight * v, axis=1, keep_dims=True)
        top = higher
    total = tl.where(total > 0, total, 1.0)  # lanes beyond the width have no members
    return mean / total, top, total


@triton.jit
def _where(entries, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(entries [ROWS, 1, 1], whether they exist, channels [1, 1, BLOCK]) of a program."""
    entry = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None, None]
    return entry, entry < entries, (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, None, :]


@triton.jit(do_not_specialize=["entries"])
def _compress_pool_fwd_kernel(line_ptr, read_ptr, y_ptr, entries, MEMBERS: tl.constexpr, WIDTH: tl.constexpr,
                              HELD: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
                              BLOCK: tl.constexpr):
    entry, real, col = _where(entries, WIDTH, ROWS, BLOCK)
    mean, _, _ = _weigh(line_ptr, read_ptr, entry, real, col, MEMBERS, WIDTH, HELD, ROWS, STEP, BLOCK)
    tl.store(y_ptr + entry * WIDTH + col, narrow(mean, y_ptr.dtype.element_ty), mask=real & (col < WIDTH))


@triton.jit(do_not_specialize=["entries"])
def _compress_pool_bwd_kernel(line_ptr, read_ptr, dy_ptr, dline_ptr, entries, MEMBERS: tl.constexpr,
                              WIDTH: tl.constexpr, HELD: tl.constexpr, ROWS: tl.constexpr,
                              STEP: tl.constexpr, BLOCK: tl.constexpr):
    """dv = p dy, dg = p (v - y) dy."""
    entry, real, col = _where(entries, WIDTH, ROWS, BLOCK)
    mean, top, total = _weigh(line_ptr, read_ptr, entry, real, col, MEMBERS, WIDTH, HELD, ROWS, STEP, BLOCK)
    dy = ld(dy_ptr + entry * WIDTH + col, real & (col < WIDTH))
    for first in range(0, MEMBERS, STEP):
        u = first + tl.arange(0, STEP)[None, :, None]
        v, g, at, there = _members(line_ptr, read_ptr, entry, real, u, col, MEMBERS, WIDTH, HELD)
        dv = tl.exp(g - top) / total * dy
        tl.store(dline_ptr + at, narrow(dv, dline_ptr.dtype.element_ty), mask=there)
        tl.store(dline_ptr + at + HELD, narrow(dv * (v - mean), dline_ptr.dtype.element_ty), mask=there)


# ---- launches ----------------------------------------------------------------------------------------------

def _launch(kernel, config: dict[str, int], line: Tensor, read: Tensor, width: int, *tensors: Tensor) -> None:
    entries, members = read.shape
    rows, block = config["rows"], min(config["block"], pow2(width))
    if entries:
        kernel[(cdiv(entries, rows), cdiv(width, block))](
            line, read, *tensors, entries, members, width, line.shape[2], ROWS=rows,
            STEP=min(config["step"], pow2(members)), BLOCK=block, num_warps=config["num_warps"])


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, line, read, width, dtype, steady):
        ctx.save_for_backward(line, read)
        ctx.width = width
        y = torch.empty(read.shape[0], width, dtype=dtype, device=line.device)
        config = up_to(CONFIGS, 0 if steady else read.numel())
        if not steady:
            config = tuned("compress.pool", (*read.shape, width), config)
        _launch(_compress_pool_fwd_kernel, config, line, read, width, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        line, read = ctx.saved_tensors
        dline = torch.zeros_like(line)  # rows that are in no group get nothing
        _launch(_compress_pool_bwd_kernel, BACKWARD, line, read, ctx.width, dy.contiguous(), dline)
        return dline, None, None, None, None


@ops.implement("compress.pool", "triton", grad=True, when=lambda line, read, width, dtype, steady=False:
               too_wide(line, dtype) or refuse(line, read))
def pool(line_S2X: Tensor, read_EU: Tensor, width: int, dtype: torch.dtype, steady: bool = False) -> Tensor:
    """Each group's mean of v under the softmax of g over its members, [E, width] of `dtype`."""
    held = line_S2X.shape[2]
    require(line_S2X.shape[1] == 2 and held in (width, 2 * width), "line_S2X",
            f"is {list(line_S2X.shape)}; it must be [S, 2, {width} or {2 * width}]")
    require(held == width or read_EU.shape[1] % 2 == 0, "read_EU", "must list an even number of members")
    return _Pool.apply(line_S2X.contiguous(), read_EU.contiguous(), width, dtype, steady)
