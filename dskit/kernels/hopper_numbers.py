"""Attention over caches that hold numbers with a warp group for each of its steps, for Hopper.

Idea
    As in hopper.py, but rows are numbers already, so `bring` only sends for them: they go from memory to
    shared memory without passing through registers, and channels keep their order.

        bring   64 rows of bfloat16               | K | K |   keys and values both
        weigh   z = q K^T, softmax                | P | P |   weights, and what earlier sums fade by
        add up  o = fade o + P K, twice: each of two groups has half of the channels of all 64 heads

    A row's queries are sent for as soon as the last row's are multiplied, while that one is still weighed,
    added up and stored.

Shapes
    As of mla.attend_cached: 64 heads of 512 channels of which at most 64 turn.

Units
    Of the 64K registers a thread of each adding group has 160, of `weigh` 120, of `bring` 72.  Shared memory:
    64 KB queries, two tiles of 64 KB, two of 8 KB of weights.

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
    LOG2E,
    PAIRS,
    SCORES,
    SUMS,
    _barriers,
    _expect,
    _full,
    _spans,
    _turns,
    bf16_pair,
    copy,
    from_bf16_pair,
    rounded_bf16,
)

MOST_TURNS = 32
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # by Triton 3.9
REGISTERS = 160, 120, 72  # a thread of an adding group, of `weigh`, of `bring`
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
OUT = gl.constexpr(gl.DistributedLinearLayout(  # of [64, 128]: four in a row, the 16 rows of a warp of SUMS
    [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
    [[16, 0], [32, 0]], [], [64, 128]))


@gluon.jit
def _tiles_of(item, read_ptr, chosen_ptr, W, K, READ_WIDE: gl.constexpr, CHOSEN_WIDE: gl.constexpr):
    """A row, and the spans of its tiles: the window's, then the entries'."""
    return _spans(item, read_ptr, chosen_ptr, W, K, 1, gl.cdiv(W, 64) + gl.cdiv(K, 64), READ_WIDE,
                  CHOSEN_WIDE)


@gluon.jit
def _rows(tile, token, window, entry, read_ptr, chosen_ptr, W, K, LAYOUT: gl.constexpr):
    """(a tile's rows, -1 for none; whether they are the window's)."""
    own = tile < window[1]
    at, count, index_ptr = (window[0] + tile) * 64, W, read_ptr + token * W
    if chosen_ptr is not None:
        at = gl.where(own, at, (entry[0] + tile - window[1]) * 64)
        count, index_ptr = gl.where(own, W, K), gl.where(own, index_ptr, chosen_ptr + token * K)
    at += gl.arange(0, 64, LAYOUT)
    return gl.load(index_ptr + at, at < count, other=-1).to(gl.int32), own


# ---- bring -------------------------------------------------------------------------------------------------

@gluon.jit
def _words(tile):
    """A tile of bfloat16 as words of two."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 32)
    if RENAMED:
        return tile.reinterpret(gl.int32, [64, 128], LAYOUT)
    else:
        return tile._reinterpret(gl.int32, [64, 128], LAYOUT)


@gluon.jit
def _send(at, to, full, PARTS: gl.constexpr):
    """Send for half of the channels of 64 rows, or for less, 128 bytes of a row after the other."""
    for part in gl.static_range(PARTS):
        copy(_words(to).slice(32 * part, 32, dim=1), at + 32 * part)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _rotated(at, turn_ptr, token, pair, TURNS: gl.constexpr):
    """The last 32 pairs of a row's queries, as words."""
    a, b = from_bf16_pair(gl.load(at + 224).to(gl.uint32, bitcast=True))
    turned, c, s = _turns(turn_ptr, token, pair, 32, TURNS)
    a, b = gl.where(turned, a * c - b * s, a), gl.where(turned, a * s + b * c, b)
    return bf16_pair(a, b).to(gl.int32, bitcast=True)


@gluon.jit
def _bring(q_smem, k_smem, q_full, q_empty, k_full, k_empty, q_ptr, turn_ptr, window_ptr, entry_ptr, read_ptr,
           chosen_ptr, items, W, K, TURNS: gl.constexpr, READ_WIDE: gl.constexpr, CHOSEN_WIDE: gl.constexpr):
    LINE: gl.constexpr = gl.SliceLayout(1, WORDS)
    head, pair = gl.arange(0, 64, LINE)[:, None], gl.arange(0, 32, gl.SliceLayout(0, WORDS))
    n, done = 0, 0  # tiles, and rows that have some, so far
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token, window, entry = _tiles_of(item, read_ptr, chosen_ptr, W, K, READ_WIDE, CHOSEN_WIDE)
        q_at = q_ptr + (token * 64 + head) * 256 + pair[None, :]
        last = _rotated(q_at, turn_ptr, token, pair, TURNS)  # here, where no copies are before it in a queue
        tiles = window[1] + entry[1]
        for tile in range(tiles):
            row, own = _rows(tile, token, window, entry, read_ptr, chosen_ptr, W, K, LINE)
            word_ptr, some = window_ptr, window[2]
            if chosen_ptr is not None:
                word_ptr, some = gl.where(own, window_ptr, entry_ptr), gl.where(own, window[2], entry[2])
            row = gl.where(row < 0, some, row).to(gl.int64)  # a row that is read anyway in place of none
            at, stage = word_ptr + row[:, None] * 256 + pair[None, :], n % 2
            mbarrier.wait(k_empty.index(stage), (n // 2 & 1) ^ 1)
            for side in gl.static_range(2):
                _send(at + 128 * side, k_smem.index(2 * stage + side), k_full.index(2 * stage + side), 4)
            if tile == 0:
                mbarrier.wait(q_empty, (done & 1) ^ 1)
                _words(q_smem.index(1)).slice(96, 32, dim=1).store(last)
                _send(q_at, q_smem.index(0), q_full, 4)
                _send(q_at + 128, q_smem.index(1), q_full, 3)
                _full(q_full)
            n += 1
        done += gl.minimum(tiles, 1)


# ---- weigh -------------------------------------------------------------------------------------------------

@gluon.jit
def _weigh(q_smem, k_smem, p_smem, fade_smem, share_smem, q_full, q_empty, k_full, fade_full, p_full, p_empty,
           share_full, share_empty, q_ptr, read_ptr, chosen_ptr, sink_ptr, items, W, K, scale,
           READ_WIDE: gl.constexpr, CHOSEN_WIDE: gl.constexpr):
    HEAD: gl.constexpr = gl.SliceLayout(1, SCORES)
    head = gl.arange(0, 64, HEAD)
    n, done, shared = 0, 0, 0  # tiles, rows that have some, and rows so far
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token, window, entry = _tiles_of(item, read_ptr, chosen_ptr, W, K, READ_WIDE, CHOSEN_WIDE)
        tiles = window[1] + entry[1]
        following = gl.minimum(item + gl.num_programs(0), items - 1)
        _expect(q_ptr, read_ptr, chosen_ptr, following.to(gl.int64), W, K, READ_WIDE, CHOSEN_WIDE)
        mbarrier.wait(q_full, done & 1, pred=tiles > 0)
        top, total = gl.full([64], FLOOR, gl.float32, HEAD), gl.full([64], 0.0, gl.float32, HEAD)
        for tile in range(tiles):
            stage, phase = n % 2, n // 2 & 1
            row, _ = _rows(tile, token, window, entry, read_ptr, chosen_ptr, W, K, gl.SliceLayout(0, SCORES))
            z = gl.full([64, 64], 0.0, gl.float32, SCORES)
            for side in gl.static_range(2):
                mbarrier.wait(k_full.index(2 * stage + side), phase)
                fence_async_shared()
                q = q_smem.index(side + (n >> 30))  # + 0: 32 addresses that never change would fill registers
                z = warpgroup_mma(q, k_smem.index(2 * stage + side).permute((1, 0)), z, use_acc=side == 1,
                                  is_async=True)
            z = warpgroup_mma_wait(0, deps=(z,))
            if tile == tiles - 1:
                tl.debug_barrier()
                mbarrier.arrive(q_empty, count=1)
            z = gl.where((row >= 0)[None, :], z, float("-inf"))
            new = gl.maximum(top, gl.max(z, 1) * scale)
            fade = gl.exp2(top - new)
            mbarrier.wait(p_empty.index(stage), phase ^ 1)
            fade_smem.index(stage).store(fade)
            tl.debug_barrier()
            mbarrier.arrive(fade_full.index(stage), count=1)  # sums fade while weights are computed
            weight = rounded_bf16(gl.exp2(z * scale - new[:, None]))
            p_smem.index(stage).store(weight.to(gl.bfloat16))
            _full(p_full.index(stage))
            top, total = new, total * fade + gl.sum(weight, 1)
            n += 1
        done += gl.minimum(tiles, 1)
        total += gl.exp2(gl.load(sink_ptr + head) * LOG2E - top)
        mbarrier.wait(share_empty, (shared & 1) ^ 1)
        share_smem.store(1.0 / gl.where(total > 0, total, 1.0))
        _full(share_full)
        shared += 1  # noqa: SIM113 - there is no enumerate on a GPU


# ---- add up ------------------------------------------------------------------------------------------------

@gluon.jit
def _add_up(k_smem, p_smem, fade_smem, share_smem, k_empty, fade_full, p_full, p_empty, share_full,
            share_empty, turn_ptr, read_ptr, chosen_ptr, out_ptr, items, W, K, TURNS: gl.constexpr,
            READ_WIDE: gl.constexpr, CHOSEN_WIDE: gl.constexpr, SIDE: gl.constexpr):
    head = gl.arange(0, 64, gl.SliceLayout(1, OUT))[:, None]
    word = 128 * SIDE + gl.arange(0, 128, gl.SliceLayout(0, OUT))[None, :]
    n, done = 0, 0  # tiles and rows so far
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token, window, entry = _tiles_of(item, read_ptr, chosen_ptr, W, K, READ_WIDE, CHOSEN_WIDE)
        o = gl.full([64, 256], 0.0, gl.float32, SUMS)
        for _ in range(window[1] + entry[1]):
            stage, phase = n % 2, n // 2 & 1
            mbarrier.wait(fade_full.index(stage), phase)
            o *= fade_smem.index(stage).load(gl.SliceLayout(1, SUMS))[:, None]
            mbarrier.wait(p_full.index(stage), phase)
            fence_async_shared()
            o = warpgroup_mma(p_smem.index(stage), k_smem.index(2 * stage + SIDE), o, is_async=True)
            o = warpgroup_mma_wait(0, deps=(o,))
            tl.debug_barrier()
            mbarrier.arrive(p_empty.index(stage), count=1)
            mbarrier.arrive(k_empty.index(stage), count=1)
            n += 1
        mbarrier.wait(share_full, done & 1)
        o *= share_smem.load(gl.SliceLayout(1, SUMS))[:, None]
        tl.debug_barrier()
        mbarrier.arrive(share_empty, count=1)
        done += 1  # noqa: SIM113
        a, b = o.reshape([64, 128, 2]).split()
        if SIDE:
            pair = gl.arange(0, 128, gl.SliceLayout(0, a.type.layout))
            turned, c, s = _turns(turn_ptr, token, pair, 128, TURNS)
            a, b = gl.where(turned, a * c + b * s, a), gl.where(turned, b * c - a * s, b)
        out = gl.convert_layout(bf16_pair(a, b).to(gl.int32, bitcast=True), OUT)
        gl.store(out_ptr + (token * 64 + head) * 256 + word, out)


# ---- all of them -------------------------------------------------------------------------------------------

@gluon.jit(do_not_specialize=["items", "W", "K"])
def _mla_attend_numbers_hopper_fwd_kernel(q_ptr, turn_ptr, window_ptr, read_ptr, entry_ptr, chosen_ptr,
                                          sink_ptr, out_ptr, items, W, K, scale, TURNS: gl.constexpr,
                                          READ_WIDE: gl.constexpr, CHOSEN_WIDE: gl.constexpr,
                                          REGISTERS: gl.constexpr):
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    LIST: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], TILE)
    k = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 256], TILE)
    p = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], TILE)
    fade = gl.allocate_shared_memory(gl.float32, [2, 64], LIST)
    share = gl.allocate_shared_memory(gl.float32, [64], LIST)
    q_full, q_empty = _barriers(1, 257).index(0), _barriers(1, 1).index(0)  # 128 threads copy, twice
    k_full, k_empty = _barriers(4, 128), _barriers(2, 2)
    fade_full, p_full, p_empty = _barriers(2, 1), _barriers(2, 1), _barriers(2, 2)
    share_full, share_empty = _barriers(1, 1).index(0), _barriers(1, 2).index(0)
    gl.warp_specialize([
        (_add_up, (k, p, fade, share, k_empty, fade_full, p_full, p_empty, share_full, share_empty, turn_ptr,
                   read_ptr, chosen_ptr, out_ptr, items, W, K, TURNS, READ_WIDE, CHOSEN_WIDE, 0)),
        (_add_up, (k, p, fade, share, k_empty, fade_full, p_full, p_empty, share_full, share_empty, turn_ptr,
                   read_ptr, chosen_ptr, out_ptr, items, W, K, TURNS, READ_WIDE, CHOSEN_WIDE, 1)),
        (_weigh, (q, k, p, fade, share, q_full, q_empty, k_full, fade_full, p_full, p_empty, share_full,
                  share_empty, q_ptr, read_ptr, chosen_ptr, sink_ptr, items, W, K, scale, READ_WIDE,
                  CHOSEN_WIDE)),
        (_bring, (q, k, q_full, q_empty, k_full, k_empty, q_ptr, turn_ptr, window_ptr, entry_ptr, read_ptr,
                  chosen_ptr, items, W, K, TURNS, READ_WIDE, CHOSEN_WIDE)),
    ], [4, 4, 4], [REGISTERS[0], REGISTERS[1], REGISTERS[2]])


# ---- on the host -------------------------------------------------------------------------------------------

def takes(q_TAH: Tensor, turn_T: Tensor, window_SH: Tensor, entries_SH: Tensor | None) -> bool:
    """Whether these queries, over such caches, are for this kernel."""
    return (q_TAH.shape[1:] == (HEADS, 2 * PAIRS) and turn_T.shape[1] <= MOST_TURNS
            and all(cache is None or cache.dtype == torch.bfloat16 for cache in (window_SH, entries_SH)))


def attend(q: Tensor, turn: Tensor, window: Tensor, read: Tensor, entries: Tensor | None,
           chosen: Tensor | None, sink: Tensor, out: Tensor) -> None:
    """Attention by words of queries and outputs [T, HEADS, PAIRS], with whole turns in a word [T, turns]."""
    (T, W), K = read.shape, 0 if chosen is None else chosen.shape[1]
    window, entries = window.view(torch.int32), None if entries is None else entries.view(torch.int32)
    _mla_attend_numbers_hopper_fwd_kernel[(min(T, common.processors(q)),)](
        q, turn, window, read, entries, chosen, sink, out, T, W, K, (2 * PAIRS)**-0.5 * LOG2E.value,
        TURNS=turn.shape[1], READ_WIDE=common.pow2(W), CHOSEN_WIDE=common.pow2(K), REGISTERS=REGISTERS,
        num_warps=4)
