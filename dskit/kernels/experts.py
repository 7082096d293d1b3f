"""The routed experts' two products, weights read as they are stored: MXFP4, FP8, or plain bfloat16.

Idea
    Few tokens meet each expert, so the weights are what moves, and what must be restored as fast as memory
    delivers it.  The product is therefore transposed: a tile of weight rows is the left operand, restored in
    registers (operands.py), and the tokens of one expert are the right one, 16 wide where they are few.

        numbers    any weights in bfloat16, tokens laid out beforehand as codes come out of their words
        codes      MXFP4 in e4m3, on an FP8 tensor core: a row's group scales are folded into its codes, a
                   token has one scale.  Its sums are less exact, and so for the second product alone, whose
                   answers are not rounded to few bits once more, or where `numerics.token` allows it
        windows    the same with each token twice: integers, whose sums are nearly exact, and what they leave
        further    a tile of 64 tokens and 16 more share what was restored: an expert that 64 tokens meet on
                   average is met by 80 at most, nearly always; on Hopper such tiles are grouped.py's
        up         rows of gate over rows of up in one tile, so that clamp, SiLU, routing weight, both
                   roundings and the 1x32 scale are the epilogue; writes h, quantised and restored (V4's
                   groups of 128 features take a launch more)
        down       the second product, a row for each token and expert; `combine` adds them in slot order

    Which tokens meet which rows is counted on the device: `moe.plan` sorts, `_tiles_kernel` cuts every
    expert's rows into tiles; of few slots both are one launch.  The grid holds the most tiles there can be;
    what is over returns at once.  A token alone needs neither: its J slots are the tiles.

Shapes
    As in layers/moe.py: x_TD, topk_TJ, weight_TJ; w13 [E, 2I, D], w2 [E, D, I] in codes.

Units
    Bytes at E = 384, D = 5120, I = 2304, J = 6: 18.8 MB for each expert that is met (35.4 MB in FP8), and per
    token and m tile its row, from L2.

Errors
    ValueError names an argument whose shape does not fit; widths that are no multiple of a group are refused.

Numerics
    Both operands are exact, sums are float32; but an FP8 tensor core adds a step's 256 products up itself,
    which is off by 7e-4 of an answer's size, measured on an H200.  In the first product that moves roundings
    of h, and the op is off by 4e-3; with windows by 1.1e-3 to 1.6e-3.  `codes` after `numbers` are off by
    1.3e-3, after windows by 1.9e-3, which is too much; so is rounding h by groups of 128 after windows, off
    by 2.0e-3.  A row with few numbers far above all others leaves its first window nearly empty: it is as
    exact as with `codes`.  A row's bits do not depend on the rows beside it when the tiles do not (`steady`).

Source
    kernels.md 1.8, 2.3; model.md 3.11.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dskit import ops
from dskit.kernels import linear, moe, operands
from dskit.kernels.common import (
    cdiv,
    dot,
    from_e2m1,
    from_e8m0,
    layout,
    narrow,
    pow2,
    refuse,
    require,
    restored,
    tuned,
    up_to,
)

Experts = Any  # of layers/linear.py: a kernel file knows a layer by its attributes alone
Numerics = Any


def _config(way: str, tokens: int, features: int, step: int, warps: int, stages: int, more: int = 0,
            registers: int | None = None, groups: int = 0) -> dict[str, int | str | None]:
    """Operands; tokens of a tile and more; weight rows (half of gate, half of up); channels of a step; the
    most registers of a thread, where one more program at a time gains more than spilling costs; how many
    groups of warps multiply beside one that brings (grouped.py), 0: each warp does both.
    """
    return {"way": way, "tokens": tokens, "more": more, "features": features, "step": step,
            "num_warps": warps, "num_stages": stages, "maxnreg": registers, "groups": groups}


def _grouped(way: str, stages: int) -> dict[str, int | str | None]:
    """Tiles of grouped.py."""
    return _config(way, 64, 192, 256, 4, stages, more=16, groups=3)


# most rows that an expert has on average, rounded down -> its tiles; few tokens are many small programs
CONFIGS = {0: _config("numbers", 16, 64, 256, 4, 4), 10: _config("numbers", 16, 128, 128, 4, 4),
           24: _config("numbers", 32, 128, 128, 4, 4), 96: _config("numbers", 64, 128, 128, 4, 3),
           1 << 62: _config("numbers", 128, 128, 128, 8, 3)}
# the same of MXFP4 where a tensor core takes e4m3
FEW = _config("windows", 8, 64, 256, 4, 4, registers=128)
EXACT = _config("numbers", 8, 64, 256, 4, 4)  # in place of windows before groups of more than WIDEST
SOME = _config("codes", 16, 64, 256, 4, 4, registers=128)
MANY = {"numbers": _grouped("numbers", 3), "codes": _grouped("codes", 4)}
MXFP4 = {"up": {4: FEW, 24: _config("numbers", 16, 64, 256, 4, 4), 1 << 62: MANY["numbers"]},
         "down": {4: FEW, 24: SOME, 1 << 62: MANY["codes"]}}
TOKEN = {24: SOME, 1 << 62: MANY["codes"]}
OTHERWISE = {"numbers": _config("numbers", 64, 128, 128, 4, 3, more=16),
             "codes": _config("codes", 64, 64, 256, 4, 3, more=16)}  # where grouped.py cannot
WINDOWS = {"numbers": 1, "codes": 1, "windows": 2}
WIDEST = 32  # group of features that a tile rounds as it is written
NARROW = 16  # tokens of the narrowest operand: what is left of an expert's rows is mostly less
TRIED = (*MXFP4["up"].values(), *TOKEN.values(), *OTHERWISE.values(), EXACT)
TRIED_TOKEN = (*TOKEN.values(), OTHERWISE["codes"], _config("codes", 16, 64, 256, 4, 3, registers=128))
CANDIDATES = {"moe.experts/up": TRIED, "moe.experts/down": TRIED,
              "moe.experts/up_token": TRIED_TOKEN, "moe.experts/down_token": TRIED_TOKEN}


# ---- which tokens meet which rows --------------------------------------------------------------------------

@triton.jit
def _tiles_kernel(end_ptr, tile_ptr, E, BLOCK_N: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """(expert, first row, last row + 1, 0) of each tile of up to BLOCK_N rows; expert E: no such tile."""
    e = tl.arange(0, BINS)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(end_ptr + e, mask=e < E, other=0)
    begin = tl.load(end_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
    tiles = tl.where(e < E, tl.cdiv(end - begin, BLOCK_N), 0)
    before = tl.cumsum(tiles, axis=0)
    expert = tl.sum((before[None, :] <= tile[:, None]).to(tl.int32), axis=1)
    at = tl.minimum(expert, BINS - 1)
    row = tl.gather(begin, at, 0) + (tile - tl.gather(before - tiles, at, 0)) * BLOCK_N
    tl.store(tile_ptr + 4 * tile, tl.minimum(expert, E))
    tl.store(tile_ptr + 4 * tile + 1, row)
    tl.store(tile_ptr + 4 * tile + 2, tl.minimum(row + BLOCK_N, tl.gather(end, at, 0)))
    tl.store(tile_ptr + 4 * tile + 3, 0)


# ---- the products ------------------------------------------------------------------------------------------

@triton.jit
def _ahead(row_ptr, step, WIDTH: tl.constexpr, END: tl.constexpr):
    """Of rows [rows, 1] of END elements those of one step, [rows, WIDTH]; zeros beyond the end."""
    at = step * WIDTH + tl.arange(0, WIDTH)[None, :]
    if END % WIDTH == 0:
        return tl.load(row_ptr + at)
    else:
        return tl.load(row_ptr + at, mask=at < END, other=0)


@triton.jit
def _read(w_row, s_row, step, K: tl.constexpr, STEP: tl.constexpr, CODES: tl.constexpr,
          SCALE_K: tl.constexpr):
    """(words [rows, words], scale bytes [rows, groups]) of one step."""
    words = _ahead(w_row, step, STEP // CODES, K // CODES)
    return words, _ahead(s_row, step, STEP // SCALE_K, K // SCALE_K)


@triton.jit
def _each(group, words):
    """What each word's group has, [rows, words]."""
    each: tl.constexpr = words.shape[1] // group.shape[1]
    return group[:, :, None].broadcast_to(group.shape[0], group.shape[1], each).reshape(words.shape)


@triton.jit
def _activated(acc, weight, limit, LIMITED: tl.constexpr, GROUP: tl.constexpr):
    """The input of w2 [features, tokens] from gate rows over up rows: rounded, and quantised by groups."""
    pair = narrow(acc, tl.bfloat16).to(tl.float32).reshape(2, acc.shape[0] // 2, acc.shape[1])
    gate, linear = tl.split(pair.permute(1, 2, 0))
    gate, linear = moe._clamped(gate, linear, limit, LIMITED)
    hidden = narrow(gate * moe._sigmoid(gate) * linear * weight[None, :], tl.bfloat16).to(tl.float32)
    if GROUP > 0:
        groups = hidden.reshape(hidden.shape[0] // GROUP, GROUP, hidden.shape[1])
        hidden = restored(groups, "fp8").reshape(hidden.shape[0], hidden.shape[1])
    return hidden


@triton.jit
def _tokens(x_ptr, order_ptr, begin, end, J: tl.constexpr, WIDE: tl.constexpr, UP: tl.constexpr,
            WIDTH: tl.constexpr, WINDOWS: tl.constexpr):
    """Of rows from `begin` on: (whether there are such, their slots, their tokens; of every window of each
    whether there is one, and its first channel [1, WINDOWS * WIDTH]).
    """
    row = begin + tl.arange(0, WIDTH)
    inside = row < end
    slot = row
    if order_ptr is not None:
        slot = tl.load(order_ptr + row, mask=inside, other=0)
    token = slot // J if UP else row
    window = token.to(tl.int64)[None, :] * WINDOWS + tl.arange(0, WINDOWS)[:, None]
    shown = inside[None, :].broadcast_to(WINDOWS, WIDTH)
    x_row = x_ptr + window.reshape(1, WINDOWS * WIDTH) * WIDE
    return inside, slot, token, shown.reshape(1, WINDOWS * WIDTH), x_row


@triton.jit
def _times(w, x_row, shown, channel, acc):
    """acc + w times the tokens' channels from `channel` on."""
    k = channel + tl.arange(0, w.shape[1])[:, None]
    return dot(w, tl.load(x_row + k, mask=shown, other=0.0), acc)


@triton.jit
def _by_numbers(w_row, s_row, x_row, shown, x_row2, shown2, acc, acc2, K: tl.constexpr, CODES: tl.constexpr,
                SCALE_K: tl.constexpr, STEP: tl.constexpr, MORE: tl.constexpr):
    """Sums over K in products of bfloat16; of MORE tokens too, for which nothing is restored again."""
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    HALF: tl.constexpr = STEP // 2
    if CODES == 1:
        for step in range(STEPS):
            w = _ahead(w_row, step, STEP, K)
            acc = _times(w, x_row, shown, step * STEP, acc)
            if MORE > 0:
                acc2 = _times(w, x_row2, shown2, step * STEP, acc2)
    else:
        for step in range(STEPS):
            words, byte = _read(w_row, s_row, step, K, STEP, CODES, SCALE_K)
            byte = _each(byte, words)
            for half in tl.static_range(2):
                w = operands.numbers(words, byte, CODES, half)
                acc = _times(w, x_row, shown, step * STEP + half * HALF, acc)
                if MORE > 0:
                    acc2 = _times(w, x_row2, shown2, step * STEP + half * HALF, acc2)
    if CODES > 1:
        acc *= 18446744073709551616.0  # 2^64
        acc2 *= 18446744073709551616.0
    return acc, acc2


@triton.jit
def _add(words, shift, x_row, shown, channel, acc):
    """acc + the products of one step, which the tensor core adds up before float32 takes over."""
    return acc + _times(operands.codes(words, shift), x_row, shown, channel, tl.zeros_like(acc))


@triton.jit
def _by_folding(w_row, s_row, x_row, shown, x_row2, shown2, acc, acc2, K: tl.constexpr, STEP: tl.constexpr,
                MORE: tl.constexpr):
    """Sums over K, beside the tokens' scales: a row's group scales are folded into its codes, relative to its
    first one.  Whether all were near enough is known at the end; if not, each group is a product of its own,
    the other groups' codes zero.
    """
    SPAN: tl.constexpr = operands.SPAN
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    first = tl.load(s_row).to(tl.int32)
    furthest = tl.where(first > 254 - SPAN, 255, 0).to(tl.uint32).broadcast_to(s_row.shape[0], STEP // 32)
    for step in range(STEPS):
        words, byte = _read(w_row, s_row, step, K, STEP, 8, 32)
        shift = byte.to(tl.int32) - (first - SPAN // 2)
        if K % STEP != 0:  # zeros beyond the end are no scales
            shift = tl.where(step * (STEP // 32) + tl.arange(0, STEP // 32)[None, :] < K // 32, shift, 0)
        furthest = tl.maximum(furthest, shift.to(tl.uint32))
        shift = _each(shift, words)
        acc = _add(words, shift, x_row, shown, step * STEP, acc)
        if MORE > 0:
            acc2 = _add(words, shift, x_row2, shown2, step * STEP, acc2)
    acc, acc2 = acc * from_e8m0(first), acc2 * from_e8m0(first)
    if tl.max(tl.max(furthest, axis=1), axis=0) > SPAN:
        acc, acc2 = tl.zeros_like(acc), tl.zeros_like(acc2)
        group = tl.arange(0, STEP // 8)[None, :] // 4
        for step in range(STEPS):
            words, _ = _read(w_row, s_row, step, K, STEP, 8, 32)
            for g in range(tl.minimum(STEP // 32, K // 32 - step * (STEP // 32))):
                one = tl.where(group == g, words, 0)
                even = tl.zeros_like(one) + SPAN // 2
                scale = from_e8m0(tl.load(s_row + (step * (STEP // 32) + g)))
                acc += scale * _add(one, even, x_row, shown, step * STEP, tl.zeros_like(acc))
                if MORE > 0:
                    acc2 += scale * _add(one, even, x_row2, shown2, step * STEP, tl.zeros_like(acc2))
    return acc, acc2


@triton.jit
def _joined(acc, WINDOWS: tl.constexpr):
    """Sums of both windows of each token -> of the token."""
    if WINDOWS == 2:
        high, low = tl.split(acc.reshape(acc.shape[0], 2, acc.shape[1] // 2).permute(0, 2, 1))
        acc = high + low * operands.LOWER
    return acc


@triton.jit
def _answer(acc, y_ptr, weight_ptr, begin, inside, slot, first, N, limit, UP: tl.constexpr,
            LIMITED: tl.constexpr, GROUP: tl.constexpr):
    """Write a tile, up: activated."""
    m = first + tl.arange(0, acc.shape[0] // 2 if UP else acc.shape[0])
    written = inside[None, :] & (m < N)[:, None]
    if UP:
        acc = _activated(acc, tl.load(weight_ptr + slot, mask=inside, other=0.0), limit, LIMITED, GROUP)
    row = begin + tl.arange(0, acc.shape[1])
    y_ptr += row.to(tl.int64)[None, :] * N + m[:, None]
    tl.store(y_ptr, narrow(acc, tl.bfloat16), mask=written)


@triton.jit
def _product(x_ptr, xs_ptr, w_ptr, s_ptr, order_ptr, weight_ptr, y_ptr, expert, begin, end, N, limit,
             WIDTH: tl.constexpr, MORE: tl.constexpr, K: tl.constexpr, J: tl.constexpr,
             CODES: tl.constexpr, SCALE_N: tl.constexpr, SCALE_K: tl.constexpr, UP: tl.constexpr,
             LIMITED: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, BLOCK_M: tl.constexpr,
             WINDOWS: tl.constexpr):
    """A tile of one expert's weight rows times its tokens at rows begin .. end: WIDTH of them, and MORE."""
    WIDE: tl.constexpr = (K + STEP - 1) // STEP * STEP
    ROWS: tl.constexpr = BLOCK_M // 2 if UP else BLOCK_M
    first = tl.program_id(0) * ROWS
    r = tl.arange(0, BLOCK_M)
    feature = tl.minimum(first + r % ROWS, N - 1) + r // ROWS * N
    feature += expert * (2 * N if UP else N)
    w_row = w_ptr + feature[:, None] * (K // CODES)
    s_row = w_row if s_ptr is None else s_ptr + (feature // SCALE_N)[:, None] * (K // SCALE_K)
    inside, slot, token, shown, x_row = _tokens(x_ptr, order_ptr, begin, end, J, WIDE, UP, WIDTH, WINDOWS)
    acc = tl.zeros((BLOCK_M, WINDOWS * WIDTH), tl.float32)
    inside2, shown2, x_row2, acc2 = inside, shown, x_row, acc
    if MORE > 0:
        inside2, slot2, token2, shown2, x_row2 = _tokens(x_ptr, order_ptr, begin + WIDTH, end, J, WIDE, UP,
                                                         MORE, WINDOWS)
        acc2 = tl.zeros((BLOCK_M, WINDOWS * MORE), tl.float32)
    if xs_ptr is None:
        acc, acc2 = _by_numbers(w_row, s_row, x_row, shown, x_row2, shown2, acc, acc2, K, CODES, SCALE_K,
                                STEP, MORE)
    else:
        acc, acc2 = _by_folding(w_row, s_row, x_row, shown, x_row2, shown2, acc, acc2, K, STEP, MORE)
        acc = _joined(acc, WINDOWS) * tl.load(xs_ptr + token, mask=inside, other=0.0)[None, :]
        if MORE > 0:
            acc2 = _joined(acc2, WINDOWS) * tl.load(xs_ptr + token2, mask=inside2, other=0.0)[None, :]
    _answer(acc, y_ptr, weight_ptr, begin, inside, slot, first, N, limit, UP, LIMITED, GROUP)
    if MORE > 0:
        _answer(acc2, y_ptr, weight_ptr, begin + WIDTH, inside2, slot2, first, N, limit, UP, LIMITED, GROUP)


@triton.jit
def _product_kernel(x_ptr, xs_ptr, w_ptr, s_ptr, tile_ptr, order_ptr, weight_ptr, y_ptr, N, E, limit,
                    K: tl.constexpr, J: tl.constexpr, CODES: tl.constexpr, SCALE_N: tl.constexpr,
                    SCALE_K: tl.constexpr, UP: tl.constexpr, LIMITED: tl.constexpr, GROUP: tl.constexpr,
                    STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MORE: tl.constexpr,
                    NARROW: tl.constexpr, WINDOWS: tl.constexpr):
    """One program: BLOCK_M weight rows and up to BLOCK_N + MORE tokens; few take a narrower operand.

    Up: half the rows are m of gate, half N + m of up; activated; tokens by `order`.  Down: rows m, plain.
    Rows beyond the last repeat it, unwritten.
    """
    if order_ptr is None:  # a token alone: tiles are its slots
        begin = tl.program_id(1)
        expert = tl.load(tile_ptr + begin).to(tl.int64)
        _product(x_ptr, xs_ptr, w_ptr, s_ptr, order_ptr, weight_ptr, y_ptr, expert, begin, begin + 1, N,
                 limit, NARROW, 0, K, J, CODES, SCALE_N, SCALE_K, UP, LIMITED, GROUP, STEP, BLOCK_M, WINDOWS)
    else:
        tile_ptr += 4 * tl.program_id(1)
        expert = tl.load(tile_ptr).to(tl.int64)
        begin, end = tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
        if expert < E:
            if end - begin <= NARROW:
                _product(x_ptr, xs_ptr, w_ptr, s_ptr, order_ptr, weight_ptr, y_ptr, expert, begin, end, N,
                         limit, NARROW, 0, K, J, CODES, SCALE_N, SCALE_K, UP, LIMITED, GROUP, STEP, BLOCK_M,
                         WINDOWS)
            elif end - begin <= BLOCK_N:
                if BLOCK_N > NARROW:
                    _product(x_ptr, xs_ptr, w_ptr, s_ptr, order_ptr, weight_ptr, y_ptr, expert, begin, end, N,
                             limit, BLOCK_N, 0, K, J, CODES, SCALE_N, SCALE_K, UP, LIMITED, GROUP, STEP,
                             BLOCK_M, WINDOWS)
            elif MORE > 0:
                _product(x_ptr, xs_ptr, w_ptr, s_ptr, order_ptr, weight_ptr, y_ptr, expert, begin, end, N,
                         limit, BLOCK_N, MORE, K, J, CODES, SCALE_N, SCALE_K, UP, LIMITED, GROUP, STEP,
                         BLOCK_M, WINDOWS)


@triton.jit
def _again_kernel(x_ptr, xs_ptr, w_ptr, s_ptr, tile_ptr, order_ptr, weight_ptr, y_ptr, N, limit,
                  K: tl.constexpr, UP: tl.constexpr, LIMITED: tl.constexpr, GROUP: tl.constexpr,
                  STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile of grouped.py whose weights' scales are too far apart to be folded: each group a product."""
    tile_ptr += 4 * tl.program_id(0)
    if tl.load(tile_ptr + 3) != 0:
        expert = tl.load(tile_ptr).to(tl.int64)
        begin, end = tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
        ROWS: tl.constexpr = BLOCK_M // 2 if UP else BLOCK_M
        row, r, channel = begin + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, 32)
        inside = row < end
        slot = tl.load(order_ptr + row, mask=inside, other=0)
        for first in range(tl.program_id(1) * ROWS, N, tl.num_programs(1) * ROWS):
            feature = tl.minimum(first + r % ROWS, N - 1) + r // ROWS * N
            feature += expert * (2 * N if UP else N)
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for group in range(K // 32):
                word = tl.load(w_ptr + feature[:, None] * (K // 8) + group * 4 + channel[None, :] // 8)
                w = narrow(from_e2m1(word >> channel[None, :] % 8 * 4 & 15), tl.bfloat16)
                at = operands.place(group * 32 + channel, STEP)[:, None]
                x = tl.load(x_ptr + row[None, :].to(tl.int64) * K + at, mask=inside[None, :])
                scale = from_e8m0(tl.load(s_ptr + feature * (K // 32) + group))
                acc += scale[:, None] * dot(w, narrow(x.to(tl.float32), tl.bfloat16), tl.zeros_like(acc))
            acc *= tl.load(xs_ptr + row, mask=inside, other=0.0)[None, :]
            _answer(acc, y_ptr, weight_ptr, begin, inside, slot, first, N, limit, UP, LIMITED, GROUP)


# ---- on the host -------------------------------------------------------------------------------------------

def _layout(weight: Experts) -> tuple[int, int, int]:
    """(codes of a word, rows and channels of a scale's block) of a stack of experts; plain numbers: ones."""
    if weight.scale is None:
        return 1, 1, 16
    return (8, 1, 32) if weight.fmt == "fp4" else (4, *weight.block)


def _stored(weight: Experts) -> tuple[Tensor, Tensor | None]:
    """A stack's words and scale bytes, as they lie."""
    if weight.scale is None:
        return weight.weight, None
    return weight.weight.view(torch.int32), weight.scale.view(torch.uint8)


def _plan(topk_TJ: Tensor, E: int, first: int, tokens: int, tokens2: int) -> tuple[Tensor, ...]:
    """(order, place, end) of moe.plan, and tiles of so many tokens for each product."""
    R, same = topk_TJ.numel(), tokens2 == tokens
    if R <= moe.FEW:
        tile, tile2 = torch.empty(2, R, 4, dtype=torch.int32, device=topk_TJ.device)
        _, *plan = moe._planned(topk_TJ, E, first, tile, tokens, None if same else tile2, tokens2)
        return *plan, tile, tile if same else tile2
    _, *plan, end = moe.plan(topk_TJ, E, first)
    tile = _tiles(end, R, tokens)
    return *plan, end, tile, tile if same else _tiles(end, R, tokens2)


def _tiles(end_E: Tensor, rows: int, tokens: int) -> Tensor:
    """[most tiles there can be, 4] int32: expert, first row, last row + 1, whether to do it again."""
    E = len(end_E)
    block = 32
    count = cdiv(min(rows, E + rows // tokens), block) * block
    tile = torch.empty(count, 4, dtype=torch.int32, device=end_E.device)
    _tiles_kernel[(count // block,)](end_E, tile, E, tokens, max(32, pow2(E + 1)), block)
    return tile


def _operands(x: Tensor, weight: Experts, config: dict, place: Tensor | None = None,
              rows: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Tokens as a product reads them, and their scales where weights' scales are folded."""
    wide = config["groups"] > 0
    if config["way"] == "numbers":
        return operands.spread(x, _layout(weight)[0], config["step"], wide, place, rows), None
    return operands.folded(x, config["step"], WINDOWS[config["way"]], wide, place, rows)


def _configuration(part: str, rows: int, each: int, weight: Experts, features: int,
                   group: int, numerics: Numerics, coarse: bool = False) -> dict[str, int]:
    """A product's tiles for so many rows, `each` of an expert, cut to what its widths and groups allow;
    coarse: its answers are rounded by groups so wide that they have to be exact.
    """
    name, table, codes = f"moe.experts/{part}", CONFIGS, _layout(weight)[0]
    if numerics.token:
        name, table = f"{name}_token", TOKEN
    elif codes == 8 and group <= 64 and not numerics.steady and not refuse(weight.weight, sm=90):
        table = MXFP4[part]
    config = up_to(table, 16 if numerics.steady else each)
    if not numerics.steady:
        config = tuned(name, (rows, weight.experts, features, weight.in_features, codes), config)
    if coarse and config["way"] == "windows":
        config = EXACT
    if config["groups"]:
        from dskit.kernels import grouped  # which is not interpreted

        config = config if grouped.takes(weight, group) else OTHERWISE[config["way"]]
    if config["way"] != "numbers" or config["groups"]:
        return config
    step = min(config["step"], max(64, 32 * codes))
    while step > 16 * codes and weight.in_features % step:  # a tensor core takes 16 words
        step //= 2
    return {**config, "features": max(group, min(config["features"], pow2(features))), "step": step}


def _multiply(x: Tensor, xs: Tensor | None, weight: Experts, config: dict[str, int], tile: Tensor, rows: int,
              J: int, order: Tensor | None, up: tuple | None) -> Tensor:
    """[rows, N] bfloat16: h when `up` = (weight_TJ, limit, group)."""
    codes, scale_n, scale_k = _layout(weight)
    words, scale = _stored(weight)
    share, limit, group = up or (None, 0.0, 1)
    N = weight.out_features // 2 if up else weight.out_features
    y = torch.empty(rows, N, dtype=torch.bfloat16, device=x.device)
    if config["groups"]:
        from dskit.kernels import grouped

        grouped.multiply(x, xs, words, scale, tile, order, up, y, config["num_stages"])
        if xs is not None:
            _again_kernel[len(tile), 8](
                x, xs, words, scale, tile, order, share, y, N, limit, weight.in_features, up is not None,
                limit > 0, group, config["step"], 64, pow2(config["tokens"] + config["more"]))
        return y
    grid = (cdiv(weight.out_features, config["features"]), len(tile))
    _product_kernel[grid](
        x, xs, words, scale, tile, order, share, y, N, weight.experts, limit, weight.in_features, J, codes,
        scale_n, scale_k, up is not None, limit > 0, group, config["step"], config["features"],
        config["tokens"], config["more"], min(NARROW, config["tokens"]), WINDOWS[config["way"]],
        num_warps=config["num_warps"], num_stages=config["num_stages"], maxnreg=config["maxnreg"])
    return y


@ops.implement("moe.experts", "triton", when=lambda *args, **kwargs: _unfit(*args, **kwargs))
def experts(x_TD: Tensor, topk_TJ: Tensor, weight_TJ: Tensor, shared_TD: Tensor | None, w13: Experts,
            w2: Experts, limit: float, numerics: Numerics, part: tuple[int, int] | None = None) -> Tensor:
    """Each token's experts and the shared expert's answer, [T, D], in two grouped products."""
    (T, D), J, I = x_TD.shape, topk_TJ.shape[1], w2.in_features
    require(topk_TJ.shape == weight_TJ.shape and len(topk_TJ) == T, "topk_TJ",
            f"is {tuple(topk_TJ.shape)}, weight_TJ {tuple(weight_TJ.shape)}, and there are {T} tokens")
    require(w13.in_features == D and w13.out_features == 2 * I and w2.out_features == D, "w13",
            f"is {w13.out_features} x {w13.in_features}, w2 {w2.out_features} x {I}; x_TD has {D} channels")
    if not T:
        return x_TD.new_empty(0, D, dtype=numerics.dtype)
    group = 0 if numerics.token else layout(numerics.activation_format)[1]
    coarse = group > WIDEST  # a tile would hold too many features: rounded in a launch of its own
    group = 0 if coarse else group
    each = T * J // max(part[1] if part else 0, w13.experts)
    up = _configuration("up", T, each, w13, 2 * I, 2 * group, numerics, coarse)
    down = _configuration("down", T, each, w2, D, 1, numerics)
    order, place, tile, tile2, rows = None, None, topk_TJ[0], topk_TJ[0], None
    if T > 1 or part:
        widths = [config["tokens"] + config["more"] for config in (up, down)]
        order, place, end, tile, tile2 = _plan(topk_TJ, w13.experts, part[0] if part else 0, *widths)
        rows = end[-1:] if part else None
    laid_out = (place, rows) if up["groups"] else ()
    h = _multiply(*_operands(x_TD, w13, up, *laid_out), w13, up, tile, T * J, J, order,
                  (weight_TJ.contiguous(), limit, group))
    if coarse:
        h = linear.quantize(h, numerics.activation_format, h.dtype)
    y = _multiply(*_operands(h, w2, down, None, rows), w2, down, tile2, T * J, 1, order, None)
    return moe._collect(y, place, shared_TD, numerics.dtype, rows)


def _unfit(x_TD: Tensor, topk_TJ: Tensor, weight_TJ: Tensor, shared_TD: Tensor | None, w13: Experts,
           w2: Experts, limit: float, numerics: Numerics, part: tuple[int, int] | None = None) -> str | None:
    """Why the kernels cannot take these arguments, or None."""
    if not numerics.release:
        return f"it rounds as the release does; numerics are {numerics.name!r}"
    for name, weight in (("w13", w13), ("w2", w2)):
        codes, rows, channels = _layout(weight)
        if codes == 1 and weight.weight.dtype != torch.bfloat16:
            return f"{name} holds {weight.weight.dtype}; it reads codes as stored, or bfloat16"
        if weight.in_features % channels:
            return f"{name} has {weight.in_features} input channels, no multiple of {channels}"
        if w2.in_features % rows:
            return f"w13's gate and up share a block of {rows} scales: {w2.in_features} rows each"
        if numerics.token and (codes != 8 or refuse(weight.weight, sm=90)):
            reason = refuse(x_TD, sm=90) or f"{name} is {weight.fmt}"
            return f"one scale a token needs MXFP4 and an FP8 tensor core: {reason}"
    if w2.in_features % layout(numerics.activation_format)[1]:
        return f"w2's {w2.in_features} channels are no multiple of {numerics.activation_format}'s group"
    return refuse(x_TD)
