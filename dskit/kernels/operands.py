"""What a tensor core multiplies when weights are 4 or 8 bits wide: both operands, restored as they are read.

Idea
    Weights are the left operand, which a tensor core takes from registers; the codes of one row lie side by
    side in words of 32 bits, 8 of e2m1 or 4 of e4m3.

        numbers    code i of two words becomes a pair of bfloat16 by shifts, masks and one multiplication by
                   the group's scale: exact, subnormals too, 2.5 operations a code
        halves     MXFP4 as float16, whose upper byte holds any e2m1: the group's scale, relative to the
                   row's largest, is folded into a table of eight bytes, which four codes at once look up; 1.8
                   operations a code
        codes      the same in e4m3, for an FP8 tensor core, half the products; 1.2 operations a code
        order      inside a step K is walked as codes come out of the words, and tokens are laid out likewise
                   beforehand: in bfloat16 (`spread`), or in float16 or e4m3 with one scale a row (`folded`)

Shapes
    words int32 [rows, words of a step]; byte or shift alike; x [T, K] -> [T, steps * step], zeros beyond K,
    and scales [T].

Units
    Scales are E8M0 bytes, shifts binades.

Errors
    None of its own.

Numerics
    `numbers` are lowered by 2^64, so that the scales of any group from 2^-61 to 2^65 are exact in bfloat16;
    beyond, they end in zero or infinity; an e4m3 NaN reads as 480.  `halves` and `codes` are exact while a
    row's scales span 26 and 11 binades.  A row that is e4m3 by groups loses what is below 2^-33 of its
    largest number in float16, and 2^-17 in e4m3.

Source
    kernels.md 2.3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dskit.kernels.common import (
    INTERP,
    cdiv,
    e4m3_code,
    from_e2m1,
    from_e4m3,
    from_e8m0,
    inverse,
    ld,
    narrow,
    pow2,
    rows_of,
    scale_fp8,
)

STEP = 256  # channels of a step of `codes`: a thread's four words of a row are then one group
# binades between a row's group scales within which every e2m1 is a normal number
SPAN_HALVES, SPAN_CODES = tl.constexpr(26), tl.constexpr(11)


# ---- weights as bfloat16 -----------------------------------------------------------------------------------

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
def numbers(words, byte, CODES: tl.constexpr, HALF: tl.constexpr):
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


# ---- weights as float16 ------------------------------------------------------------------------------------

@triton.constexpr_function
def _halving(half):
    """PTX: of two words ($4, $5) with their shifts ($6, $7) the codes of one, as pairs of float16 ($0 .. $3):
    0 and 2, 1 and 3, 4 and 6, 5 and 7.

    A float16's upper byte holds any e2m1: a table of eight such bytes is looked up by four codes at once.
    """
    word, shift = f"${4 + half}", f"${6 + half}"
    lines = [".reg .b32 low, high, codes, left, sign, size, zero;", "mov.b32 zero, 0;",
             f"mad.lo.u32 low, {shift}, 0x04040400, 0x0A080400;",
             f"mad.lo.u32 high, {shift}, 0x04040404, 0x12100E0C;",
             f"and.b32 codes, {word}, 0x77777777;", f"shl.b32 left, {word}, 4;"]
    for i, signs in enumerate(("0x9D8C", "0xBFAE")):  # each byte the sign of a code, repeated
        lines += ["shr.b32 codes, codes, 16;"] * i
        lines += ["prmt.b32 size, low, high, codes;", f"prmt.b32 sign, {word}, left, {signs};",
                  "lop3.b32 size, sign, 0x80808080, size, 0xEA;",  # (sign & 0x80..) | size
                  f"prmt.b32 ${2 * i}, size, zero, 0x2404;", f"and.b32 ${2 * i + 1}, size, 0xFF00FF00;"]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.jit
def halves(words, shift, HALF: tl.constexpr):
    """Half the words of a step times 2^(shift - 13), shift 0 .. 26 of each: [rows, 4 * words], float16.

    The asm takes a thread's two neighbours of a row, which is how the left operand of a float16 product is
    held, and makes pairs of one of them.
    """
    if INTERP:
        rows: tl.constexpr = words.shape[0]
        size: tl.constexpr = words.shape[1]
        word, others = tl.split(words.reshape(rows, size // 2, 2))
        lift, lifts = tl.split(shift.reshape(rows, size // 2, 2))
        if HALF == 1:
            word, lift = others, lifts
        word = tl.join(word, word).reshape(rows, 1, size)
        lift = tl.join(lift, lift).reshape(rows, 1, size)
        pair, odd = tl.arange(0, 4)[None, :, None], (tl.arange(0, size) % 2)[None, None, :]
        value = from_e2m1(word >> (4 * (pair // 2 * 4 + pair % 2 + 2 * odd)) & 15)
        return (value * from_e8m0(tl.maximum(lift, 0) + 114)).reshape(rows, 4 * size)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _halving(HALF), "=r,=r,=r,=r,r,r,r,r", [words, shift],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2)
        return _beside(_beside(a, b), _beside(c, d))


# ---- weights as e4m3 ---------------------------------------------------------------------------------------
# A word is 8 codes, 4 words a group, 8 groups a step.


@triton.constexpr_function
def _lifting():
    """PTX: four words of a group ($8 ..) and its shift ($12) -> codes 4 h .. 4 h + 3 of word i in $(4 h + i).

    A table of eight bytes, e2m1's sizes as e4m3 at this shift, is looked up by the codes themselves.
    """
    lines = [".reg .b32 low, high, codes, left, sign, size;",
             "mad.lo.u32 low, $12, 0x08080800, 0x14100800;", "mad.lo.u32 high, $12, 0x08080808, 0x24201C18;"]
    for i in range(4):
        lines += [f"and.b32 codes, ${8 + i}, 0x77777777;", f"shl.b32 left, ${8 + i}, 4;"]
        for half, signs in enumerate(("0x9D8C", "0xBFAE")):  # each byte the sign of a code, repeated
            lines += ["shr.b32 codes, codes, 16;"] * half
            lines += ["prmt.b32 size, low, high, codes;", f"prmt.b32 sign, ${8 + i}, left, {signs};",
                      f"lop3.b32 ${4 * half + i}, sign, 0x80808080, size, 0xEA;"]  # (sign & 0x80..) | size
    return "{\n" + "\n".join(lines) + "\n}"


@triton.jit
def codes(words, shift):
    """Weights of a step times 2^(shift - 5), shift 0 .. 11 of each word: [rows, 256], ordered for the asm.

    The asm takes a thread's four neighbours of a row, the words of one group, which is how the left operand
    of an e4m3 product is held.
    """
    if INTERP:
        rows: tl.constexpr = words.shape[0]
        code = words.reshape(rows, 32, 1) >> (4 * tl.arange(0, 8))[None, None, :]
        value = from_e2m1(code & 15) * from_e8m0(tl.maximum(shift, 0) + 122).reshape(rows, 32, 1)
        value = value.reshape(rows, 8, 4, 2, 4).permute(0, 3, 2, 1, 4)  # half, word, group, code
        return value.reshape(rows, 256)
    else:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _lifting(), "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r", [words, shift],
            dtype=(tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv,
                   tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4)
        return _beside(_beside(_beside(a, b), _beside(c, d)), _beside(_beside(e, f), _beside(g, h)))


# ---- tokens ------------------------------------------------------------------------------------------------

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


@triton.jit
def _folded_kernel(x_ptr, out_ptr, scale_ptr, stride_x, K, WIDE, STEP: tl.constexpr, HALVES: tl.constexpr,
                   BLOCK: tl.constexpr):
    """A row with one scale, in the order of `halves` as float16 or in that of `codes` as e4m3."""
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, BLOCK)
    if HALVES:
        WORDS: tl.constexpr = STEP // 8
        word, half, pair = p % WORDS, p // (STEP // 2) % 2, p // WORDS % 4
        channel = (word - word % 2 + half) * 8 + pair // 2 * 4 + pair % 2 + word % 2 * 2
    else:
        channel = p // 4 % 8 * 32 + p // 32 % 4 * 8 + p // 128 % 2 * 4 + p % 4
    channel += p // STEP * STEP
    x = ld(x_ptr + row * stride_x + channel, channel < K)
    scale = scale_fp8(tl.max(tl.abs(x), axis=0))
    tl.store(scale_ptr + row, scale)
    x *= inverse(scale)
    if HALVES:
        tl.store(out_ptr + row * WIDE + p, x.to(tl.float16), mask=p < WIDE)
    else:
        tl.store(out_ptr + row * WIDE + p, e4m3_code(x), mask=p < WIDE)


def spread(x_TD: Tensor, codes: int, step: int) -> Tensor:
    """Tokens in bfloat16, in the order of the codes, zeros to the end of the last step."""
    (T, D), wide = x_TD.shape, cdiv(x_TD.shape[1], step) * step
    x, block = rows_of(x_TD), min(1024, pow2(D))
    out = torch.empty(T, wide, dtype=torch.bfloat16, device=x.device)
    _spread_kernel[(T, cdiv(wide, block))](x, out, x.stride(0), wide, D, codes, step, block)
    return out


def folded(x: Tensor, step: int, halves: bool) -> tuple[Tensor, Tensor]:
    """(rows in float16 or e4m3, zeros to the end of the last step; their scales)."""
    (R, K), wide = x.shape, cdiv(x.shape[1], step) * step
    x = rows_of(x)
    out = torch.empty(R, wide, dtype=torch.float16 if halves else torch.uint8, device=x.device)
    scale = torch.empty(R, dtype=torch.float32, device=x.device)
    _folded_kernel[(R,)](x, out, scale, x.stride(0), K, wide, step, halves, pow2(wide), num_warps=8)
    return out if halves else out.view(torch.float8_e4m3fn), scale
