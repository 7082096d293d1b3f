"""Attention over caches that hold numbers with a warp group for each of its steps, for Hopper.

Idea
    As in hopper.py, but rows are numbers already, so `bring` only sends for them: they go from memory to
    shared memory without passing through registers, and channels keep their order.

        bring   64 rows of bfloat16               | K | K |   keys and values both
        weigh   z = q K^T, softmax                | P | P |   weights, and what earlier sums fade by
        add up  o = fade o + P K, twice: each of two groups has half of the channels of all 64 heads

    Loads wait behind copies that were sent for before them.  So `bring` alone looks at a row's indices, turns
    and queries to rotate, after two tiles of the row before and while those come, and tells others through
    shared memory what they need: the tiles, which of their rows are none, what pairs turn by.

    A quarter of a tile's channels is sent for as soon as what lay there is added up, a row's queries as soon
    as the last row's are multiplied, while that one is still weighed, added up and stored.

Shapes
    As of mla.attend_cached: 64 heads of 512 channels of which at most 64 turn, and at most 512 rows of either
    kind to read.

Units
    Of the 64K registers a thread of each adding group has 160, of `weigh` and of `bring` 96.  Shared memory:
    64 KB queries, two tiles of 64 KB, two of 8 KB of weights, indices of two rows in up to 8 KB.

Errors
    Gluon, in which this is written, is compiled only: `takes` says for what.  mla.py has kernels for the
    rest and for the interpreter.

Source
    kernels.md 1.3, 2.3.
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
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dskit.kernels import common
from dskit.kernels.hopper import (
    FLOOR,
    HEADS,
    LINE,
    LOG2E,
    PAIRS,
    SCORES,
    SUMS,
    _barriers,
    _both,
    _full,
    _list,
    _prefetch,
    bf16_pair,
    copy,
    from_bf16_pair,
    from_fp32_pair,
    rounded_bf16,
)

MOST_TURNS, MOST_ROWS = 32, 512
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # by Triton 3.9
REGISTERS = 160, 96, 96  # a thread of an adding group, of `weigh`, of `bring`
STILL = gl.constexpr(0x3F800000)  # a turn by nothing: cosine 1, sine 0
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
COPIED = gl.constexpr(gl.SliceLayout(1, WORDS))
EACH = gl.constexpr(gl.SliceLayout(0, gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])))  # warp has all
OUT = gl.constexpr(gl.DistributedLinearLayout(  # of [64, 64]: four in a row, the 16 rows of a warp of SUMS
    [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
    [[16, 0], [32, 0]], [], [64, 64]))


# ---- what bring tells of a row -----------------------------------------------------------------------------

@gluon.jit
def _as(smem, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The same memory as int32."""
    if RENAMED:
        return smem.reinterpret(gl.int32, SHAPE, LAYOUT)
    else:
        return smem._reinterpret(gl.int32, SHAPE, LAYOUT)


@gluon.jit
def _tell(smem, number):
    smem.store(gl.full([1], 0, gl.int32, LINE) + number)


@gluon.jit
def _told(smem):
    return gl.max(smem.load(LINE), 0)


@gluon.jit
def _place(tile, first, count, gap):
    """Where a tile's rows are in the list: the window's `count` tiles, then the entries' behind a gap."""
    return first + tile + gl.where(tile < count, 0, gap)


@gluon.jit
def _span(smem):
    """(first tile, tiles) that hold real indices or lie between them, and a real index."""
    index = smem.load(EACH)
    at, real = gl.arange(0, index.shape[0], EACH), index >= 0
    low, high, some = gl.reduce((gl.where(real, at, index.shape[0]), gl.where(real, at + 64, 0), index), 0,
                                _both)
    return low // 64, gl.maximum(high // 64 - low // 64, 0), gl.maximum(some, 0)


@gluon.jit
def _look(item, seen, list_smem, told_smem, turn_smem, row_full, row_empty, q_ptr, turn_ptr, read_ptr,
          chosen_ptr, items, W, K, TURNS: gl.constexpr, READ_WIDE: gl.constexpr, CHOSEN_WIDE: gl.constexpr,
          WIDE: gl.constexpr):
    """Tell of a row; what `bring` needs of it itself: where its tiles are, rows to read in place of none, and
    the last 32 pairs of its queries, rotated, as words.
    """
    slot, token = seen % 2, gl.minimum(item, items - 1).to(gl.int64)
    head, pair = gl.arange(0, 64, COPIED)[:, None], gl.arange(0, 32, gl.SliceLayout(0, WORDS))
    read = _list(read_ptr + token * W, W, READ_WIDE)
    if chosen_ptr is not None:  # all are on their way before one is looked at
        chosen = _list(chosen_ptr + token * K, K, CHOSEN_WIDE)
    word = gl.load(q_ptr + (token * 64 + head) * 256 + 224 + pair[None, :])
    turn = gl.load(turn_ptr + token * TURNS + pair - (32 - TURNS), pair >= 32 - TURNS, other=STILL)
    following = gl.minimum(item + gl.num_programs(0), items - 1).to(gl.int64)
    _prefetch(q_ptr + following * (64 * 256) + 32 * gl.arange(0, 512, LINE))
    mbarrier.wait(row_empty.index(slot), (seen // 2 & 1) ^ 1)
    rows = _as(list_smem, [4, WIDE], FLAT)
    rows.index(2 * slot).slice(0, READ_WIDE).store(read)
    if chosen_ptr is not None:
        rows.index(2 * slot + 1).slice(0, CHOSEN_WIDE).store(chosen)
    turn_smem.index(slot).slice(32, 32).store(turn)
    a, b = from_bf16_pair(word.to(gl.uint32, bitcast=True))
    c, s = from_fp32_pair(turn)
    c, s = c[None, :], s[None, :]
    last = bf16_pair(a * c - b * s, a * s + b * c).to(gl.int32, bitcast=True)
    tl.debug_barrier()
    window, entry = _span(rows.index(2 * slot).slice(0, READ_WIDE)), (0, 0, 0)
    if chosen_ptr is not None:
        entry = _span(rows.index(2 * slot + 1).slice(0, CHOSEN_WIDE))
    gap, tiles = WIDE // 64 + entry[0] - window[0] - window[1], window[1] + entry[1]
    _tell(told_smem.index(4 * slot), window[0])
    _tell(told_smem.index(4 * slot + 1), window[1])
    _tell(told_smem.index(4 * slot + 2), gap)
    _tell(told_smem.index(4 * slot + 3), tiles)
    tl.debug_barrier()
    mbarrier.arrive(row_full.index(slot), count=1)
    return window[0], window[1], gap, tiles, window[2], entry[2], last


# ---- bring -------------------------------------------------------------------------------------------------

@gluon.jit
def _words(tile):
    """A tile of bfloat16 as words of two."""
    return _as(tile, [64, 128], gl.NVMMASharedLayout(128, 32))


@gluon.jit
def _send_queries(at, to, full, PARTS: gl.constexpr):
    """Send for half of the channels of 64 heads, or for less, 128 bytes of a head after the other."""
    for part in gl.static_range(PARTS):
        copy(_words(to).slice(32 * part, 32, dim=1), at + 32 * part)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _send_tiles(begin, end, n, done, seen, first, count, gap, some_window, some_entry, last, q_at, q_smem,
                k_smem, list_smem, q_full, q_empty, k_full, k_empty, window_ptr, entry_ptr,
                WIDE: gl.constexpr):
    """Send for some of a row's tiles, and after the first of them for its queries."""
    pair = gl.arange(0, 64, gl.SliceLayout(0, WORDS))
    for tile in range(begin, end):
        row = list_smem.index(seen % 2 * (WIDE // 32) + _place(tile, first, count, gap)).load(COPIED)
        word_ptr, some = window_ptr, some_window
        if entry_ptr is not None:
            own = tile < count
            word_ptr, some = gl.where(own, window_ptr, entry_ptr), gl.where(own, some_window, some_entry)
        row = gl.where(row < 0, some, row).to(gl.int64)  # a row that is read anyway in place of none
        at, stage, phase = word_ptr + row[:, None] * 256 + pair[None, :], n % 2, n // 2 & 1
        for side in gl.static_range(2):
            for quarter in gl.static_range(2):
                mbarrier.wait(k_empty.index(4 * stage + 2 * side + quarter), phase ^ 1)
                to = _words(k_smem.index(2 * stage + side)).slice(64 * quarter, 64, dim=1)
                copy(to, at + 128 * side + 64 * quarter)
            async_copy.mbarrier_arrive(k_full.index(2 * stage + side), increment_count=False)
        if tile == 0:
            mbarrier.wait(q_empty, (done & 1) ^ 1)
            _send_queries(q_at, q_smem.index(0), q_full.index(0), 4)
            mbarrier.arrive(q_full.index(0), count=1)
            _words(q_smem.index(1)).slice(96, 32, dim=1).store(last)
            _send_queries(q_at + 128, q_smem.index(1), q_full.index(1), 3)
            _full(q_full.index(1))
        n += 1
    return n


@gluon.jit
def _bring(q_smem, k_smem, list_smem, told_smem, turn_smem, q_full, q_empty, k_full, k_empty, row_full,
           row_empty, q_ptr, turn_ptr, window_ptr, entry_ptr, read_ptr, chosen_ptr, items, W, K,
           TURNS: gl.constexpr, READ_WIDE: gl.constexpr, CHOSEN_WIDE: gl.constexpr, WIDE: gl.constexpr):
    head, pair = gl.arange(0, 64, COPIED)[:, None], gl.arange(0, 32, gl.SliceLayout(0, WORDS))
    for slot in gl.static_range(2):
        turn_smem.index(slot).slice(0, 32).store(gl.full([32], STILL, gl.int64, LINE))
    n, done, seen = 0, 0, 0  # tiles, rows that have some, and rows so far
    first, count, gap, tiles, some_window, some_entry, last = _look(
        gl.program_id(0), seen, list_smem, told_smem, turn_smem, row_full, row_empty, q_ptr, turn_ptr,
        read_ptr, chosen_ptr, items, W, K, TURNS, READ_WIDE, CHOSEN_WIDE, WIDE)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        q_at, two = q_ptr + (item.to(gl.int64) * 64 + head) * 256 + pair[None, :], gl.minimum(tiles, 2)
        n = _send_tiles(0, two, n, done, seen, first, count, gap, some_window, some_entry, last, q_at, q_smem,
                        k_smem, list_smem, q_full, q_empty, k_full, k_empty, window_ptr, entry_ptr, WIDE)
        next_first, next_count, next_gap, next_tiles, next_window, next_entry, last = _look(
            item + gl.num_programs(0), seen + 1, list_smem, told_smem, turn_smem, row_full, row_empty, q_ptr,
            turn_ptr, read_ptr, chosen_ptr, items, W, K, TURNS, READ_WIDE, CHOSEN_WIDE, WIDE)
        n = _send_tiles(two, tiles, n, done, seen, first, count, gap, some_window, some_entry, last, q_at,
                        q_smem, k_smem, list_smem, q_full, q_empty, k_full, k_empty, window_ptr, entry_ptr,
                        WIDE)
        done, seen = done + gl.minimum(tiles, 1), seen + 1
        first, count, gap, tiles = next_first, next_count, next_gap, next_tiles
        some_window, some_entry = next_window, next_entry


# ---- weigh -------------------------------------------------------------------------------------------------

@gluon.jit
def _weigh(q_smem, k_smem, list_smem, told_smem, p_smem, fade_smem, share_smem, q_full, q_empty, k_full,
           row_full, row_empty, fade_full, p_full, share_full, share_empty, sink_ptr, items, scale,
           WIDE: gl.constexpr):
    HEAD: gl.constexpr = gl.SliceLayout(1, SCORES)
    sink = gl.load(sink_ptr + gl.arange(0, 64, HEAD)) * LOG2E
    n, done, seen = 0, 0, 0  # tiles, rows that have some, and rows so far
    for _ in range(gl.program_id(0), items, gl.num_programs(0)):
        slot = seen % 2
        mbarrier.wait(row_full.index(slot), seen // 2 & 1)
        first, count = _told(told_smem.index(4 * slot)), _told(told_smem.index(4 * slot + 1))
        gap, tiles = _told(told_smem.index(4 * slot + 2)), _told(told_smem.index(4 * slot + 3))
        top, total = gl.full([64], FLOOR, gl.float32, HEAD), gl.full([64], 0.0, gl.float32, HEAD)
        for tile in range(tiles):
            stage, phase = n % 2, n // 2 & 1
            z = gl.full([64, 64], 0.0, gl.float32, SCORES)
            for side in gl.static_range(2):
                mbarrier.wait(q_full.index(side), done & 1, pred=tile == 0)
                mbarrier.wait(k_full.index(2 * stage + side), phase)
                fence_async_shared()  # for who adds up as well
                q = q_smem.index(side + (n >> 30))  # + 0: 32 addresses that never change would fill registers
                z = warpgroup_mma(q, k_smem.index(2 * stage + side).permute((1, 0)), z, use_acc=side == 1,
                                  is_async=True)
            row = list_smem.index(slot * (WIDE // 32) + _place(tile, first, count, gap))
            real = row.load(gl.SliceLayout(0, SCORES)) >= 0
            z = warpgroup_mma_wait(0, deps=(z,))
            if tile == tiles - 1:
                tl.debug_barrier()
                mbarrier.arrive(q_empty, count=1)
            z = gl.where(real[None, :], z, float("-inf"))
            new = gl.maximum(top, gl.max(z, 1) * scale)
            fade = gl.exp2(top - new)
            fade_smem.index(stage).store(fade)  # no tile comes before what its stage had was added up
            tl.debug_barrier()
            mbarrier.arrive(fade_full.index(stage), count=1)  # sums fade while weights are computed
            weight = rounded_bf16(gl.exp2(z * scale - new[:, None]))
            p_smem.index(stage).store(weight.to(gl.bfloat16))
            _full(p_full.index(stage))
            top, total = new, total * fade + gl.sum(weight, 1)
            n += 1
        done += gl.minimum(tiles, 1)
        total += gl.exp2(sink - top)
        mbarrier.wait(share_empty, (seen & 1) ^ 1)
        share_smem.store(1.0 / gl.where(total > 0, total, 1.0))
        tl.debug_barrier()
        mbarrier.arrive(share_full, count=1)
        mbarrier.arrive(row_empty.index(slot), count=1)
        seen += 1  # noqa: SIM113 - there is no enumerate on a GPU


# ---- add up ------------------------------------------------------------------------------------------------

@gluon.jit
def _store(o, share, turn_smem, at, TURN: gl.constexpr):
    """Store a quarter of the channels; 64 pairs are turned back, of which the first 32 by nothing."""
    a, b = o.reshape([64, 64, 2]).split()
    share = gl.convert_layout(share, gl.SliceLayout(1, a.type.layout))[:, None]
    a, b = a * share, b * share
    if TURN:
        c, s = from_fp32_pair(turn_smem.load(gl.SliceLayout(0, a.type.layout)))
        c, s = c[None, :], s[None, :]
        a, b = a * c + b * s, b * c - a * s
    gl.store(at, gl.convert_layout(bf16_pair(a, b).to(gl.int32, bitcast=True), OUT))


@gluon.jit
def _add_up(k_smem, told_smem, turn_smem, p_smem, fade_smem, share_smem, k_empty, row_full, row_empty,
            fade_full, p_full, share_full, share_empty, out_ptr, items, SIDE: gl.constexpr):
    head = gl.arange(0, 64, gl.SliceLayout(1, OUT))[:, None]
    word = 128 * SIDE + gl.arange(0, 64, gl.SliceLayout(0, OUT))[None, :]
    n, seen = 0, 0  # tiles and rows so far
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        slot = seen % 2
        mbarrier.wait(row_full.index(slot), seen // 2 & 1)
        a, b = gl.full([64, 128], 0.0, gl.float32, SUMS), gl.full([64, 128], 0.0, gl.float32, SUMS)
        for _ in range(_told(told_smem.index(4 * slot + 3))):
            stage, phase = n % 2, n // 2 & 1
            mbarrier.wait(fade_full.index(stage), phase)
            fade = fade_smem.index(stage).load(gl.SliceLayout(1, SUMS))[:, None]
            a, b = a * fade, b * fade
            mbarrier.wait(p_full.index(stage), phase)
            p, k = p_smem.index(stage), k_smem.index(2 * stage + SIDE)
            a = warpgroup_mma(p, k.slice(0, 128, dim=1), a, is_async=True)
            b = warpgroup_mma(p, k.slice(128, 128, dim=1), b, is_async=True)
            a = warpgroup_mma_wait(1, deps=(a,))
            tl.debug_barrier()
            mbarrier.arrive(k_empty.index(4 * stage + 2 * SIDE), count=1)
            b = warpgroup_mma_wait(0, deps=(b,))
            tl.debug_barrier()
            mbarrier.arrive(k_empty.index(4 * stage + 2 * SIDE + 1), count=1)
            n += 1
        mbarrier.wait(share_full, seen & 1)
        share = share_smem.load(gl.SliceLayout(1, SUMS))
        at = out_ptr + (item.to(gl.int64) * 64 + head) * 256 + word
        _store(a, share, None, at, False)
        _store(b, share, turn_smem.index(slot), at + 64, SIDE == 1)
        tl.debug_barrier()
        mbarrier.arrive(share_empty, count=1)
        mbarrier.arrive(row_empty.index(slot), count=1)
        seen += 1  # noqa: SIM113


# ---- all of them -------------------------------------------------------------------------------------------

@gluon.jit(do_not_specialize=["items", "W", "K"])
def _mla_attend_numbers_hopper_fwd_kernel(q_ptr, turn_ptr, window_ptr, read_ptr, entry_ptr, chosen_ptr,
                                          sink_ptr, out_ptr, items, W, K, scale, TURNS: gl.constexpr,
                                          READ_WIDE: gl.constexpr, CHOSEN_WIDE: gl.constexpr,
                                          REGISTERS: gl.constexpr):
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    WIDE: gl.constexpr = max(READ_WIDE, CHOSEN_WIDE)
    q = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], TILE)
    k = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 256], TILE)
    p = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], TILE)
    fade = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    share = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    rows = gl.allocate_shared_memory(gl.int32, [WIDE // 16, 64], FLAT)  # of two rows, window and entries
    told = gl.allocate_shared_memory(gl.int32, [8, 1], FLAT)
    turn = gl.allocate_shared_memory(gl.int64, [2, 64], FLAT)
    # of queries 128 threads copy and one tells: by copies alone, launches that shared the GPU with other
    # processes sometimes gave other bits, for a reason that is not known (profiles/LOG.md)
    q_full, q_empty = _barriers(2, 129), _barriers(1, 1).index(0)
    k_full, k_empty = _barriers(4, 128), _barriers(8, 1)
    row_full, row_empty = _barriers(2, 1), _barriers(2, 3)
    fade_full, p_full = _barriers(2, 1), _barriers(2, 1)
    share_full, share_empty = _barriers(1, 1).index(0), _barriers(1, 2).index(0)
    gl.warp_specialize([
        (_add_up, (k, told, turn, p, fade, share, k_empty, row_full, row_empty, fade_full, p_full, share_full,
                   share_empty, out_ptr, items, 0)),
        (_add_up, (k, told, turn, p, fade, share, k_empty, row_full, row_empty, fade_full, p_full, share_full,
                   share_empty, out_ptr, items, 1)),
        (_weigh, (q, k, rows, told, p, fade, share, q_full, q_empty, k_full, row_full, row_empty, fade_full,
                  p_full, share_full, share_empty, sink_ptr, items, scale, WIDE)),
        (_bring, (q, k, rows, told, turn, q_full, q_empty, k_full, k_empty, row_full, row_empty, q_ptr,
                  turn_ptr, window_ptr, entry_ptr, read_ptr, chosen_ptr, items, W, K, TURNS, READ_WIDE,
                  CHOSEN_WIDE, WIDE)),
    ], [4, 4, 4], [REGISTERS[0], REGISTERS[1], REGISTERS[2]])


# ---- on the host -------------------------------------------------------------------------------------------

def takes(q_TAH: Tensor, turn_T: Tensor, window_SH: Tensor, entries_SH: Tensor | None, rows: int) -> bool:
    """Whether these queries, over at most so many rows of each of such caches, are for this kernel."""
    return (q_TAH.shape[1:] == (HEADS, 2 * PAIRS) and turn_T.shape[1] <= MOST_TURNS and rows <= MOST_ROWS
            and all(cache is None or cache.dtype == torch.bfloat16 for cache in (window_SH, entries_SH)))


def attend(q: Tensor, turn: Tensor, window: Tensor, read: Tensor, entries: Tensor | None,
           chosen: Tensor | None, sink: Tensor, out: Tensor) -> None:
    """Attention by words of queries and outputs [T, HEADS, PAIRS], with whole turns in a word [T, turns]."""
    (T, W), K = read.shape, 0 if chosen is None else chosen.shape[1]
    window, entries = window.view(torch.int32), None if entries is None else entries.view(torch.int32)
    _mla_attend_numbers_hopper_fwd_kernel[(min(T, common.processors(q)),)](
        q, turn, window, read, entries, chosen, sink, out, T, W, K, (2 * PAIRS)**-0.5 * LOG2E.value,
        TURNS=turn.shape[1], READ_WIDE=common.pow2(max(W, 64)), CHOSEN_WIDE=common.pow2(max(K, 64)),
        REGISTERS=REGISTERS, num_warps=4)
