"""Index scores of keys that lie side by side, for Hopper.

Idea
    A row of 68 bytes rarely begins where a copy of 16 bytes may.  A page of 64 neighbours always does: 4,352
    bytes, brought as they lie, three pages ahead, and their row of the table one page earlier still.

        page    | key 0: 16 words of codes, one of scales | key 1 | ... | key 63 |
        thread  words of two neighbours; threads are four keys apart, so that no two meet in a bank

    Products are those of indexer.py: exact sums of two groups side by side, then scales, relu and weights in
    float32.  The second half of the channels is multiplied while sums of the first are scaled.

    Programs share turns of four pages equally, so that no processor ends last; one that comes to the end of
    a request goes on with the next.

Shapes
    As of indexer.scores_cached: 32 heads, rows of the table in runs of whole pages; ROWS of a request that
    score the same keys share what is restored of them.

Units
    Shared memory: 8 KB of queries for each of ROWS, four pages of 8 KB, of which 4,352 bytes are used.

Errors
    Gluon, in which this is written, is compiled only, and by Triton before 3.8: `takes` says for what.
    indexer.py has the kernel for the rest and for the interpreter.

Source
    kernels.md 1.5, 2.3.
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
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dskit.kernels import common
from dskit.kernels.common import cdiv
from dskit.kernels.hopper import copy

HEADS, PAGE, STAGES = 32, 64, gl.constexpr(4)
# an H200, 2026-11-30: programs per processor, as many as it holds at once, and a thread's registers
CONFIG = {"PROGRAMS": 4, "maxnreg": 128}
CANDIDATES = {"indexer.scores_cached/pages": tuple(
    {"PROGRAMS": programs, "maxnreg": registers} for programs, registers in
    ((3, 128), (4, 128), (8, 128), (5, 96), (3, 168)))}
e2m1_low, e2m1_high, from_bf16_pair, inverse = (gluon.jit(helper.fn) for helper in (
    common.e2m1_low, common.e2m1_high, common.from_bf16_pair, common.inverse))

OLD = not hasattr(async_copy, "async_load")  # Triton before 3.8: its successors refuse such views of a page

# Layouts, of four warps.  In a tile of sums [keys, columns] and a page [keys, bytes] of registers, bits of a
# row are these bits of a key: neighbours are in one thread.
ORDER = (8, 16, 1, 2, 4, 32)
COPY = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
QUERY = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
PAIRS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
KEYS = gl.constexpr(gl.DotOperandLayout(0, PAIRS.value, 4))
SUMS = gl.constexpr(gl.DistributedLinearLayout(
    [[8, 0], [0, 4], [0, 8], [0, 16]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
    [64, 32]))
PLACES = gl.constexpr(gl.DistributedLinearLayout([[1]], [[0], [0], [4], [8], [16]], [[2], [32]], [], [64]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
CODES = gl.constexpr(gl.PaddedSharedLayout(
    [[64, 4]], [[0, 1 << i] for i in range(6)] + [[row, 0] for row in ORDER], [], [64, 64]))
SCALES = gl.constexpr(gl.PaddedSharedLayout([[1, 16]], [[row] for row in ORDER], [], [64]))


@gluon.jit
def _queries(to, FIRST: gl.constexpr, at):
    """Put queries from `at`, words of two channels, into shared memory as indexer.py does; gives the scale of
    each head.
    """
    column = gl.arange(0, 64, gl.SliceLayout(1, QUERY))[:, None]
    byte = gl.arange(0, 32, gl.SliceLayout(0, QUERY))[None, :]
    at += column // 2 * 64 + byte
    a, b = from_bf16_pair(gl.load(at).to(gl.uint32, bitcast=True))
    c, d = from_bf16_pair(gl.load(at + 32).to(gl.uint32, bitcast=True))
    most = gl.max(gl.maximum(gl.maximum(gl.abs(a), gl.abs(b)), gl.maximum(gl.abs(c), gl.abs(d))), 1)
    power = gl.maximum(most, 1e-30).to(gl.int32, bitcast=True) & 0x7F800000
    scale = power.to(gl.float32, bitcast=True) * 2.0**-7
    back = gl.where(byte // 16 == column % 2, inverse(scale)[:, None], 0.0)
    for part in gl.static_range(4):
        x = gl.minimum(gl.maximum((a, b, c, d)[part] * back, -448.0), 448.0)
        to.index(FIRST + part).store(x.to(gl.float8e4nv))
    return gl.max(gl.reshape(scale, [32, 2]), 1)


@gluon.jit
def _stage():
    """Room for a page, allocated apart so that no barrier is put between copies to others and reads."""
    return gl.allocate_shared_memory(gl.int32, [2048], FLAT)


@gluon.jit
def _bring(to, word_ptr, row):
    """Send for the page that begins with a row of the pool."""
    word = gl.arange(0, 2048, COPY)
    page = (row.to(gl.int32) >> 6).to(gl.int64) * 1088
    copy(to, word_ptr + page + word, word < 1088)
    async_copy.commit_group()


@gluon.jit
def _power(scales, GROUP: gl.constexpr):
    """The scale of a group; that of byte 0, which is not quite zero, stands beside codes that are."""
    bits = scales >> 1 if GROUP == 3 else scales << (23 - 8 * GROUP)
    return (bits & 0x7F800000).to(gl.float32, bitcast=True)[:, None]


@gluon.jit
def _of_half(score, product, scales, HALF: gl.constexpr):
    first, second = gl.split(gl.reshape(product, [64, 32, 2]))
    first = gl.convert_layout(first, SUMS, assert_trivial=True)
    second = gl.convert_layout(second, SUMS, assert_trivial=True)
    return score + first * _power(scales, 2 * HALF) + second * _power(scales, 2 * HALF + 1)


@gluon.jit
def _scored(keys, scales, query, FIRST: gl.constexpr, weight):
    """Scores [64] of a page under the queries of a row."""
    zero = gl.full([64, 64], 0.0, gl.float32, PAIRS)
    x = warpgroup_mma(keys[0], query.index(FIRST + 0).permute((1, 0)), zero, use_acc=False, is_async=True)
    x = warpgroup_mma(keys[1], query.index(FIRST + 1).permute((1, 0)), x, is_async=True)
    y = warpgroup_mma(keys[2], query.index(FIRST + 2).permute((1, 0)), zero, use_acc=False, is_async=True)
    y = warpgroup_mma(keys[3], query.index(FIRST + 3).permute((1, 0)), y, is_async=True)
    x = warpgroup_mma_wait(2, deps=(x,))
    score = _of_half(gl.full([64, 32], 0.0, gl.float32, SUMS), x, scales, 0)
    y = warpgroup_mma_wait(0, deps=(y,))
    total = gl.sum(gl.maximum(_of_half(score, y, scales, 1), 0.0) * weight[None, :], 1)
    total = gl.reshape(gl.permute(gl.reshape(total, [2, 2, 2, 8]), [0, 3, 1, 2]), [64])
    return gl.convert_layout(total, PLACES, assert_trivial=True)


@gluon.jit
def _moved(pointers, by, ROWS: gl.constexpr):
    moved = ()
    for r in gl.static_range(ROWS):
        moved += (pointers[r] + by,)
    return moved


@gluon.jit
def _score_span(query, stages, q_ptr, weight_ptr, word_ptr, table_ptr, visible_ptr, out_ptr, request, block,
                first, last, Q, S, ROWS: gl.constexpr):
    """Write scores of keys first .. last under ROWS rows of a request."""
    limit = first
    for r in gl.static_range(ROWS):
        row = request * Q + gl.minimum(block + r, Q - 1)
        limit = gl.maximum(limit, gl.load(visible_ptr + row).to(gl.int32))
    limit = gl.minimum(limit, last)  # keys that a row sees
    table_ptr += request * S + first
    tl.debug_barrier()  # the span before has been read
    for i in gl.static_range(STAGES - 1):
        _bring(stages[i], word_ptr, gl.load(table_ptr + 64 * i, first + 64 * i < limit, other=0))
    here = gl.load(table_ptr + 64 * (STAGES - 1), first + 64 * (STAGES - 1) < limit, other=0)
    then = gl.load(table_ptr + 64 * STAGES, first + 64 * STAGES < limit, other=0)

    weights, seen, outs = (), (), ()
    head = gl.arange(0, 32, gl.SliceLayout(0, SUMS))
    key = gl.arange(0, 64, PLACES)
    for r in gl.static_range(ROWS):
        row = request * Q + gl.minimum(block + r, Q - 1)
        scale = gl.convert_layout(_queries(query, 4 * r, q_ptr + row * 2048), gl.SliceLayout(0, SUMS))
        weights += (gl.load(weight_ptr + row * 32 + head).to(gl.float32) * scale * 64,)  # codes of keys: 2^-6
        seen += (gl.load(visible_ptr + row).to(gl.int32),)
        outs += (out_ptr + row * S + first + key,)
    fence_async_shared()

    for start in range(first, limit, 64 * STAGES):
        for stage in gl.static_range(STAGES):
            at = start + 64 * stage
            async_copy.wait_group(STAGES - 2)
            tl.debug_barrier()
            _bring(stages[(stage + STAGES - 1) % STAGES], word_ptr, here)
            table_ptr += 64
            here, then = then, gl.load(table_ptr + 64 * STAGES, at + 64 * (STAGES + 1) < limit, other=0)
            page = stages[stage]
            codes = page._reinterpret(gl.uint8, [64, 64], CODES)
            left, right = codes.slice(0, 32, dim=1).load(KEYS), codes.slice(32, 32, dim=1).load(KEYS)
            beyond = page._reinterpret(gl.int32, [128, 16], FLAT).index(1)  # the first key's codes
            scales = beyond._reinterpret(gl.int32, [64], SCALES).load(gl.SliceLayout(1, SUMS))
            keys = e2m1_low(left), e2m1_high(left), e2m1_low(right), e2m1_high(right)
            for r in gl.static_range(ROWS):
                total = _scored(keys, scales, query, 4 * r, weights[r])
                total = gl.where(key < seen[r] - at, total, float("-inf"))
                gl.store(outs[r] + 64 * stage, total.to(out_ptr.dtype.element_ty), key < last - at)
        outs = _moved(outs, 64 * STAGES, ROWS)
    async_copy.wait_group(0)
    done = first + gl.cdiv(limit - first, 64 * STAGES) * (64 * STAGES)
    none = gl.full([64], float("-inf"), gl.float32, PLACES).to(out_ptr.dtype.element_ty)
    for at in range(done, last, 64):
        for r in gl.static_range(ROWS):
            gl.store(outs[r] + at - done, none, key < last - at)


@gluon.jit(do_not_specialize=["Q", "S", "row_blocks", "turns", "share", "all_turns"])
def _indexer_scores_pages_fwd_kernel(q_ptr, weight_ptr, word_ptr, table_ptr, visible_ptr, out_ptr, Q, S,
                                     row_blocks, turns, share, all_turns, ROWS: gl.constexpr):
    query = gl.allocate_shared_memory(gl.float8e4nv, [4 * ROWS, 64, 32], gl.NVMMASharedLayout(32, 8, rank=2))
    stages = (_stage(), _stage(), _stage(), _stage())
    WIDE: gl.constexpr = 64 * STAGES
    begin = gl.program_id(0) * share
    end = gl.minimum(begin + share, all_turns)
    for part in range(begin // turns, gl.cdiv(end, turns)):
        first = gl.maximum(begin - part * turns, 0) * WIDE
        last = gl.minimum(gl.minimum(end - part * turns, turns) * WIDE, S)
        _score_span(query, stages, q_ptr, weight_ptr, word_ptr, table_ptr, visible_ptr, out_ptr,
                    (part // row_blocks).to(gl.int64), part % row_blocks * ROWS, first, last, Q, S, ROWS)


# ---- on the host -------------------------------------------------------------------------------------------

def takes(q_BQXY: Tensor, pool: Tensor, run: int) -> bool:
    """Whether these queries, over a table of such runs, are for this kernel."""
    return (OLD and q_BQXY.shape[2] == HEADS and q_BQXY.dtype == torch.bfloat16 and run % PAGE == 0
            and pool.data_ptr() % 16 == 0)


def scores(q: Tensor, weight: Tensor, pool: Tensor, table: Tensor, visible: Tensor, out: Tensor,
           together: int, steady: bool) -> None:
    """Scores [B, Q, S] of all keys into `out`; `together` rows of a request may share a program."""
    (B, Q, S), rows = out.shape, min(2, together)
    config = CONFIG
    if not steady:
        config = common.tuned("indexer.scores_cached/pages", (B * Q * S, rows), config)
    row_blocks, turns = cdiv(Q, rows), cdiv(S, PAGE * STAGES.value)
    all_turns = B * row_blocks * turns
    share = cdiv(all_turns, config["PROGRAMS"] * common.processors(q))
    _indexer_scores_pages_fwd_kernel[(cdiv(all_turns, share),)](
        q.view(torch.int32), weight, pool.view(torch.int32), table, visible, out, Q, S, row_blocks, turns,
        share, all_turns, ROWS=rows, num_warps=4, maxnreg=config["maxnreg"])
