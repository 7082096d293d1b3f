"""The routed experts' two products, weights read as they are stored: MXFP4, FP8, or plain bfloat16.

Idea
    Few tokens meet each expert, so the weights are what moves, and what must be restored as fast as memory
    delivers it.  The product is therefore transposed: a tile of weight rows is the left operand, restored in
    registers, where a tensor core takes it from, and the tokens of one expert are the right one, 16 wide
    where they are few.

        words      32 bits hold P codes of one row, neighbours along K: 8 of e2m1, 4 of e4m3
        restoring  code i of two words becomes a pair of bfloat16 by shifts, masks and one multiplication
                   by the group's scale: exact, subnormals too, 2.5 operations a code
        order      all first codes, then all second ones: inside a step K is walked as they come out of the
                   words; the tokens are laid out likewise beforehand (`_spread_kernel`), h as it is written
        up         rows of gate over rows of up in one tile, so that clamp, SiLU, routing weight, both
                   roundings and the 1x32 scale are the epilogue; writes h, quantised and restored
        down       the second product, a row for each token and expert; `combine` adds them in slot order

    Which tokens meet which rows is counted on the device: `moe.plan` sorts, `_tiles_kernel` cuts every
    expert's rows into tiles.  The grid holds the most tiles there can be; what is over returns at once.
    A token alone needs neither: its J slots are the tiles.

Shapes
    As in layers/moe.py: x_TD, topk_TJ, weight_TJ; w13 [E, 2I, D], w2 [E, D, I] in codes.

Units
    Bytes at E = 384, D = 5120, I = 2304, J = 6: 18.8 MB for each expert that is met (35.4 MB in FP8), and per
    token and m tile its row, from L2.

Errors
    ValueError names an argument whose shape does not fit; widths that are no multiple of a group are refused.

Numerics
    Both operands are exact in bfloat16, sums are float32.  Weights are restored times 2^-64, so that the
    scales of any group from 2^-61 to 2^65 are exact in bfloat16; beyond, they end in zero or infinity.  An
    e4m3 NaN reads as 480.  A row's bits do not depend on the rows beside it when the tiles do not (`steady`).

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
from dskit.kernels import moe
from dskit.kernels.common import (
    INTERP,
    cdiv,
    dot,
    from_e2m1,
    from_e4m3,
    from_e8m0,
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

Experts = Any  # of layers/linear.py: a kernel file knows a layer by its attributes alone
Numerics = Any


def _config(tokens: int, features: int, step: int, warps: int, stages: int) -> dict[str, int]:
    """Tokens and weight rows of a tile (half of gate, half of up); channels of a step."""
    return {"tokens": tokens, "features": features, "step": step, "num_warps": warps, "num_stages": stages}


# most rows that an expert has on average, rounded down -> its tiles; few tokens are many small programs
CONFIGS = {0: _config(16, 64, 256, 4, 4), 10: _config(16, 128, 128, 4, 4), 24: _config(32, 128, 128, 4, 4),
           96: _config(64, 128, 128, 4, 3), 1 << 62: _config(128, 128, 128, 8, 3)}
NARROW = 16  # tokens of the narrowest operand: what is left of an expert's rows is mostly less
TRIED = (*CONFIGS.values(), _config(16, 128, 256, 4, 3), _config(16, 64, 128, 4, 4),
         _config(16, 128, 128, 4, 6), _config(16, 256, 128, 8, 4), _config(64, 256, 128, 8, 4),
         _config(64, 64, 128, 4, 4), _config(32, 256, 128, 8, 4))
CANDIDATES = {"moe.experts/up": TRIED, "moe.experts/down": TRIED}


# ---- restoring ---------------------------------------------------------------------------------------------

@triton.constexpr_function
def _restoring(codes, half):
    """PTX: the codes of one half of two words ($0.. out), each a pair of bfloat16, times the words' factors.

    The halves of both words are joined.  A code's sign goes to bit 15 and the rest of it to bit 6 (e2m1) or 4
    (e4m3) and above, where it is a subnormal or tiny bfloat16, which the multiplication makes right.
    """
    out = codes // 2
    lines = [".reg .b32 both, sign, size, zero, factors;", "mov.b32 zero, 0x80008000;",
             f"prmt.b32 factors, ${out + 2}, ${out + 3}, 0x5410;",
             f"prmt.b32 both, ${out}, ${out + 1}, {'0x7632' if half else '0x5410'};"]
    for i in range(out):
        if codes == 8:  # a nibble's two places by one product: times 2^12 and 2^6, without a carry
            lines += ["shr.b32 both, both, 8;"] * (i == 2)
            lines += [f"and.b32 size, both, {'0x00F000F0' if i % 2 else '0x000F000F'};",
                      f"mul.lo.u32 size, size, {'0x104' if i % 2 else '0x1040'};",
                      "and.b32 size, size, 0x81C081C0;"]
        else:
            lines += ["mov.b32 sign, both;", "shr.b32 size, both, 4;"] if i else [
                "shl.b32 sign, both, 8;", "shl.b32 size, both, 4;"]
            lines += ["and.b32 size, size, 0x07F007F0;", "lop3.b32 size, sign, zero, size, 0xEA;"]
        lines.append(f"fma.rn.bf16x2 ${i}, size, factors, zero;")  # lop3 0xEA: (sign & zero) | size
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def _constraints(codes):
    return ",".join(["=r"] * (codes // 2) + ["r"] * 4)


@triton.constexpr_function
def _lifted(codes):
    """What to add to an E8M0 byte for the exponent of the factor that a code's bits need, lowered."""
    return {8: 126, 4: 120}[codes] - 64


@triton.jit
def _beside(a, b):
    """[rows, n] and [rows, n] -> [rows, 2 n]: a matter of names, since each thread holds whole rows' ends."""
    return tl.join(a, b).permute(0, 2, 1).reshape(a.shape[0], 2 * a.shape[1])


@triton.jit
def _operand(words, byte, CODES: tl.constexpr, HALF: tl.constexpr):
    """The codes of one half of each word, [rows, CODES / 2 * words]: all first ones, then all second ones."""
    if INTERP:
        scale = from_e8m0(byte) * 5.421010862427522e-20  # 2^-64
        words = words >> (16 * HALF)
        if CODES == 8:
            low = _beside(from_e2m1(words & 15), from_e2m1(words >> 4 & 15))
            high = _beside(from_e2m1(words >> 8 & 15), from_e2m1(words >> 12 & 15))
            scale = _beside(scale, scale)
            return _beside(low * scale, high * scale)
        else:
            return _beside(from_e4m3((words & 255).to(tl.uint8)) * scale,
                           from_e4m3(((words >> 8) & 255).to(tl.uint8)) * scale)
    else:
        factor = tl.minimum(byte.to(tl.int32) + _lifted(CODES), 255) << 7  # a power of two in bfloat16
        if CODES == 8:
            a, b, c, d = tl.inline_asm_elementwise(
                _restoring(CODES, HALF), _constraints(CODES), [words, factor],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
            return _beside(_beside(a, b), _beside(c, d))
        else:
            a, b = tl.inline_asm_elementwise(_restoring(CODES, HALF), _constraints(CODES), [words, factor],
                                             dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
            return _beside(a, b)


# ---- which tokens meet which rows --------------------------------------------------------------------------

@triton.jit
def _tiles_kernel(end_ptr, tile_ptr, E, BLOCK_N: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """(expert, first row, last row + 1) of each tile of up to BLOCK_N rows; expert E: no such tile."""
    e = tl.arange(0, BINS)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(end_ptr + e, mask=e < E, other=0)
    begin = tl.load(end_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
    tiles = tl.where(e < E, tl.cdiv(end - begin, BLOCK_N), 0)
    before = tl.cumsum(tiles, axis=0)
    expert = tl.sum((before[None, :] <= tile[:, None]).to(tl.int32), axis=1)
    at = tl.minimum(expert, BINS - 1)
    row = tl.gather(begin, at, 0) + (tile - tl.gather(before - tiles, at, 0)) * BLOCK_N
    tl.store(tile_ptr + 3 * tile, tl.minimum(expert, E))
    tl.store(tile_ptr + 3 * tile + 1, row)
    tl.store(tile_ptr + 3 * tile + 2, tl.minimum(row + BLOCK_N, tl.gather(end, at, 0)))


@triton.jit
def _spread_kernel(x_ptr, out_ptr, stride_x, WIDE, D: tl.constexpr, CODES: tl.constexpr, STEP: tl.constexpr,
                   BLOCK: tl.constexpr):
    """Tokens in bfloat16, channels in the order in which their weights' codes come out of the words, zeros up
    to WIDE, the end of the last step.
    """
    WORDS: tl.constexpr = STEP // CODES
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = d // STEP * STEP + d % WORDS * CODES + d % STEP // WORDS
    x = ld(x_ptr + t * stride_x + channel, channel < D)
    tl.store(out_ptr + t * WIDE + d, narrow(x, tl.bfloat16), mask=d < WIDE)


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
    """(words [rows, words], each word's scale byte) of one step."""
    words = _ahead(w_row, step, STEP // CODES, K // CODES)
    byte = _ahead(s_row, step, STEP // SCALE_K, K // SCALE_K)
    byte = byte[:, :, None].broadcast_to(byte.shape[0], byte.shape[1], SCALE_K // CODES)
    return words, byte.reshape(words.shape[0], words.shape[1])


@triton.jit
def _activated(acc, weight, limit, LIMITED: tl.constexpr, GROUP: tl.constexpr):
    """The input of w2 [features, tokens] from gate rows over up rows: rounded, and quantised by groups."""
    pair = narrow(acc, tl.bfloat16).to(tl.float32).reshape(2, acc.shape[0] // 2, acc.shape[1])
    gate, linear = tl.split(pair.permute(1, 2, 0))
    gate, linear = moe._clamped(gate, linear, limit, LIMITED)
    hidden = narrow(gate * moe._sigmoid(gate) * linear * weight[None, :], tl.bfloat16).to(tl.float32)
    groups = hidden.reshape(hidden.shape[0] // GROUP, GROUP, hidden.shape[1])
    return restored(groups, "fp8").reshape(hidden.shape[0], hidden.shape[1])


@triton.jit
def _product(x_ptr, w_ptr, s_ptr, order_ptr, weight_ptr, y_ptr, expert, begin, end, N, stride_y, limit,
             WIDTH: tl.constexpr, K: tl.constexpr, J: tl.constexpr, CODES: tl.constexpr,
             SCALE_N: tl.constexpr, SCALE_K: tl.constexpr, UP: tl.constexpr, LIMITED: tl.constexpr,
             GROUP: tl.constexpr, NEXT_CODES: tl.constexpr, NEXT: tl.constexpr, STEP: tl.constexpr,
             BLOCK_M: tl.constexpr):
    """A tile of one expert's weight rows times its tokens at rows begin .. end, at most WIDTH of them."""
    row = begin + tl.arange(0, WIDTH)
    inside = row < end
    slot = row
    if order_ptr is not None:
        slot = tl.load(order_ptr + row, mask=inside, other=0)
    ROWS: tl.constexpr = BLOCK_M // 2 if UP else BLOCK_M
    first = tl.program_id(0) * ROWS
    r = tl.arange(0, BLOCK_M)
    feature = tl.minimum(first + r % ROWS, N - 1) + r // ROWS * N
    feature += expert * (2 * N if UP else N)
    w_row = w_ptr + feature[:, None] * (K // CODES)
    token = slot // J if UP else row
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    x_row = x_ptr + token.to(tl.int64)[None, :] * (STEPS * STEP)
    acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    if CODES == 1:
        x_row += tl.arange(0, STEP)[:, None]
        for step in range(STEPS):
            x = tl.load(x_row + step * STEP, mask=inside[None, :], other=0.0)
            acc = dot(_ahead(w_row, step, STEP, K), x, acc)
    else:
        x_row += tl.arange(0, STEP // 2)[:, None]
        s_row = s_ptr + (feature // SCALE_N)[:, None] * (K // SCALE_K)
        for step in range(STEPS):
            words, byte = _read(w_row, s_row, step, K, STEP, CODES, SCALE_K)
            for half in tl.static_range(2):
                x = tl.load(x_row + step * STEP + half * (STEP // 2), mask=inside[None, :], other=0.0)
                acc = dot(_operand(words, byte, CODES, half), x, acc)
        acc *= 18446744073709551616.0  # 2^64
    m = first + tl.arange(0, ROWS)
    out = acc
    if UP:
        out = _activated(acc, tl.load(weight_ptr + slot, mask=inside, other=0.0), limit, LIMITED, GROUP)
        m = m // NEXT * NEXT + m % NEXT_CODES * (NEXT // NEXT_CODES) + m % NEXT // NEXT_CODES
    written = inside[None, :] & (first + tl.arange(0, ROWS) < N)[:, None]
    y_ptr += row.to(tl.int64)[None, :] * stride_y + m[:, None]
    tl.store(y_ptr, narrow(out, tl.bfloat16), mask=written)


@triton.jit
def _product_kernel(x_ptr, w_ptr, s_ptr, tile_ptr, order_ptr, weight_ptr, y_ptr, N, E, stride_y, limit,
                    K: tl.constexpr, J: tl.constexpr, CODES: tl.constexpr, SCALE_N: tl.constexpr,
                    SCALE_K: tl.constexpr, UP: tl.constexpr, LIMITED: tl.constexpr, GROUP: tl.constexpr,
                    NEXT_CODES: tl.constexpr, NEXT: tl.constexpr, STEP: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NARROW: tl.constexpr):
    """One program: BLOCK_M weight rows and a tile of tokens, whose last few rows take a narrower operand.

    Up: half the rows are m of gate, half N + m of up; activated, laid out for a second product whose steps
    are NEXT channels; tokens by `order`.  Down: rows m, plain.  Rows beyond the last repeat it, unwritten.
    """
    if order_ptr is None:  # a token alone: tiles are its slots
        begin = tl.program_id(1)
        _product(x_ptr, w_ptr, s_ptr, order_ptr, weight_ptr, y_ptr, tl.load(tile_ptr + begin).to(tl.int64),
                 begin, begin + 1, N, stride_y, limit, NARROW, K, J, CODES, SCALE_N, SCALE_K, UP, LIMITED,
                 GROUP, NEXT_CODES, NEXT, STEP, BLOCK_M)
    else:
        tile_ptr += 3 * tl.program_id(1)
        expert = tl.load(tile_ptr).to(tl.int64)
        begin, end = tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
        if expert < E:
            if end - begin <= NARROW:
                _product(x_ptr, w_ptr, s_ptr, order_ptr, weight_ptr, y_ptr, expert, begin, end, N, stride_y,
                         limit, NARROW, K, J, CODES, SCALE_N, SCALE_K, UP, LIMITED, GROUP, NEXT_CODES, NEXT,
                         STEP, BLOCK_M)
            elif BLOCK_N > NARROW:
                _product(x_ptr, w_ptr, s_ptr, order_ptr, weight_ptr, y_ptr, expert, begin, end, N, stride_y,
                         limit, BLOCK_N, K, J, CODES, SCALE_N, SCALE_K, UP, LIMITED, GROUP, NEXT_CODES, NEXT,
                         STEP, BLOCK_M)


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


def _tiles(end_E: Tensor, rows: int, tokens: int) -> Tensor:
    """[most tiles there can be, 3] int32: expert, first row, last row + 1."""
    E = len(end_E)
    block = 32
    count = cdiv(min(rows, E + rows // tokens), block) * block
    tile = torch.empty(count, 3, dtype=torch.int32, device=end_E.device)
    _tiles_kernel[(count // block,)](end_E, tile, E, tokens, max(32, pow2(E + 1)), block)
    return tile


def _spread(x_TD: Tensor, codes: int, step: int) -> Tensor:
    """Tokens in bfloat16, in the order of the codes, zeros to the end of the last step."""
    (T, D), wide = x_TD.shape, cdiv(x_TD.shape[1], step) * step
    x, block = rows_of(x_TD), min(1024, pow2(D))
    out = torch.empty(T, wide, dtype=torch.bfloat16, device=x.device)
    _spread_kernel[(T, cdiv(wide, block))](x, out, x.stride(0), wide, D, codes, step, block)
    return out


def _configuration(part: str, rows: int, each: int, weight: Experts, features: int,
                   group: int, steady: bool) -> dict[str, int]:
    """A product's tiles for so many rows, `each` of an expert, cut to what its widths and groups allow."""
    config, codes = up_to(CONFIGS, 16 if steady else each), _layout(weight)[0]
    if not steady:
        key = rows, weight.experts, features, weight.in_features, codes
        config = tuned(f"moe.experts/{part}", key, config)
    step = min(config["step"], max(64, 32 * codes))
    while step > 16 * codes and weight.in_features % step:  # a tensor core takes 16 words
        step //= 2
    return {**config, "features": max(group, min(config["features"], pow2(features))), "step": step}


def _multiply(x: Tensor, weight: Experts, config: dict[str, int], tile: Tensor, rows: int, J: int,
              order: Tensor | None, up: tuple | None) -> Tensor:
    """[rows, N] bfloat16: h, zeros to the end of the second product's last step, when `up` = (weight_TJ,
    limit, group, codes and step of that).
    """
    codes, scale_n, scale_k = _layout(weight)
    words, scale = _stored(weight)
    share, limit, group, next_codes, next_step = up or (None, 0.0, 1, 1, 1)
    N = weight.out_features // 2 if up else weight.out_features
    wide = cdiv(N, next_step) * next_step
    y = (torch.empty if wide == N else torch.zeros)(rows, wide, dtype=torch.bfloat16, device=x.device)
    grid = (cdiv(weight.out_features, config["features"]), len(tile))
    _product_kernel[grid](x, words, scale, tile, order, share, y, N, weight.experts, wide, limit,
                          weight.in_features, J, codes, scale_n, scale_k, up is not None, limit > 0, group,
                          next_codes, next_step, config["step"], config["features"], config["tokens"], NARROW,
                          num_warps=config["num_warps"], num_stages=config["num_stages"])
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
    group, steady, total = layout(numerics.activation_format)[1], numerics.steady, part[1] if part else 0
    each = T * J // max(total, w13.experts)
    up = _configuration("up", T, each, w13, 2 * I, 2 * group, steady)
    down = _configuration("down", T, each, w2, D, 1, steady)
    order, place, tile, tile2, rows = None, None, topk_TJ[0], topk_TJ[0], None
    if T > 1 or part:
        order, place, end = _plan(topk_TJ, w13.experts, part)
        rows = end[-1:] if part else None
        tile = _tiles(end, T * J, up["tokens"])
        tile2 = tile if down["tokens"] == up["tokens"] else _tiles(end, T * J, down["tokens"])
    x = _spread(x_TD, _layout(w13)[0], up["step"])
    h = _multiply(x, w13, up, tile, T * J, J, order,
                  (weight_TJ.contiguous(), limit, group, _layout(w2)[0], down["step"]))
    y = _multiply(h, w2, down, tile2, T * J, 1, order, None)
    return moe._collect(y, place, shared_TD, numerics.dtype, rows)


def _plan(topk_TJ: Tensor, E: int, part: tuple[int, int] | None) -> tuple[Tensor, Tensor, Tensor]:
    """(order, place, end) of the experts held here; slots of others come last, beyond every end."""
    if part is None:
        _, order, place, end = moe.plan(topk_TJ, E)
        return order, place, end
    local = topk_TJ - part[0]
    local = torch.where((local >= 0) & (local < E), local, E)
    _, order, place, end = moe.plan(local, E + 1)
    return order, place, end[:E]


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
    if w2.in_features % layout(numerics.activation_format)[1]:
        return f"w2's {w2.in_features} channels are no multiple of {numerics.activation_format}'s group"
    return refuse(x_TD)
