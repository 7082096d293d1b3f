"""Attention of a row over its window and chosen entries, read from the caches as they are stored.

Tiling
    One program has all heads of one row, since they read the same entries: 64 heads are the tile height of a
    tensor core.  Entries come in tiles, are restored to bfloat16 once and serve as keys and as values.

        q [heads, pairs]      a tile of rows [BLOCK, pairs]     z = qa a^T + qb b^T     [heads, BLOCK]
        a a a a | b b b b     codes, scales -> a | b            o = fade o + p a | p b  [heads, pairs]

    Everything is held as pairs of neighbouring channels, firsts (a) apart from seconds (b): a byte of e2m1
    and two of e4m3 hold a pair, a rotation turns one, and a sum over channels may be taken in any order, so
    nothing is ever interleaved.  Queries are rotated as they are loaded and outputs rotated back, and where
    asked quantised, before they are stored.

    Few rows share out their tiles over several programs, whose parts a second kernel joins.  A program has
    two groups of four warps: sums of 64 heads of 512 channels fill half of their registers, so queries lie in
    shared memory.  Each group scores half of a tile's entries and sums half of the channels.  Where
    the loop has stages enough, the next tile's bytes arrive meanwhile.

    Caches that hold numbers have a kernel of their own for rows that are not shared out: nothing is restored,
    channels keep their order, and a tile goes from memory to the tensor cores without passing through
    registers, while the next one arrives.

    On Hopper the released widths have kernels that are faster than both: packed as they are released in
    hopper.py, as numbers in hopper_numbers.py.

Shapes
    q [T, A, H] of bfloat16, turn complex64 [T, pairs], caches uint8 [S, nbytes] or bfloat16 [S, H], rows to
    read int64 [T, W] and [T, K] with -1 for none, sink [A] -> [T, A, H] of bfloat16.

Units
    Bytes of a row of 64 heads of 512: 128 KB of queries and outputs, 528 per window row, 288 per entry;
    4 * 64 * 512 operations per row read.  At 128 + 512 rows bytes and tensor cores take equally long.

Errors
    ValueError names an argument whose shape does not fit.  Other dtypes than bfloat16, exact numerics and
    odd widths are refused.

Source
    kernels.md 1.3, 2.1, 2.3.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dskit import ops
from dskit.kernels import common
from dskit.kernels.common import (
    INTERP,
    bf16_pair,
    cdiv,
    dot,
    e4m3,
    from_bf16_pair,
    from_e2m1_byte,
    from_e4m3_pair,
    from_fp32_pair,
    inverse,
    pow2,
    processors,
    refuse,
    require,
    rounded_bf16,
    scale_fp8,
    scale_value,
    to_bf16,
    tuned,
    up_to,
)


def _config(block: int, warps: int, stages: int) -> dict[str, int]:
    return {"BLOCK": block, "num_warps": warps, "num_stages": stages}


# by rows of a call.  Up to four stages only indices arrive ahead, from five on rows do
CONFIGS = {1 << 62: _config(64, 8, 5)}
TAILED = {1 << 62: _config(32, 8, 1)}  # words of bfloat16 channels would be staged at the width of a row
NUMBERS = {1 << 62: _config(64, 8, 2)}  # two tiles of 64 KB beside the queries'
CANDIDATES = {"mla.attend_cached": (_config(64, 8, 1), _config(64, 8, 5), _config(32, 8, 1),
                                    _config(32, 8, 5)),
              "mla.attend_cached/numbers": (_config(64, 8, 2), _config(64, 16, 2), _config(32, 8, 3),
                                            _config(32, 8, 4), _config(32, 8, 5), _config(32, 16, 4),
                                            _config(16, 8, 6))}
MOST_HEADS = 64  # of one program
MOST_SPLITS = 32
JOINED_HEADS = 4  # heads that one program joins
FLOOR = tl.constexpr(-1e30)  # where maxima start: a row without entries gives zeros and no NaN
LOG2E = tl.constexpr(1.4426950408889634)
UNIT = tl.constexpr(2.0**-8)  # of restored rows: what e2m1 codes are multiplied by stays below 2^127


# ---- rows of a cache ---------------------------------------------------------------------------------------

def _e2m1_times_two(firsts: str, seconds: str, scale: str, bytes_: str) -> str:
    """Instructions for two bytes, the registers of their codes' products and of the bytes' scales named."""
    return f"""
        prmt.b32 both, $4, 0, {bytes_};
        shr.b32 code, both, 2;
        shl.b32 sign, both, 4;
        and.b32 code, code, 0x01C001C0;
        lop3.b32 code, sign, 0x80008000, code, 0xEA;
        fma.rn.bf16x2 {firsts}, code, {scale}, zero;
        shr.b32 code, both, 6;
        and.b32 code, code, 0x01C001C0;
        lop3.b32 code, both, 0x80008000, code, 0xEA;
        fma.rn.bf16x2 {seconds}, code, {scale}, zero;"""


# four bytes in $4, their scales times 2^118 in $5 and $6; zero: -0, which changes no product
E2M1_TIMES = tl.constexpr(f"""{{
        .reg .b32 both, code, sign, zero;
        mov.b32 zero, 0x80008000;
        {_e2m1_times_two("$0", "$2", "$5", "0x1404")}
        {_e2m1_times_two("$1", "$3", "$6", "0x3424")}
    }}""")


@triton.jit
def _spread(value, GROUP: tl.constexpr):
    """One value per group [N, groups] -> the same for each pair of the group."""
    groups = value[:, :, None].broadcast_to(value.shape[0], value.shape[1], GROUP)
    return groups.reshape(value.shape[0], value.shape[1] * GROUP)


@triton.jit
def _e2m1_times(byte, scale, GROUP: tl.constexpr):
    """Bytes of two e2m1 codes [N, pairs] times float32 scales [N, groups] and UNIT -> (firsts, seconds).

    In their place the bits of a code are a bfloat16 that is 2^126 times too small, and a multiplication takes
    two of them.  2^126 times a scale may be too large, hence the UNIT; the product is exact.
    """
    if INTERP:
        a, b = from_e2m1_byte(byte)
        scale = _spread(scale * (16384.0 * UNIT), GROUP)
        a, b = to_bf16(a * scale), to_bf16(b * scale)
    else:
        scale = _spread(to_bf16(scale * (2.0**126 * UNIT)), GROUP)
        a, b = tl.inline_asm_elementwise(E2M1_TIMES, "=r,=r,=r,=r,r,r,r", [byte, scale],
                                         dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)
    return a, b


@triton.jit
def _load(at, real, MASKED: tl.constexpr):
    """Loads where rows fill their tile go without masks, each of which is a comparison."""
    if MASKED:
        return tl.load(at, real, other=0)
    else:
        return tl.load(at)


@triton.jit
def _pairs(code_ptr, byte_ptr, word_ptr, row, FORM: tl.constexpr, WIDE: tl.constexpr):
    """The pairs of rows [N, 1] of a cache as two bfloat16 tiles [N, WIDE], times UNIT."""
    KIND: tl.constexpr = FORM[0]
    GROUP: tl.constexpr = FORM[1]
    CODED: tl.constexpr = FORM[2]
    WIDTH: tl.constexpr = FORM[3]
    SCALES: tl.constexpr = FORM[4]
    SCALES_AT: tl.constexpr = FORM[5]
    NBYTES: tl.constexpr = FORM[6]
    pair = tl.arange(0, WIDE)[None, :]
    if KIND == "bf16":
        word = _load(word_ptr + row * WIDTH + pair, pair < WIDTH, WIDTH < WIDE)
        a, b = from_bf16_pair(word.to(tl.uint32, bitcast=True))
        a, b = to_bf16(a * UNIT), to_bf16(b * UNIT)
    else:
        group = tl.arange(0, WIDE // GROUP)[None, :]
        scale = _load(byte_ptr + row * NBYTES + SCALES_AT + group, group < SCALES, SCALES < WIDE // GROUP)
        scale = scale_value(scale, KIND)
        if KIND == "fp4_16":
            byte = _load(code_ptr + row * NBYTES + pair, pair < CODED, CODED < WIDE)
            a, b = _e2m1_times(byte, scale, GROUP)
        else:
            code = _load(code_ptr + row * (NBYTES // 2) + pair, pair < CODED, CODED < WIDE)
            a, b = from_e4m3_pair(code.to(tl.uint16, bitcast=True))
            scale = _spread(scale * UNIT, GROUP)
            a, b = a * scale, b * scale
            if CODED < WIDTH:
                at = word_ptr + row * (NBYTES // 4) + pair - CODED // 2
                tail = tl.load(at, (pair >= CODED) & (pair < WIDTH), other=0)
                tail_a, tail_b = from_bf16_pair(tail.to(tl.uint32, bitcast=True))
                a, b = tl.where(pair < CODED, a, tail_a * UNIT), tl.where(pair < CODED, b, tail_b * UNIT)
            a, b = to_bf16(a), to_bf16(b)
    return a, b


@triton.jit
def _ends(index_ptr, count, WIDE: tl.constexpr):
    """(the first that is no -1 of `count` indices, one past the last): what lies outside is not read."""
    at = tl.arange(0, WIDE)
    real = tl.load(index_ptr + at, at < count, other=-1) >= 0
    return tl.min(tl.where(real, at, count)), tl.max(tl.where(real, at + 1, 0))


# ---- queries and outputs -----------------------------------------------------------------------------------

@triton.jit
def _turns(turn_ptr, token, pair, WIDTH: tl.constexpr, TURNS: tl.constexpr):
    """(whether pairs turn, cosines, sines) [1, pairs]."""
    turned = (pair >= WIDTH - TURNS) & (pair < WIDTH)
    c, s = from_fp32_pair(tl.load(turn_ptr + token * TURNS + pair - (WIDTH - TURNS), turned, other=0))
    return turned, c, s


@triton.jit
def _query(q_ptr, turn_ptr, plane_ptr, token, head, pair, A: tl.constexpr, WIDTH: tl.constexpr,
           TURNS: tl.constexpr):
    """A row's rotated queries as two bfloat16 tiles [heads, pairs].

    They pass through the row's place in the output: what is loaded is an operand in shared memory, what was
    computed would fill half of the registers.
    """
    word_at = (token * A + head[:, None]) * WIDTH + pair[None, :]
    real = (head < A)[:, None] & (pair < WIDTH)[None, :]
    word = tl.load(q_ptr + word_at, real, other=0)
    a, b = from_bf16_pair(word.to(tl.uint32, bitcast=True))
    turned, c, s = _turns(turn_ptr, token, pair[None, :], WIDTH, TURNS)
    to = plane_ptr + 2 * (token * A + head[:, None]) * WIDTH + pair[None, :]
    tl.store(to, to_bf16(tl.where(turned, a * c - b * s, a)), real)
    tl.store(to + WIDTH, to_bf16(tl.where(turned, a * s + b * c, b)), real)
    tl.debug_barrier()
    return tl.load(to, real, other=0.0), tl.load(to + WIDTH, real, other=0.0)


@triton.jit
def _quantized(a, b, GROUP: tl.constexpr):
    """Pairs rounded to e4m3 with a scale per GROUP of them, and restored."""
    size = tl.maximum(tl.abs(a), tl.abs(b))
    scale = scale_fp8(tl.max(size.reshape(size.shape[0], size.shape[1] // GROUP, GROUP), axis=2))
    factor, scale = _spread(inverse(scale), GROUP), _spread(scale, GROUP)
    return e4m3(a * factor) * scale, e4m3(b * factor) * scale


@triton.jit
def _finish(a, b, top, total, sink_ptr, turn_ptr, out_ptr, token, head, pair, A: tl.constexpr,
            WIDTH: tl.constexpr, TURNS: tl.constexpr, QUANTUM: tl.constexpr):
    """Divide sums [heads, pairs] by the softmax's denominator, rotate back, quantise, store."""
    sink = tl.load(sink_ptr + head, head < A, other=0.0)
    total += tl.exp2(sink * LOG2E - top)
    share = (1.0 / tl.where(total > 0, total * UNIT, 1.0))[:, None]
    a, b = a * share, b * share
    turned, c, s = _turns(turn_ptr, token, pair[None, :], WIDTH, TURNS)
    a, b = tl.where(turned, a * c + b * s, a), tl.where(turned, b * c - a * s, b)
    word = bf16_pair(a, b)
    if QUANTUM:
        a, b = from_bf16_pair(word)
        a, b = _quantized(a, b, QUANTUM)
        word = bf16_pair(a, b)
    at = out_ptr + (token * A + head[:, None]) * WIDTH + pair[None, :]
    tl.store(at, word.to(tl.int32, bitcast=True), (head[:, None] < A) & (pair[None, :] < WIDTH))


# ---- attention ---------------------------------------------------------------------------------------------

@triton.jit
def _attend(qa, qb, top, total, sum_a, sum_b, code_ptr, byte_ptr, word_ptr, index_ptr, begin, end, count,
            scale, FORM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, ENDS: tl.constexpr):
    """Go on with a softmax over the indices begin .. end: its maximum, its sum and the sums of values."""
    low, high = _ends(index_ptr, count, ENDS)
    some = tl.load(index_ptr + low, low < count, other=0)  # is read in place of -1: a load without a mask
    begin, end = tl.maximum(begin, low // BLOCK * BLOCK), tl.minimum(end, high)
    for start in tl.range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        row = tl.load(index_ptr + at, at < end, other=-1)
        a, b = _pairs(code_ptr, byte_ptr, word_ptr, tl.where(row < 0, some, row)[:, None], FORM, WIDE)
        z = tl.zeros([qa.shape[0], BLOCK], tl.float32)
        p, fade = to_bf16(z), tl.zeros_like(top)
        if start < end:  # always, as is the next: what leaves a branch is no chain of products, for which two
            z = dot(qa, tl.trans(a), z)  # groups of four warps would both take all of the entries
        if start < high:
            z = dot(qb, tl.trans(b), z)
            z = tl.where((row >= 0)[None, :], z, float("-inf"))
            new = tl.maximum(top, tl.max(z, axis=1) * scale)
            fade, weight = tl.exp2(top - new), rounded_bf16(tl.exp2(z * scale - new[:, None]))
            top, total, p = new, total * fade + tl.sum(weight, axis=1), to_bf16(weight)
        sum_a = dot(p, a, sum_a * fade[:, None])
        sum_b = dot(p, b, sum_b * fade[:, None])
    return top, total, sum_a, sum_b


@triton.jit
def _store_sums(a, b, sum_ptr, at, head, pair, A: tl.constexpr, WIDTH: tl.constexpr):
    """Undivided sums of a part of the entries: firsts of pairs, then seconds."""
    real = (head < A)[:, None] & (pair < WIDTH)[None, :]
    to = sum_ptr + 2 * at[:, None] * WIDTH + pair[None, :]
    tl.store(to, a, real)
    tl.store(to + WIDTH, b, real)


@triton.jit
def _mla_attend_cached_fwd_kernel(q_ptr, turn_ptr, window_code_ptr, window_byte_ptr, window_word_ptr,
                                  read_ptr, entry_code_ptr, entry_byte_ptr, entry_word_ptr, chosen_ptr,
                                  sink_ptr, out_ptr, plane_ptr, sum_ptr, stat_ptr, W, K, splits, per, scale,
                                  WINDOW: tl.constexpr, ENTRY: tl.constexpr, A: tl.constexpr,
                                  HEADS: tl.constexpr, WIDTH: tl.constexpr, TURNS: tl.constexpr,
                                  QUANTUM: tl.constexpr, WIDE: tl.constexpr, WINDOW_ENDS: tl.constexpr,
                                  ENTRY_ENDS: tl.constexpr, BLOCK: tl.constexpr):
    GROUPS: tl.constexpr = (A + HEADS - 1) // HEADS
    group, program = tl.program_id(0) % GROUPS, tl.program_id(0) // GROUPS
    split, token = program % splits, (program // splits).to(tl.int64)
    head, pair = group * HEADS + tl.arange(0, HEADS), tl.arange(0, WIDE)
    qa, qb = _query(q_ptr, turn_ptr, plane_ptr, token, head, pair, A, WIDTH, TURNS)
    top, total = tl.full([HEADS], FLOOR, tl.float32), tl.zeros([HEADS], tl.float32)
    a, b = tl.zeros([HEADS, WIDE], tl.float32), tl.zeros([HEADS, WIDE], tl.float32)
    begin = split * per * BLOCK  # in tiles of the window, then of the entries
    top, total, a, b = _attend(
        qa, qb, top, total, a, b, window_code_ptr, window_byte_ptr, window_word_ptr, read_ptr + token * W,
        begin, tl.minimum(begin + per * BLOCK, W), W, scale, WINDOW, WIDE, BLOCK, WINDOW_ENDS)
    if chosen_ptr is not None:
        begin -= (W + BLOCK - 1) // BLOCK * BLOCK
        top, total, a, b = _attend(
            qa, qb, top, total, a, b, entry_code_ptr, entry_byte_ptr, entry_word_ptr, chosen_ptr + token * K,
            tl.maximum(begin, 0), tl.minimum(begin + per * BLOCK, K), K, scale, ENTRY, WIDE, BLOCK,
            ENTRY_ENDS)
    if sum_ptr is None:
        _finish(a, b, top, total, sink_ptr, turn_ptr, out_ptr, token, head, pair, A, WIDTH, TURNS, QUANTUM)
    else:
        at = (token * splits + split) * A + head
        tl.store(stat_ptr + 2 * at, top, head < A)
        tl.store(stat_ptr + 2 * at + 1, total, head < A)
        _store_sums(a, b, sum_ptr, at, head, pair, A, WIDTH)


@triton.jit
def _mla_join_fwd_kernel(sum_ptr, stat_ptr, turn_ptr, sink_ptr, out_ptr, splits, A: tl.constexpr,
                         HEADS: tl.constexpr, WIDTH: tl.constexpr, TURNS: tl.constexpr, QUANTUM: tl.constexpr,
                         WIDE: tl.constexpr):
    BLOCKS: tl.constexpr = (A + HEADS - 1) // HEADS
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    head, pair = tl.program_id(0) % BLOCKS * HEADS + tl.arange(0, HEADS), tl.arange(0, WIDE)
    real = (head < A)[:, None] & (pair < WIDTH)[None, :]
    top, total = tl.full([HEADS], FLOOR, tl.float32), tl.zeros([HEADS], tl.float32)
    a, b = tl.zeros([HEADS, WIDE], tl.float32), tl.zeros([HEADS, WIDE], tl.float32)
    for split in tl.range(0, splits):
        at = (token * splits + split) * A + head
        theirs = tl.load(stat_ptr + 2 * at, head < A, other=FLOOR)
        new = tl.maximum(top, theirs)
        fade, weight = tl.exp2(top - new), tl.exp2(theirs - new)
        top, total = new, total * fade + weight * tl.load(stat_ptr + 2 * at + 1, head < A, other=0.0)
        at = 2 * at[:, None] * WIDTH + pair[None, :]
        a = a * fade[:, None] + weight[:, None] * tl.load(sum_ptr + at, real, other=0.0)
        b = b * fade[:, None] + weight[:, None] * tl.load(sum_ptr + at + WIDTH, real, other=0.0)
    _finish(a, b, top, total, sink_ptr, turn_ptr, out_ptr, token, head, pair, A, WIDTH, TURNS, QUANTUM)


# ---- attention over numbers --------------------------------------------------------------------------------

@triton.jit
def _turn(from_ptr, to_ptr, turn_ptr, token, head, pair, A: tl.constexpr, WIDTH: tl.constexpr,
          TURNS: tl.constexpr, BACK: tl.constexpr):
    """Rotate pairs of a row's heads, or rotate them back, on their way from one tensor to another."""
    turned, c, s = _turns(turn_ptr, token, pair[None, :], WIDTH, TURNS)
    s = -s if BACK else s
    at = (token * A + head[:, None]) * WIDTH + pair[None, :]
    real = (head < A)[:, None] & (pair < WIDTH)[None, :]
    word = tl.load(from_ptr + at, real, other=0).to(tl.uint32, bitcast=True)
    a, b = from_bf16_pair(word)
    word = tl.where(turned, bf16_pair(a * c - b * s, a * s + b * c), word)
    tl.store(to_ptr + at, word.to(tl.int32, bitcast=True), real)


@triton.jit
def _mla_attend_numbers_fwd_kernel(q_ptr, turn_ptr, window_ptr, read_ptr, entry_ptr, chosen_ptr,
                                   sink_ptr, out_ptr, out_word_ptr, W, K, scale, A: tl.constexpr,
                                   HEADS: tl.constexpr, WIDTH: tl.constexpr, TURNS: tl.constexpr,
                                   WIDE: tl.constexpr, WIDE_TURNS: tl.constexpr, WINDOW_ENDS: tl.constexpr,
                                   ENTRY_ENDS: tl.constexpr, BLOCK: tl.constexpr):
    GROUPS: tl.constexpr = (A + HEADS - 1) // HEADS
    group, token = tl.program_id(0) % GROUPS, (tl.program_id(0) // GROUPS).to(tl.int64)
    head, channel = group * HEADS + tl.arange(0, HEADS), tl.arange(0, 2 * WIDE)[None, :]
    _turn(q_ptr, out_word_ptr, turn_ptr, token, head, tl.arange(0, WIDE), A, WIDTH, TURNS, False)
    read_ptr += token * W
    low, high = _ends(read_ptr, W, WINDOW_ENDS)
    some = tl.load(read_ptr + low, low < W, other=0)  # is read in place of -1: a load without a mask
    first, tiles = low // BLOCK, tl.maximum((high + BLOCK - 1) // BLOCK - low // BLOCK, 0)
    entry_first, last, entry_some = 0, tiles, some
    if chosen_ptr is not None:
        chosen_ptr += token * K
        low, high = _ends(chosen_ptr, K, ENTRY_ENDS)
        entry_some = tl.load(chosen_ptr + low, low < K, other=0)
        entry_first = low // BLOCK
        last += tl.maximum((high + BLOCK - 1) // BLOCK - entry_first, 0)
    tl.debug_barrier()  # as in _query, the rotated queries pass through the row's place in the output
    at = (token * A + head[:, None]) * (2 * WIDTH) + channel
    real = (head < A)[:, None] & (channel < 2 * WIDTH)
    q = tl.load(out_ptr + at, real, other=0.0)
    top, total = tl.full([HEADS], FLOOR, tl.float32), tl.zeros([HEADS], tl.float32)
    o = tl.zeros([HEADS, 2 * WIDE], tl.float32)
    for tile in tl.range(0, last):  # the window's, then the entries': one loop, which never runs dry between
        index_ptr, base_ptr, count, fill = read_ptr, window_ptr, W, some
        start = (first + tile) * BLOCK + tl.arange(0, BLOCK)
        if chosen_ptr is not None:
            own = tile < tiles
            index_ptr, base_ptr = tl.where(own, read_ptr, chosen_ptr), tl.where(own, window_ptr, entry_ptr)
            count, fill = tl.where(own, W, K), tl.where(own, some, entry_some)
            start = tl.where(own, start, start + (entry_first - first - tiles) * BLOCK)
        row = tl.load(index_ptr + start, start < count, other=-1)
        v = _load(base_ptr + tl.where(row < 0, fill, row)[:, None] * (2 * WIDTH) + channel,
                  channel < 2 * WIDTH, WIDTH < WIDE)
        z = tl.zeros([HEADS, BLOCK], tl.float32)
        p, fade = to_bf16(z), tl.zeros_like(top)
        if tile < last:  # always: see _attend
            z = tl.where((row >= 0)[None, :], dot(q, tl.trans(v), z), float("-inf"))
            new = tl.maximum(top, tl.max(z, axis=1) * scale)
            fade, weight = tl.exp2(top - new), rounded_bf16(tl.exp2(z * scale - new[:, None]))
            top, total, p = new, total * fade + tl.sum(weight, axis=1), to_bf16(weight)
        o = dot(p, v, o * fade[:, None])
    sink = tl.load(sink_ptr + head, head < A, other=0.0)
    total += tl.exp2(sink * LOG2E - top)
    tl.store(out_ptr + at, to_bf16(o * (1.0 / tl.where(total > 0, total, 1.0))[:, None]), real)
    tl.debug_barrier()
    last_pairs = WIDTH - TURNS + tl.arange(0, WIDE_TURNS)
    _turn(out_word_ptr, out_word_ptr, turn_ptr, token, head, last_pairs, A, WIDTH, TURNS, True)


# ---- launches ----------------------------------------------------------------------------------------------

def _form(cache: Tensor, packing: Any, width: int) -> tuple:
    """How rows of a cache are read, in pairs: kind, group, coded, width, scales, where they are, bytes."""
    if cache.dtype != torch.uint8:
        return "bf16", 1, width // 2, width // 2, 0, 0, 2 * width
    kind, group = common.layout(packing.fmt)
    codes, tail, scales, _ = packing.parts
    return kind, group // 2, packing.coded // 2, width // 2, scales, codes + tail, packing.nbytes


def _views(cache: Tensor, form: tuple) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """A cache as its codes (bytes or two of them), its bytes and its words; None where not needed."""
    if form[0] == "bf16":
        return None, None, cache.view(torch.int32)
    tail = cache.view(torch.int32) if form[2] < form[3] else None
    return cache.view(torch.int16) if form[0] == "fp8" else cache, cache, tail


def _checked(cache: Tensor, rows: Tensor, packing: Any, tokens: int, width: int, name: str) -> None:
    wide = packing.nbytes if cache.dtype == torch.uint8 else width
    require(cache.is_contiguous() and cache.shape[1:] == (wide,), name, f"must be contiguous [S, {wide}]")
    require(rows.dim() == 2 and len(rows) == tokens, f"rows of {name}", f"must be [{tokens}, any]")


def splits(programs: int, tiles: int, free: int) -> tuple[int, int]:
    """(programs that share a row's tiles, tiles of each): as many as the GPU has room for."""
    per = max(1, cdiv(tiles, max(1, min(tiles, free // programs, MOST_SPLITS))))
    return max(1, cdiv(tiles, per)), per


def parts(out: Tensor, splits: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Memory for undivided sums of a row's parts, and for their maxima and sums of weights."""
    if splits == 1:
        return None, None
    T, A, H = out.shape
    return (out.new_empty(T, splits, A, H, dtype=torch.float32),
            out.new_empty(T, splits, A, 2, dtype=torch.float32))


def join(sums: Tensor | None, stats: Tensor | None, turn: Tensor, sink: Tensor, out: Tensor, wide: int,
         quantum: int = 0) -> None:
    """Join the parts of rows, where there are any, into words of outputs."""
    if sums is None:
        return
    T, splits, A, H = sums.shape
    heads = min(JOINED_HEADS, pow2(A))
    _mla_join_fwd_kernel[(T * cdiv(A, heads),)](
        sums, stats, turn, sink, out, splits, A=A, HEADS=heads, WIDTH=H // 2, TURNS=turn.shape[1],
        QUANTUM=quantum, WIDE=wide, num_warps=4)


def _odd(cache: Tensor | None, packing: Any) -> str | None:
    """Why rows of a cache are beyond the kernel, or None."""
    if cache is None or cache.dtype == torch.bfloat16:
        return None
    if cache.dtype != torch.uint8:
        return f"a cache of {cache.dtype}; the kernel reads bytes and bfloat16"
    if packing.tail % 2 or (packing.tail and not packing.fmt.startswith("fp8")):
        return f"{packing.tail} channels left in bfloat16, in {packing.fmt}"
    return "rows that are no whole words" if packing.tail and packing.nbytes % 4 else None


def _cannot(q: Tensor, turn: Tensor, window: Tensor, read: Tensor, entries: Tensor | None,
            chosen: Tensor | None, sink: Tensor, dtype: torch.dtype, packings: tuple | None = None,
            fmt: str | None = None, steady: bool = False) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    if q.dtype != torch.bfloat16 or dtype != torch.bfloat16:
        return f"queries of {q.dtype} and outputs of {dtype}; the kernel takes bfloat16"
    if q.shape[-1] % 2:
        return f"heads of {q.shape[-1]} channels, which are no pairs"
    if fmt is not None and not fmt.startswith("fp8"):
        return f"outputs in {fmt}; the kernel quantises to fp8"
    window_packing, entry_packing = packings or (None, None)
    return (_odd(window, window_packing) or _odd(entries, entry_packing)
            or refuse(q, turn, window, read, entries, chosen, sink))


# ---- the op ------------------------------------------------------------------------------------------------

@ops.implement("mla.attend_cached", "triton", when=_cannot)
def attend_cached(q_TAH: Tensor, turn_T: Tensor, window_SH: Tensor, read_TW: Tensor,
                  entries_SH: Tensor | None, chosen_TK: Tensor | None, sink_A: Tensor, dtype: torch.dtype,
                  packings: tuple | None = None, fmt: str | None = None, steady: bool = False) -> Tensor:
    """Attention over window and chosen entries, rotated in and back out: [T, A, H] of bfloat16."""
    T, A, H = q_TAH.shape
    W, K = read_TW.shape[1], 0 if chosen_TK is None else chosen_TK.shape[1]
    window_packing, entry_packing = packings or (None, None)
    require(turn_T.shape[0] == T and 2 * turn_T.shape[1] <= H, "turn_T", f"must be [{T}, at most {H // 2}]")
    require(sink_A.shape == (A,), "sink_A", f"must be [{A}]")
    _checked(window_SH, read_TW, window_packing, T, H, "window_SH")
    if entries_SH is not None:
        _checked(entries_SH, chosen_TK, entry_packing, T, H, "entries_SH")
    out = torch.empty(T, A, H, dtype=dtype, device=q_TAH.device)
    if not T:
        return out
    turn = torch.view_as_real(turn_T.resolve_conj().contiguous()).view(torch.int64)
    sink, out_words = sink_A.detach().float(), out.view(torch.int32)
    q, read_TW = q_TAH.contiguous().view(torch.int32), read_TW.contiguous()
    entries_SH, chosen_TK = (entries_SH, chosen_TK.contiguous()) if K else (None, None)
    if fmt is None and common.capability(q) == 90:
        from dskit.kernels import hopper, hopper_numbers  # which cannot be interpreted

        if packings and hopper.takes(q_TAH, window_SH, packings):
            hopper.attend(q, turn, window_SH, read_TW, entries_SH, chosen_TK, sink, out_words, steady)
            return out
        if hopper_numbers.takes(q_TAH, turn_T, window_SH, entries_SH, max(W, K)):
            hopper_numbers.attend(q, turn, window_SH, read_TW, entries_SH, chosen_TK, sink, out_words)
            return out
    window_form = _form(window_SH, window_packing, H)
    entry_form = _form(entries_SH, entry_packing, H) if K else window_form
    config = up_to(TAILED if window_form[2] < window_form[3] else CONFIGS, T)
    if not steady:
        config = tuned("mla.attend_cached", (T, W, K, A, H, window_form[-1], entry_form[-1]), config)
    block = config["BLOCK"]
    quantum = common.layout(fmt)[1] // 2 if fmt else 0
    wide = max(16, window_form[1], entry_form[1], quantum, pow2(H // 2))  # pairs: whole groups
    heads = min(MOST_HEADS, max(16, pow2(A)))
    programs = T * cdiv(A, heads)
    split, per = splits(programs, cdiv(W, block) + cdiv(K, block), 0 if steady else processors(q_TAH))
    sizes = {"A": A, "WIDTH": H // 2, "TURNS": turn_T.shape[1]}
    ends = {"WINDOW_ENDS": pow2(W), "ENTRY_ENDS": pow2(K)}
    if split == 1 and fmt is None and window_form[0] == entry_form[0] == "bf16":
        config = up_to(NUMBERS, T)
        if not steady:
            config = tuned("mla.attend_cached/numbers", (T, W, K, A, H), config)
        _mla_attend_numbers_fwd_kernel[(programs,)](
            q, turn, window_SH, read_TW, entries_SH, chosen_TK, sink, out, out_words, W, K,
            H**-0.5 * LOG2E.value, HEADS=heads, WIDE=wide, WIDE_TURNS=pow2(sizes["TURNS"]), **ends, **sizes,
            **config)
        return out
    sums, stats = parts(out, split)
    _mla_attend_cached_fwd_kernel[(programs * split,)](
        q, turn, *_views(window_SH, window_form), read_TW,
        *(_views(entries_SH, entry_form) if K else (None, None, None)), chosen_TK, sink, out_words, out, sums,
        stats, W, K, split, per, H**-0.5 / UNIT.value * LOG2E.value, window_form, entry_form, HEADS=heads,
        WIDE=wide, QUANTUM=quantum, **ends, **sizes, **config)
    join(sums, stats, turn, sink, out_words, wide, quantum)
    return out
