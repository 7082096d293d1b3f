"""Rotary embedding in one pass: rows are copied, and their last channels turned on the way.

Tiling
    A tile is [ROWS, BLOCK], whole rows (a token's head each) padded to a power of two.  A lane holds 8
    neighbouring channels, so both halves of a pair are its own and a turn needs no other lane.  The turns of
    a token lie beside the channels that they turn: one load of the same shape, from cache for all heads.

        row     k k k k k k k k k k k k k k  (a b) (a b)       k kept, (a b) turned
        turn    . . . . . . . . . . . . . .  (c s) (c s)       (a c - b s, a s + b c)

    The gradient of a turn is the turn back, by the same kernel.

Shapes
    x [T, ..., H] with any strides, turn complex64 [T, H_rot/2] -> [T, ..., H] of x's dtype.

Units
    4 bytes per bfloat16 channel, kept ones included, and 8 per pair and token; 3 operations per turned
    channel.

Errors
    ValueError names a turn that does not fit.  float64, odd widths and a turn that requires a gradient are
    refused.

Source
    kernels.md 1.1; model.md 3.5.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dskit import ops
from dskit.kernels import common
from dskit.kernels.common import cdiv, ld, narrow, pow2, refuse, require, rows_of, too_wide, tuned, up_to

# elements of a call -> elements of a lane, warps of a program.  Interpreted, programs cost most.
CONFIGS = {1 << 19: {"lane": 8, "num_warps": 4}, 1 << 22: {"lane": 16, "num_warps": 4},
           1 << 62: {"lane": 32, "num_warps": 4}}
if common.INTERPRET:
    CONFIGS = {1 << 62: {"lane": 32, "num_warps": 4}}
CANDIDATES = {"rope.rotate": tuple({"lane": lane, "num_warps": warps} for warps in (1, 2, 4, 8)
                                   for lane in (8, 16, 32))}


@triton.jit
def _rope_rotate_kernel(x_ptr, stride_x, turn_ptr, y_ptr, rows, HEADS: tl.constexpr, WIDTH: tl.constexpr,
                        TURNED: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < WIDTH)
    turned = mask & (col >= WIDTH - TURNED)
    token, row = (row // HEADS).to(tl.int64), row.to(tl.int64)
    x = ld(x_ptr + row * stride_x + col, mask)
    turn = ld(turn_ptr + token * TURNED + (col - (WIDTH - TURNED)), turned)
    a, b = tl.split(x.reshape(ROWS, BLOCK // 2, 2))
    c, s = tl.split(turn.reshape(ROWS, BLOCK // 2, 2))
    if INVERSE:
        s = -s
    y = tl.interleave(a * c - b * s, a * s + b * c)
    tl.store(y_ptr + row * WIDTH + col, narrow(tl.where(turned, y, x), y_ptr.dtype.element_ty), mask=mask)


def _rotate(x: Tensor, turn_T: Tensor, inverse: bool) -> Tensor:
    tokens, width, turned = x.shape[0], x.shape[-1], 2 * turn_T.shape[-1]
    require(turn_T.shape[:-1] == (tokens,), "turn_T", f"must be [{tokens}, pairs], a row for each of x")
    require(turned <= width, "turn_T", f"turns {turned} channels; x has {width}")
    rows = rows_of(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        config = tuned("rope.rotate", (len(rows), width), up_to(CONFIGS, x.numel()))
        block = pow2(max(2, width))
        tile = max(1, 32 * config["num_warps"] * config["lane"] // block)
        _rope_rotate_kernel[(cdiv(len(rows), tile),)](
            rows, rows.stride(0), torch.view_as_real(turn_T.resolve_conj()).contiguous(), y, len(rows),
            len(rows) // tokens, width, turned, inverse, tile, block,
            num_warps=config["num_warps"])
    return y


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, turn_T, inverse):
        ctx.save_for_backward(turn_T)
        ctx.inverse = inverse
        return _rotate(x, turn_T, inverse)

    @staticmethod
    def backward(ctx, grad):
        (turn_T,) = ctx.saved_tensors
        return _rotate(grad, turn_T, not ctx.inverse), None, None


def _refused(x: Tensor, turn_T: Tensor, inverse: bool = False) -> str | None:
    if turn_T.requires_grad:
        return "it gives no gradient to turn_T"
    if x.shape[-1] % 2:
        return f"pairs of channels must start at even ones, and x has {x.shape[-1]}"
    return too_wide(x) or refuse(x, turn_T)


@ops.implement("rope.rotate", "triton", when=_refused, grad=True)
def rotate(x: Tensor, turn_T: Tensor, inverse: bool = False) -> Tensor:
    """Turn the last channels of x [T, ..., H] by its rows' angles; `inverse` turns back."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Turn.apply(x, turn_T, inverse)
    return _rotate(x, turn_T, inverse)
