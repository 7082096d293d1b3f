"""What a tensor core multiplies when weights are 4 or 8 bits wide: both operands, restored as they are read.

Idea
    Weights are the left operand, which a tensor core takes from registers; the codes of one row lie side by
    side in words of 32 bits, 8 of e2m1 or 4 of e4m3.

        numbers    two codes of a word become a pair of bfloat16 by shifts, masks and one multiplication by
                   the group's scale: exact, subnormals too, 2.1 operations a code
        codes      MXFP4 as e4m3, for an FP8 tensor core, half the products: a group's scale, relative to the
                   row's first one, is folded into a table of eight bytes, which four codes at once look up;
                   1.2 operations a code
        order      inside a step K is walked as codes come out of the words, and tokens are laid out likewise
                   beforehand: in bfloat16 (`spread`), or in e4m3 with one scale a row, in one window or
                   two (`folded`); `wide` where a thread has eight words of a row (grouped.py)

Shapes
    words int32 [rows, words of a step]; byte or shift alike; x [T, K] -> [T, windows * steps * step], zeros
    beyond K, and scales [T].

Units
    Scales are E8M0 bytes, shifts binades.

Errors
    None of its own.

Numerics
    `numbers` are lowered by 2^64, so that the scales of any group from 2^-61 to 2^65 are exact in bfloat16;
    beyond, they end in zero or infinity; an e4m3 NaN reads as 480.  `codes` are exact while a row's scales
    are 2^-5 to 2^6 of its first one.  A row that is e4m3 by groups loses what is below 2^-17 of its largest
    number in one window, and 2^-22 in two.

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
    nearest,
    pow2,
    rows_of,
    scale_fp8,
)

SPAN = tl.constexpr(11)  # binades between a row's group scales within which every e2m1 is a normal e4m3
LOWER = tl.constexpr(1 / 512)  # what the second window of a token counts


# ---- weights as bfloat16 -----------------------------------------------------------------------------------

@triton.constexpr_function
def _restoring(codes, half):
    """PTX: of two words with their factors the codes of one, times its factor, as pairs of bfloat16 ($0 ..):
    codes i and i + codes / 2.

    A code's sign goes to bit 15 and the rest of it to bit 6 (e2m1) or 4 (e4m3) and above, where it is a
    subnormal or tiny bfloat16, which the multiplication makes right.
    """
    out = codes // 2
    word, factor = f"${out + half}", f"${out + 2 + half}"
    lines = [".reg .b32 word, sign, size, zero;", "mov.b32 zero, 0x80008000;", f"mov.b32 word, {word};"]
    for i in range(out):
        if codes == 8:  # a nibble's two places by one product: times 2^12 and 2^6, without a carry
            lines += ["shr.b32 word, word, 8;"] * (i == 2)
            lines += [f"and.b32 size, word, {'0x00F000F0' if i % 2 else '0x000F000F'};",
                      f"mul.lo.u32 size, size, {'0x104' if i % 2 else '0x1040'};",
                      "and.b32 size, size, 0x81C081C0;"]
        else:
            lines += ["mov.b32 sign, word;", "shr.b32 size, word, 4;"] if i else [
                "shl.b32 sign, word, 8;", "shl.b32 size, word, 4;"]
            lines += ["and.b32 size, size, 0x07F007F0;", "lop3.b32 size, sign, zero, size, 0xEA;"]
        lines.append(f"fma.rn.bf16x2 ${i}, size, {factor}, zero;")  # lop3 0xEA: (sign & zero) | size
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def _constraints(codes):
    return ",".join(["=r"] * (codes // 2) + ["r"] * 4)


@triton.constexpr_function
def _lifted(codes):
    """What to add to an E8M0 byte for the exponent of the factor that a code's bits need, lowered."""
    return {8: 126, 4: 120}[codes] - 64


@triton.jit
def beside(a, b):
    """[rows, n] and [rows, n] -> [rows, 2 n]: a matter of names, since each thread holds whole rows' ends."""
    return tl.join(a, b).permute(0, 2, 1).reshape(a.shape[0], 2 * a.shape[1])


@triton.jit
def _neighbour(x, HALF: tl.constexpr):
    """[rows, n] with both of each two neighbours the first of them, or the second."""
    rows: tl.constexpr = x.shape[0]
    a, b = tl.split(x.reshape(rows, x.shape[1] // 2, 2))
    if HALF == 1:
        a = b
    return tl.join(a, a).reshape(rows, x.shape[1])


@triton.jit
def numbers(words, byte, CODES: tl.constexpr, HALF: tl.constexpr):
    """The codes of half the words, [rows, CODES / 2 * words], lowered by 2^64.

    The asm takes a thread's two neighbours of a row, which is how a tensor core's left operand is held, and
    makes pairs of one of them.
    """
    if INTERP:
        word, scale = _neighbour(words, HALF), from_e8m0(_neighbour(byte, HALF)) * 5.421010862427522e-20
        rows: tl.constexpr = words.shape[0]
        size: tl.constexpr = words.shape[1]
        code = tl.arange(0, CODES // 2)[None, :, None] + tl.arange(0, size)[None, None, :] % 2 * (CODES // 2)
        word, scale = word.reshape(rows, 1, size) >> (32 // CODES * code), scale.reshape(rows, 1, size)
        value = from_e2m1(word & 15) if CODES == 8 else from_e4m3((word & 255).to(tl.uint8))
        return (value * scale).reshape(rows, CODES // 2 * size)
    else:
        factor = tl.minimum(byte.to(tl.int32) + _lifted(CODES), 255) * 0x800080  # a power of two, twice
        if CODES == 8:
            a, b, c, d = tl.inline_asm_elementwise(
                _restoring(CODES, HALF), _constraints(CODES), [words, factor],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
            return beside(beside(a, b), beside(c, d))
        else:
            a, b = tl.inline_asm_elementwise(_restoring(CODES, HALF), _constraints(CODES), [words, factor],
                                             dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
            return beside(a, b)


# ---- weights as e4m3 ---------------------------------------------------------------------------------------
# A word is 8 codes, 4 words a group.


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
    """Weights of a step times 2^(shift - 5), shift 0 .. 11 of each word: [rows, 8 * words].

    The asm takes a thread's four neighbours of a row, the words of one group, which is how the left operand
    of an e4m3 product is held.
    """
    if INTERP:
        rows: tl.constexpr = words.shape[0]
        size: tl.constexpr = words.shape[1]
        code = words.reshape(rows, size, 1) >> (4 * tl.arange(0, 8))[None, None, :]
        value = from_e2m1(code & 15) * from_e8m0(tl.maximum(shift, 0) + 122).reshape(rows, size, 1)
        value = value.reshape(rows, size // 4, 4, 2, 4).permute(0, 3, 2, 1, 4)  # half, word, group, code
        return value.reshape(rows, 8 * size)
    else:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _lifting(), "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r", [words, shift],
            dtype=(tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv,
                   tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4)
        return beside(beside(beside(a, b), beside(c, d)), beside(beside(e, f), beside(g, h)))


# ---- tokens ------------------------------------------------------------------------------------------------

@triton.jit
def _channel_of_numbers(p, CODES: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr):
    """Which channel stands at p: codes i and i + 4 of a word are a pair, words are walked by firsts of two
    neighbours, then by seconds; WIDE: a thread has eight neighbours.
    """
    word, code = p % STEP, 0
    if CODES > 1:
        if WIDE:
            word = p // 2 % 4 * 8 + p // 8 % 4 * 2 + p // 128 % 2
            code = p // 32 % 4 + p % 2 * 4
        else:
            WORDS: tl.constexpr = STEP // CODES
            at, word = p % STEP, p % WORDS
            code = at // WORDS % (CODES // 2) + word % 2 * (CODES // 2)
            word += at // (STEP // 2) - word % 2
    return p // STEP * STEP + word * CODES + code


@triton.jit
def _channel_of_codes(p, STEP: tl.constexpr, WIDE: tl.constexpr):
    """The same of e4m3, half a word after the other of each group; WIDE: of a thread's first, its second."""
    group = p // 4 % 4 * 2 + p // 16 % 2 if WIDE else p // 4 % (STEP // 32)
    return p // STEP * STEP + group * 32 + p // (STEP // 8) % 4 * 8 + p // (STEP // 2) % 2 * 4 + p % 4


@triton.jit
def place(channel, STEP: tl.constexpr):
    """Where `folded` puts a channel, wide."""
    word = channel % STEP // 8
    at = channel // 4 % 2 * (STEP // 2) + word % 4 * (STEP // 8) + word // 4 % 2 * 16 + word // 8 * 4
    return channel // STEP * STEP + at + channel % 4


@triton.jit
def _put(out_ptr, place_ptr, rows_ptr, t, d, x, END, stride, J: tl.constexpr):
    """Write a token's part to its J places, or to its own, as far as they are among the rows."""
    for j in tl.static_range(J):
        row, end = t, END
        if place_ptr is not None:
            row = tl.load(place_ptr + t * J + j)
        if rows_ptr is not None:
            end = tl.where(row < tl.load(rows_ptr), END, 0)
        tl.store(out_ptr + row * stride + d, x, mask=d < end)


@triton.jit
def _spread_kernel(x_ptr, out_ptr, place_ptr, rows_ptr, stride_x, END, D: tl.constexpr, J: tl.constexpr,
                   CODES: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens in bfloat16, channels in the order in which their weights' codes come out of the words, zeros up
    to END, the end of the last step.
    """
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = _channel_of_numbers(d, CODES, STEP, WIDE)
    x = ld(x_ptr + t * stride_x + channel, channel < D)
    _put(out_ptr, place_ptr, rows_ptr, t, d, narrow(x, tl.bfloat16), END, END, J)


@triton.jit
def _folded_kernel(x_ptr, out_ptr, scale_ptr, place_ptr, rows_ptr, stride_x, K, END, J: tl.constexpr,
                   STEP: tl.constexpr, WINDOWS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """A row as e4m3 with one scale, in the order of `codes`; of two windows the first has integers up to 14,
    the second what they leave.
    """
    t = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, BLOCK)
    channel = _channel_of_codes(p, STEP, WIDE)
    if rows_ptr is not None and place_ptr is None:
        K = tl.where(t < tl.load(rows_ptr), K, 0)
    x = ld(x_ptr + t * stride_x + channel, channel < K)
    scale = scale_fp8(tl.max(tl.abs(x), axis=0))
    if WINDOWS == 2:
        scale *= 32.0
    _put(scale_ptr, place_ptr, rows_ptr, t, 0, scale, 1, 1, J)
    x *= inverse(scale)
    first = nearest(x) if WINDOWS == 2 else x
    _put(out_ptr, place_ptr, rows_ptr, t, p, e4m3_code(first), END, WINDOWS * END, J)
    if WINDOWS == 2:
        _put(out_ptr + END, place_ptr, rows_ptr, t, p, e4m3_code((x - first) * 512.0), END, WINDOWS * END, J)


def spread(x_TD: Tensor, codes: int, step: int, wide: bool = False, place_TJ: Tensor | None = None,
           rows: Tensor | None = None) -> Tensor:
    """Tokens in bfloat16, in the order of the codes, zeros to the end of the last step; at J places each.

    rows: [1] how many of the rows are wanted, the first ones (None: all).
    """
    (T, D), end = x_TD.shape, cdiv(x_TD.shape[1], step) * step
    J = 1 if place_TJ is None else place_TJ.shape[1]
    x, block = rows_of(x_TD), min(1024, pow2(D))
    out = torch.empty(T * J, end, dtype=torch.bfloat16, device=x.device)
    _spread_kernel[(T, cdiv(end, block))](x, out, place_TJ, rows, x.stride(0), end, D, J, codes, step, wide,
                                          block)
    return out


def folded(x: Tensor, step: int, windows: int, wide: bool = False, place_TJ: Tensor | None = None,
           rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(rows in e4m3, windows one after the other, zeros to the end of the last step; their scales); each at
    J places, of which `rows` are wanted.
    """
    (R, K), end = x.shape, cdiv(x.shape[1], step) * step
    J = 1 if place_TJ is None else place_TJ.shape[1]
    x = rows_of(x)
    out = torch.empty(R * J, windows * end, dtype=torch.uint8, device=x.device)
    scale = torch.empty(R * J, dtype=torch.float32, device=x.device)
    _folded_kernel[(R,)](x, out, scale, place_TJ, rows, x.stride(0), K, end, J, step, windows, wide,
                         pow2(end), num_warps=8)
    return out.view(torch.float8_e4m3fn), scale
