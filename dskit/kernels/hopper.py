"""Attention over packed caches with a warp group for each of its steps, for Hopper.

Idea
    One after the other, restoring a tile, scoring it, weighing it and adding it up leave tensor cores idle
    most of the time.  Here each step has four warps of its own, and they hand tiles on through shared memory:

        bring   64 rows of bytes -> bfloat16      | K | K |   restored once, keys and values both
        weigh   z = q K^T, softmax                | P | P |   weights, and what earlier sums fade by
        add up  o = fade o + P K, twice: each of two groups has half of the channels of all 64 heads

    Between two stand barriers, full and empty.  A program keeps its processor and takes one item after the
    other, a row or a part of its tiles, so that the next row's tiles come while the last one is stored.  Its
    queries and indices are sent for one item ahead.

    Channels stand as in mla.py, firsts of pairs apart from seconds, half of the pairs in one buffer
    [firsts | seconds] and half in another: a thread of an adding group holds both numbers of a pair and can
    rotate them back.  Codes become bfloat16 by moving their bits to where a bfloat16 has them, which is some
    power of two too small, and a product with the scale.

Shapes
    As of mla.attend_cached: 64 heads of 512 channels, window rows of 528 bytes (e4m3 in groups of 32),
    entries of 288 (e2m1 in groups of 16).

Units
    Of the 64K registers a thread of each adding group has 160, of `weigh` 72, of `bring` 120.  Shared memory:
    64 KB queries, two tiles of 64 KB, two of 8 KB of weights.

Errors
    Gluon, in which this is written, is compiled only: `takes` says for what.  mla.py has kernels for the
    rest and for the interpreter.

Source
    kernels.md 1.3, 2.1 to 2.3.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dskit.kernels import common, mla

HEADS, PAIRS = 64, 256
REGISTERS = 160, 72, 120  # a thread of an adding group, of `weigh`, of `bring`
FLOOR, LOG2E, UNIT = (gl.constexpr(one.value) for one in (mla.FLOOR, mla.LOG2E, mla.UNIT))
E2M1_TIMES = mla.E2M1_TIMES
bf16_pair, from_bf16_pair, from_fp32_pair, rounded_bf16 = (
    gluon.jit(helper.fn) for helper in (common.bf16_pair, common.from_bf16_pair, common.from_fp32_pair,
                                        common.rounded_bf16))

# copies to shared memory, by threads and by an engine: Triton 3.8 gave them other names
copy, engine_copy = (getattr(each, "async_load", None) or each.async_copy_global_to_shared
                     for each in (async_copy, tma))

# two pairs of e4m3 in $2, their scales times 2^120 in $3; zero: -0, which changes no product
E4M3_TIMES = gl.constexpr("""{
        .reg .b32 code, sign, zero;
        mov.b32 zero, 0x80008000;
        shl.b32 code, $2, 4;
        shl.b32 sign, $2, 8;
        and.b32 code, code, 0x07F007F0;
        lop3.b32 code, sign, 0x80008000, code, 0xEA;
        fma.rn.bf16x2 $0, code, $3, zero;
        shr.b32 code, $2, 4;
        and.b32 code, code, 0x07F007F0;
        lop3.b32 code, $2, 0x80008000, code, 0xEA;
        fma.rn.bf16x2 $1, code, $3, zero;
    }""")

# Layouts, of four warps each.  A half row of codes lies in lanes so that what they restore meets no other
# lane's bank; groups [rows, groups, pairs] are how its scales lie beside it.
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
FP4 = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [2, 2], [1, 0]))
FP4_GROUPS = gl.constexpr(gl.SliceLayout(2, gl.BlockedLayout([1, 2, 8], [8, 4, 1], [2, 2, 1], [2, 1, 0])))
FP8 = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [2, 2], [1, 0]))
FP8_GROUPS = gl.constexpr(gl.SliceLayout(2, gl.BlockedLayout([1, 1, 8], [4, 4, 2], [2, 2, 1], [2, 1, 0])))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


# ---- which tiles an item has -------------------------------------------------------------------------------

@gluon.jit
def _both(low, high, some, other_low, other_high, other_some):
    return gl.minimum(low, other_low), gl.maximum(high, other_high), gl.maximum(some, other_some)


@gluon.jit
def _list(index_ptr, count, WIDE: gl.constexpr):
    at = gl.arange(0, WIDE, LINE)
    return gl.load(index_ptr + at, at < count, other=-1).to(gl.int32)


@gluon.jit
def _span(index, count, begin, end):
    """(first tile, tiles) of begin .. end that hold real indices or lie between them, and a real index."""
    at, real = gl.arange(0, index.shape[0], LINE), index >= 0
    low, high, some = gl.reduce((gl.where(real, at, count), gl.where(real, at + 1, 0), index), 0, _both)
    first = gl.maximum(begin, low // 64)
    return first, gl.maximum(gl.minimum(end, gl.cdiv(high, 64)) - first, 0), gl.maximum(some, 0)


@gluon.jit
def _spans(item, read_ptr, chosen_ptr, W, K, splits, per, READ_WIDE: gl.constexpr,
           CHOSEN_WIDE: gl.constexpr):
    """An item's row, and the spans of its `per` tiles: the window's, then the entries'."""
    token, begin = (item // splits).to(gl.int64), item % splits * per
    read = _list(read_ptr + token * W, W, READ_WIDE)
    if chosen_ptr is not None:  # both are on their way before one is looked at
        chosen = _list(chosen_ptr + token * K, K, CHOSEN_WIDE)
    window, entry = _span(read, W, begin, begin + per), (0, 0, 0)
    if chosen_ptr is not None:
        begin -= gl.cdiv(W, 64)
        entry = _span(chosen, K, gl.maximum(begin, 0), begin + per)
    return token, window, entry


# ---- bring -------------------------------------------------------------------------------------------------

@gluon.jit
def _rows(index_ptr, at, end, LAYOUT: gl.constexpr):
    """32 rows to read, -1 for none."""
    at += gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    return gl.load(index_ptr + at, at < end, other=-1).to(gl.int32)


@gluon.jit
def _coded(code_ptr, byte_ptr, row, some, SIDE: gl.constexpr, E2M1: gl.constexpr):
    """Codes and scales of one half of the pairs of 32 rows; a row that is read anyway in place of none."""
    LAYOUT: gl.constexpr = FP4 if E2M1 else FP8
    GROUPS: gl.constexpr = FP4_GROUPS if E2M1 else FP8_GROUPS
    COUNT: gl.constexpr = 16 if E2M1 else 8  # scales of a half
    NBYTES: gl.constexpr = 288 if E2M1 else 528
    row = gl.where(row < 0, some, row).to(gl.int64)
    pair = 128 * SIDE + gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))[None, :]
    code = gl.load(code_ptr + row[:, None] * (NBYTES if E2M1 else NBYTES // 2) + pair)
    group = NBYTES + COUNT * (SIDE - 2) + gl.arange(0, COUNT, gl.SliceLayout(0, GROUPS))[None, :]
    row = gl.convert_layout(row, gl.SliceLayout(1, GROUPS))
    return code, gl.load(byte_ptr + row[:, None] * NBYTES + group)


@gluon.jit
def _spread(value, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """One value per group [32, groups] -> the same for each pair of the group."""
    groups = value[:, :, None].broadcast_to(32, 128 // COUNT, COUNT)
    return gl.convert_layout(groups.reshape([32, 128]), LAYOUT)


@gluon.jit
def _put(coded, to, E2M1: gl.constexpr):
    """Restore codes [32, 128 pairs] times UNIT and store them as [firsts | seconds]."""
    code, scale = coded
    if E2M1:
        scale = scale.to(gl.float8e4nv, bitcast=True).to(gl.float32) * (2.0**126 * UNIT)
        scale = _spread(scale.to(gl.bfloat16), 8, FP4)
        a, b = gl.inline_asm_elementwise(E2M1_TIMES, "=r,=r,=r,=r,r,r,r", [code, scale],
                                         dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4)
    else:
        power = gl.minimum(scale.to(gl.int32) + 112, 254) << 7  # times 2^120 UNIT
        scale = _spread(power.to(gl.uint16).to(gl.bfloat16, bitcast=True), 16, FP8)
        a, b = gl.inline_asm_elementwise(E4M3_TIMES, "=r,=r,r,r", [code, scale],
                                         dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2)
    to.slice(0, 128, dim=1).store(a)
    to.slice(128, 128, dim=1).store(b)


@gluon.jit
def _full(barrier):
    """Let other warps, and tensor cores, read what was stored."""
    fence_async_shared()
    tl.debug_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _bring_tiles(n, k_smem, bias_smem, k_full, k_empty, code_ptr, byte_ptr, index_ptr, span, count,
                 E2M1: gl.constexpr):
    LAYOUT: gl.constexpr = FP4 if E2M1 else FP8
    first, tiles, some = span
    end = gl.minimum(count, (first + tiles) * 64)
    upper, lower = _rows(index_ptr, first * 64, end, LAYOUT), _rows(index_ptr, first * 64 + 32, end, LAYOUT)
    for tile in range(first, first + tiles):
        stage = n % 2
        a = _coded(code_ptr, byte_ptr, upper, some, 0, E2M1)
        b = _coded(code_ptr, byte_ptr, lower, some, 0, E2M1)
        if E2M1:  # registers hold codes of a whole tile; of e4m3 half of them
            c = _coded(code_ptr, byte_ptr, upper, some, 1, E2M1)
            d = _coded(code_ptr, byte_ptr, lower, some, 1, E2M1)
        mbarrier.wait(k_empty.index(stage), (n // 2 & 1) ^ 1)
        bias_smem.index(stage).slice(0, 32).store(gl.where(upper < 0, float("-inf"), 0.0))
        bias_smem.index(stage).slice(32, 32).store(gl.where(lower < 0, float("-inf"), 0.0))
        left, right = k_smem.index(2 * stage), k_smem.index(2 * stage + 1)
        _put(a, left.slice(0, 32), E2M1)
        if not E2M1:
            c = _coded(code_ptr, byte_ptr, upper, some, 1, E2M1)
        _put(b, left.slice(32, 32), E2M1)
        _full(k_full.index(2 * stage))
        if not E2M1:
            d = _coded(code_ptr, byte_ptr, lower, some, 1, E2M1)
        upper, lower = (_rows(index_ptr, tile * 64 + 64, end, LAYOUT),
                        _rows(index_ptr, tile * 64 + 96, end, LAYOUT))
        _put(c, right.slice(0, 32), E2M1)
        _put(d, right.slice(32, 32), E2M1)
        _full(k_full.index(2 * stage + 1))
        n += 1
    return n


@gluon.jit
def _bring(k_smem, bias_smem, k_full, k_empty, window_code_ptr, window_ptr, entry_ptr, read_ptr, chosen_ptr,
           items, W, K, splits, per, READ_WIDE: gl.constexpr, CHOSEN_WIDE: gl.constexpr):
    n = 0  # tiles so far
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token, window, entry = _spans(item, read_ptr, chosen_ptr, W, K, splits, per, READ_WIDE, CHOSEN_WIDE)
        n = _bring_tiles(n, k_smem, bias_smem, k_full, k_empty, window_code_ptr, window_ptr,
                         read_ptr + token * W, window, W, False)
        if chosen_ptr is not None:
            n = _bring_tiles(n, k_smem, bias_smem, k_full, k_empty, entry_ptr, entry_ptr,
                             chosen_ptr + token * K, entry, K, True)


# ---- weigh -------------------------------------------------------------------------------------------------

@gluon.jit
def _turns(turn_ptr, token, pair, COUNT: gl.constexpr, TURNS: gl.constexpr):
    """(whether pairs turn, cosines, sines) of the last COUNT pairs of a head, [1, pairs]."""
    turned = pair >= COUNT - TURNS
    c, s = from_fp32_pair(gl.load(turn_ptr + token * TURNS + pair - (COUNT - TURNS), turned, other=0))
    return turned[None, :], c[None, :], s[None, :]


@gluon.jit
def _queries(q_ptr, turn_ptr, q_smem, q_full, token, TURNS: gl.constexpr, SIDE: gl.constexpr):
    """Rotate half of the pairs of a row's queries on their way to shared memory."""
    head = gl.arange(0, 64, gl.SliceLayout(1, WORDS))[:, None]
    pair = gl.arange(0, 128, gl.SliceLayout(0, WORDS))
    at = (token * 64 + head) * 256 + 128 * SIDE + pair[None, :]
    a, b = from_bf16_pair(gl.load(q_ptr + at).to(gl.uint32, bitcast=True))
    if SIDE:
        turned, c, s = _turns(turn_ptr, token, pair, 128, TURNS)
        a, b = gl.where(turned, a * c - b * s, a), gl.where(turned, a * s + b * c, b)
    q_smem.index(SIDE).slice(0, 128, dim=1).store(a.to(gl.bfloat16))
    q_smem.index(SIDE).slice(128, 128, dim=1).store(b.to(gl.bfloat16))
    _full(q_full)


@gluon.jit
def _prefetch(ptr):
    """Have lines of 128 bytes in the L2."""
    gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptr.to(gl.int64)],
                              dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _expect(q_ptr, read_ptr, chosen_ptr, token, W, K, READ_WIDE: gl.constexpr, CHOSEN_WIDE: gl.constexpr):
    """Prefetch the queries and indices of a row: 32 words and 16 indices are a line."""
    _prefetch(q_ptr + token * (64 * 256) + 32 * gl.arange(0, 512, LINE))
    _prefetch(read_ptr + token * W + gl.minimum(gl.arange(0, READ_WIDE, LINE), W - 1))
    if chosen_ptr is not None:
        _prefetch(chosen_ptr + token * K + gl.minimum(gl.arange(0, CHOSEN_WIDE, LINE), K - 1))


@gluon.jit
def _weigh(q_smem, k_smem, bias_smem, p_smem, fade_smem, share_smem, q_full, k_full, p_full, p_empty,
           share_full, share_empty, q_ptr, read_ptr, chosen_ptr, sink_ptr, stat_ptr, items, W, K, splits, per,
           scale, READ_WIDE: gl.constexpr, CHOSEN_WIDE: gl.constexpr):
    HEAD: gl.constexpr = gl.SliceLayout(1, SCORES)
    head = gl.arange(0, 64, HEAD)
    n, done = 0, 0  # tiles and items so far
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _, window, entry = _spans(item, read_ptr, chosen_ptr, W, K, splits, per, READ_WIDE, CHOSEN_WIDE)
        following = gl.minimum(item + gl.num_programs(0), items - 1) // splits
        _expect(q_ptr, read_ptr, chosen_ptr, following.to(gl.int64), W, K, READ_WIDE, CHOSEN_WIDE)
        mbarrier.wait(q_full, done & 1)
        top, total = gl.full([64], FLOOR, gl.float32, HEAD), gl.full([64], 0.0, gl.float32, HEAD)
        for _ in range(window[1] + entry[1]):
            stage, phase = n % 2, n // 2 & 1
            z = gl.full([64, 64], 0.0, gl.float32, SCORES)
            for side in gl.static_range(2):
                mbarrier.wait(k_full.index(2 * stage + side), phase)
                q = q_smem.index(side + (n >> 30))  # + 0: 32 addresses that never change would fill registers
                z = warpgroup_mma(q, k_smem.index(2 * stage + side).permute((1, 0)), z, use_acc=side == 1,
                                  is_async=True)
            bias = bias_smem.index(stage).load(gl.SliceLayout(0, SCORES))
            z = warpgroup_mma_wait(0, deps=(z,)) * scale + bias[None, :]
            new = gl.maximum(top, gl.max(z, 1))
            fade, weight = gl.exp2(top - new), rounded_bf16(gl.exp2(z - new[:, None]))
            top, total = new, total * fade + gl.sum(weight, 1)
            mbarrier.wait(p_empty.index(stage), phase ^ 1)
            p_smem.index(stage).store(weight.to(gl.bfloat16))
            fade_smem.index(stage).store(fade)
            _full(p_full.index(stage))
            n += 1
        if stat_ptr is None:
            total += gl.exp2(gl.load(sink_ptr + head) * LOG2E - top)
            mbarrier.wait(share_empty, (done & 1) ^ 1)
            share_smem.store(1.0 / gl.where(total > 0, total * UNIT, 1.0))
            _full(share_full)
        else:
            at = 2 * (item.to(gl.int64) * 64 + head)
            gl.store(stat_ptr + at, top)
            gl.store(stat_ptr + at + 1, total)
        done += 1  # noqa: SIM113 - there is no enumerate on a GPU


# ---- add up ------------------------------------------------------------------------------------------------

@gluon.jit
def _add_up(q_smem, k_smem, p_smem, fade_smem, share_smem, q_full, k_empty, p_full, p_empty, share_full,
            share_empty, q_ptr, turn_ptr, read_ptr, chosen_ptr, out_ptr, sum_ptr, items, W, K, splits, per,
            TURNS: gl.constexpr, READ_WIDE: gl.constexpr, CHOSEN_WIDE: gl.constexpr, SIDE: gl.constexpr):
    head = gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    pair = gl.arange(0, 128, gl.SliceLayout(0, SUMS))
    n, done = 0, 0  # tiles and items so far
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token = (item // splits).to(gl.int64)
        _queries(q_ptr, turn_ptr, q_smem, q_full, token, TURNS, SIDE)  # the last row's were all multiplied
        _, window, entry = _spans(item, read_ptr, chosen_ptr, W, K, splits, per, READ_WIDE, CHOSEN_WIDE)
        o = gl.full([64, 256], 0.0, gl.float32, SUMS)
        for _ in range(window[1] + entry[1]):
            stage = n % 2
            mbarrier.wait(p_full.index(stage), n // 2 & 1)
            o *= fade_smem.index(stage).load(gl.SliceLayout(1, SUMS))[:, None]
            o = warpgroup_mma(p_smem.index(stage), k_smem.index(2 * stage + SIDE), o, is_async=True)
            o = warpgroup_mma_wait(0, deps=(o,))
            tl.debug_barrier()
            mbarrier.arrive(p_empty.index(stage), count=1)
            mbarrier.arrive(k_empty.index(stage), count=1)
            n += 1
        a, b = o.reshape([64, 2, 128]).permute([0, 2, 1]).split()
        a, b = gl.convert_layout(a, SUMS), gl.convert_layout(b, SUMS)
        if sum_ptr is None:
            mbarrier.wait(share_full, done & 1)
            share = share_smem.load(gl.SliceLayout(1, SUMS))[:, None]
            tl.debug_barrier()
            mbarrier.arrive(share_empty, count=1)
            done += 1
            a, b = a * share, b * share
            if SIDE:
                turned, c, s = _turns(turn_ptr, token, pair, 128, TURNS)
                a, b = gl.where(turned, a * c + b * s, a), gl.where(turned, b * c - a * s, b)
            at = (token * 64 + head[:, None]) * 256 + 128 * SIDE + pair[None, :]
            gl.store(out_ptr + at, bf16_pair(a, b).to(gl.int32, bitcast=True))
        else:
            at = (item.to(gl.int64) * 64 + head[:, None]) * 512 + 128 * SIDE + pair[None, :]
            gl.store(sum_ptr + at, a)
            gl.store(sum_ptr + at + 256, b)


# ---- all of them -------------------------------------------------------------------------------------------

@gluon.jit
def _barriers(COUNT: gl.constexpr, arrivals: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.jit(do_not_specialize=["items", "W", "K", "splits", "per"])
def _mla_attend_hopper_fwd_kernel(q_ptr, turn_ptr, window_code_ptr, window_ptr, read_ptr, entry_ptr,
                                  chosen_ptr, sink_ptr, out_ptr, sum_ptr, stat_ptr, items, W, K, splits, per,
                                  scale, TURNS: gl.constexpr, READ_WIDE: gl.constexpr,
                                  CHOSEN_WIDE: gl.constexpr, REGISTERS: gl.constexpr):
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    LIST: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], TILE)
    k = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 256], TILE)
    p = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], TILE)
    bias = gl.allocate_shared_memory(gl.float32, [2, 64], LIST)
    fade = gl.allocate_shared_memory(gl.float32, [2, 64], LIST)
    share = gl.allocate_shared_memory(gl.float32, [64], LIST)
    q_full = _barriers(1, 2).index(0)
    k_full, k_empty = _barriers(4, 1), _barriers(2, 2)
    p_full, p_empty = _barriers(2, 1), _barriers(2, 2)
    share_full, share_empty = _barriers(1, 1).index(0), _barriers(1, 2).index(0)
    gl.warp_specialize([
        (_add_up, (q, k, p, fade, share, q_full, k_empty, p_full, p_empty, share_full, share_empty, q_ptr,
                   turn_ptr, read_ptr, chosen_ptr, out_ptr, sum_ptr, items, W, K, splits, per, TURNS,
                   READ_WIDE, CHOSEN_WIDE, 0)),
        (_add_up, (q, k, p, fade, share, q_full, k_empty, p_full, p_empty, share_full, share_empty, q_ptr,
                   turn_ptr, read_ptr, chosen_ptr, out_ptr, sum_ptr, items, W, K, splits, per, TURNS,
                   READ_WIDE, CHOSEN_WIDE, 1)),
        (_weigh, (q, k, bias, p, fade, share, q_full, k_full, p_full, p_empty, share_full, share_empty, q_ptr,
                  read_ptr, chosen_ptr, sink_ptr, stat_ptr, items, W, K, splits, per, scale, READ_WIDE,
                  CHOSEN_WIDE)),
        (_bring, (k, bias, k_full, k_empty, window_code_ptr, window_ptr, entry_ptr, read_ptr, chosen_ptr,
                  items, W, K, splits, per, READ_WIDE, CHOSEN_WIDE)),
    ], [4, 4, 4], [REGISTERS[0], REGISTERS[1], REGISTERS[2]])


# ---- on the host -------------------------------------------------------------------------------------------

def takes(q_TAH: Tensor, window_SH: Tensor, packings: tuple) -> bool:
    """Whether these queries, over caches packed so, are for this kernel."""
    formats = [(packing.fmt, packing.tail) for packing in packings]
    return (q_TAH.shape[1:] == (HEADS, 2 * PAIRS) and window_SH.dtype == torch.uint8
            and formats == [("fp8_32", 0), ("fp4_16", 0)])


def attend(q: Tensor, turn: Tensor, window: Tensor, read: Tensor, entries: Tensor | None,
           chosen: Tensor | None, sink: Tensor, out: Tensor, steady: bool) -> None:
    """Attention by words of queries and outputs [T, HEADS, PAIRS], with whole turns in a word [T, turns]."""
    (T, W), K = read.shape, 0 if chosen is None else chosen.shape[1]
    processors = common.processors(q)
    splits, per = mla.splits(T, common.cdiv(W, 64) + common.cdiv(K, 64), 0 if steady else processors)
    sums, stats = mla.parts(out.view(torch.bfloat16), splits)
    items = T * splits
    _mla_attend_hopper_fwd_kernel[(min(items, processors),)](
        q, turn, window.view(torch.int16), window, read, entries, chosen, sink, out, sums, stats, items, W, K,
        splits, per, (2 * PAIRS)**-0.5 / UNIT.value * LOG2E.value, TURNS=turn.shape[1],
        READ_WIDE=common.pow2(W), CHOSEN_WIDE=common.pow2(K), REGISTERS=REGISTERS, num_warps=4)
    mla.join(sums, stats, turn, sink, out, PAIRS)
