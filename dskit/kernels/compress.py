"""Groups of tokens pooled into entries: members are gathered, weighed and summed in one pass.

Tiling
    A tile is [ROWS entries, BLOCK channels]; every channel has a softmax of its own over the group's members,
    so a lane walks over them with a running maximum and needs no other lane.

        entry e, channels    member 0: g v    member 1: g v    ...    ->    sum p v

    Fused because the parts would copy each member (gather), copy its gates (mask), weigh and sum: 8 kB an
    entry are moved three times, here once.  The backward pass weighs again instead of keeping the weights;
    a row plays a role once, so that it stores gradients where the row stands, without adding up.

Shapes
    line [S, 2, X] contiguous, read [E, U] int64 -> [E, width]; X = width, or twice that for two roles.

Units
    Bytes per entry: 8 U width of float32 members, and the result; 6 operations per member and channel.

Errors
    ValueError names an argument whose shape does not fit.  float64 is refused.

Source
    kernels.md 1.4 (the pooling of compress2).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dskit import ops
from dskit.kernels.common import cdiv, ld, narrow, pow2, refuse, require, too_wide, tuned

CONFIG = {"block": 512, "tile": 1024, "num_warps": 4}  # channels and elements of a program
CANDIDATES = {"compress.pool": tuple({"block": block, "tile": tile, "num_warps": warps} for block, tile, warps
                                     in ((512, 1024, 4), (512, 512, 2), (512, 2048, 4), (256, 256, 1),
                                         (256, 512, 2), (256, 1024, 4), (128, 256, 2), (128, 512, 4)))}


# ---- kernels -----------------------------------------------------------------------------------------------

@triton.jit
def _member(line_ptr, read_ptr, entry, real, u, col, MEMBERS: tl.constexpr, WIDTH: tl.constexpr,
            HELD: tl.constexpr):
    """(v, g, where v stands, whether it does) of member u of each entry; an absent one weighs nothing."""
    row = tl.load(read_ptr + entry * MEMBERS + u, mask=real, other=-1)
    at = row * (2 * HELD) + (HELD - WIDTH) * (2 * u // MEMBERS) + col
    there = (row >= 0) & (col < WIDTH)
    return ld(line_ptr + at, there), ld(line_ptr + at + HELD, there, float("-inf")), at, there


@triton.jit
def _weigh(line_ptr, read_ptr, entry, real, col, MEMBERS: tl.constexpr, WIDTH: tl.constexpr,
           HELD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(weighted mean, largest gate, sum of exp(gate - largest)) over the members."""
    top = tl.full([ROWS, BLOCK], -1e38, tl.float32)  # finite, so that an absent member gives 0 and no NaN
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    mean = tl.zeros([ROWS, BLOCK], tl.float32)
    for u in range(MEMBERS):
        v, g, _, _ = _member(line_ptr, read_ptr, entry, real, u, col, MEMBERS, WIDTH, HELD)
        higher = tl.maximum(top, g)
        keep, weight = tl.exp(top - higher), tl.exp(g - higher)
        total = total * keep + weight
        mean = mean * keep + weight * v
        top = higher
    total = tl.where(total > 0, total, 1.0)  # lanes beyond the width have no members
    return mean / total, top, total


@triton.jit(do_not_specialize=["entries"])
def _compress_pool_fwd_kernel(line_ptr, read_ptr, y_ptr, entries, MEMBERS: tl.constexpr, WIDTH: tl.constexpr,
                              HELD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    entry = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    col = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    real = entry < entries
    mean, _, _ = _weigh(line_ptr, read_ptr, entry, real, col, MEMBERS, WIDTH, HELD, ROWS, BLOCK)
    tl.store(y_ptr + entry * WIDTH + col, narrow(mean, y_ptr.dtype.element_ty), mask=real & (col < WIDTH))


@triton.jit(do_not_specialize=["entries"])
def _compress_pool_bwd_kernel(line_ptr, read_ptr, dy_ptr, dline_ptr, entries, MEMBERS: tl.constexpr,
                              WIDTH: tl.constexpr, HELD: tl.constexpr, ROWS: tl.constexpr,
                              BLOCK: tl.constexpr):
    """dv = p dy, dg = p (v - y) dy."""
    entry = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    col = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    real = entry < entries
    mean, top, total = _weigh(line_ptr, read_ptr, entry, real, col, MEMBERS, WIDTH, HELD, ROWS, BLOCK)
    dy = ld(dy_ptr + entry * WIDTH + col, real & (col < WIDTH))
    for u in range(MEMBERS):
        v, g, at, there = _member(line_ptr, read_ptr, entry, real, u, col, MEMBERS, WIDTH, HELD)
        dv = tl.exp(g - top) / total * dy
        tl.store(dline_ptr + at, narrow(dv, dline_ptr.dtype.element_ty), mask=there)
        tl.store(dline_ptr + at + HELD, narrow(dv * (v - mean), dline_ptr.dtype.element_ty), mask=there)


# ---- launches ----------------------------------------------------------------------------------------------

def _launch(kernel, config: dict[str, int], line: Tensor, read: Tensor, width: int, *tensors: Tensor) -> None:
    entries, members = read.shape
    block = min(config["block"], pow2(width))
    rows = max(1, config["tile"] // block)
    if entries:
        kernel[(cdiv(entries, rows), cdiv(width, block))](
            line, read, *tensors, entries, members, width, line.shape[2], ROWS=rows, BLOCK=block,
            num_warps=config["num_warps"])


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, line, read, width, dtype):
        ctx.save_for_backward(line, read)
        ctx.width = width
        y = torch.empty(read.shape[0], width, dtype=dtype, device=line.device)
        config = tuned("compress.pool", (*read.shape, width), CONFIG)
        _launch(_compress_pool_fwd_kernel, config, line, read, width, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        line, read = ctx.saved_tensors
        dline = torch.zeros_like(line)  # rows that are in no group get nothing
        _launch(_compress_pool_bwd_kernel, CONFIG, line, read, ctx.width, dy.contiguous(), dline)
        return dline, None, None, None


@ops.implement("compress.pool", "triton", grad=True, when=lambda line, read, width, dtype:
               too_wide(line, dtype) or refuse(line, read))
def pool(line_S2X: Tensor, read_EU: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Each group's mean of v under the softmax of g over its members, [E, width] of `dtype`."""
    held = line_S2X.shape[2]
    require(line_S2X.shape[1] == 2 and held in (width, 2 * width), "line_S2X",
            f"is {list(line_S2X.shape)}; it must be [S, 2, {width} or {2 * width}]")
    require(held == width or read_EU.shape[1] % 2 == 0, "read_EU", "must list an even number of members")
    return _Pool.apply(line_S2X.contiguous(), read_EU.contiguous(), width, dtype)
