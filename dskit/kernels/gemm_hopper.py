"""Products of FP8 codes with a warp that brings beside groups that multiply, for Hopper.

Idea
    One warp has an engine copy steps of 128 channels into a ring of buffers.  GROUPS groups of four warps
    take 64 tokens each and the same weight rows; the tensor core reads both as they are stored:

        bring      | 64 tokens | 64 | 128 weight rows | 128 |    a ring of STAGES
        multiply   wait, codes . codes, let go;  sum += 2^(row) 2^(block) (codes . codes)

    Tokens are the rows of a product: a thread has two of them, so that its sums need a scale for each of two
    rows and each block of 32 weight rows.  While one is added the next one is under way, of the same group or
    of another.  A program keeps its processor and takes one tile after the other; of 128 tokens and twice 128
    weight rows (HALVES) a step brings 48 KB where two tiles of 128 x 128 would bring 64.

    groups  Scales are for 32 channels: four products a step.  For few tokens, where bringing the weights is
            what takes time; K is cut into parts as in gemm.py.
    spans   Scales are for 128 channels, which the tensor core adds up.  Those for 32 are folded into the
            codes beforehand, of x and of the weight:

                2^s . codes, s of each group of 32   ->   2^c . codes, c of four groups

            c is the least power with which no number of the span is beyond 448; the other groups' codes are
            rounded to what e4m3 has there.  A group with hardly anything in it has no say, whatever its
            scale.

Shapes
    x [T, K] and weight [N, K], e4m3; scales [rows, groups] of x, [blocks of rows, groups] of the weight.

Units
    Scales are E8M0 bytes; `groups` reads four of them as a word.  A step of 128 x 256 is 1,024 cycles of the
    tensor core, at least, and 128 multiply-adds of a thread, or 512 of them by groups.

Errors
    Gluon, in which this is written, is compiled only: `takes` says for what.  gemm.py has kernels for the
    rest and for the interpreter, in which `folded` runs too.

Numerics
    Sums of 32 products, in spans of 128, are rounded by the tensor core (to about 13 bits), all others are
    float32.  Folding is exact where a span's scales are alike; else it rounds a number by at most 2^-4 of
    itself or 2^-17 of the largest of its span.  Bytes 0 and 255 make zeros and infinities, as in gemm.py.

Source
    kernels.md 1.2, 2.3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dskit.kernels import common
from dskit.kernels.common import cdiv, e4m3_pair, from_e4m3_pair
from dskit.kernels.hopper import _barriers, engine_copy

STEP = gl.constexpr(128)
BAND = gl.constexpr(8)  # tiles of rows that are walked side by side, so that weights stay in the L2
REGISTERS = {1: (232, 24), 2: (240, 24), 3: (160, 24)}  # GROUPS -> of a thread that multiplies, that brings
engine_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


# ---- folding -----------------------------------------------------------------------------------------------

@triton.jit
def _fold_kernel(code_ptr, byte_ptr, out_ptr, shared_ptr, rows, pairs, groups, stride, stride_shared,
                 ROWS: tl.constexpr, BLOCKS: tl.constexpr, SPANS: tl.constexpr):
    """Give spans of four groups one scale: BLOCKS blocks of ROWS rows, SPANS spans of each."""
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    span = tl.program_id(0) * SPANS + tl.arange(0, SPANS)
    row = (block[:, None] * ROWS + tl.arange(0, ROWS)[None, :])[:, :, None, None, None]
    group = span[:, None] * 4 + tl.arange(0, 4)[None, :]
    pair = (group[:, :, None] * 16 + tl.arange(0, 16)[None, None, :])[None, None]
    inside, there = (row < rows) & (pair < pairs), block * ROWS < rows
    byte_at = byte_ptr + block.to(tl.int64)[:, None, None] * groups + group[None]
    byte = tl.load(byte_at, there[:, None, None] & (group < groups)[None], other=0).to(tl.int32)
    code = tl.load(code_ptr + row.to(tl.int64) * stride + pair, inside, other=0)
    a, b = from_e4m3_pair(code.to(tl.uint16, bitcast=True))
    most = tl.max(tl.max(tl.maximum(tl.abs(a), tl.abs(b)), axis=4), axis=1)
    power = ((most.to(tl.int32, bitcast=True) + (0x7FFFFF - 0x600000)) >> 23) - (127 + 8)  # 448 = 1.75 * 2^8
    least = tl.where((most == 0.0) | (byte == 0), 0, tl.where(byte == 255, 255, byte + power))
    shared = tl.maximum(tl.max(least, axis=2), 1)
    factor = tl.where(byte == 0, 0, tl.maximum(byte - shared[:, :, None] + 127, 0)) << 23
    factor = factor.to(tl.float32, bitcast=True)[:, None, :, :, None]
    code = e4m3_pair(a * factor, b * factor).to(tl.int16, bitcast=True)
    tl.store(out_ptr + row.to(tl.int64) * pairs + pair, code, inside)
    shared_at = shared_ptr + span.to(tl.int64)[None, :] * stride_shared + block[:, None]
    tl.store(shared_at, shared.to(tl.uint8), there[:, None] & (span * 4 < groups)[None, :])


def folded(codes: Tensor, scale: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """e4m3 [M, K], a scale for `rows` rows and 32 channels -> the same with a scale for 128 channels.

    The new scales of a span lie side by side.
    """
    (M, K), (blocks, groups), tall, wide = codes.shape, scale.shape, cdiv(32, rows), 2
    out = torch.empty(M, K, dtype=codes.dtype, device=codes.device)
    shared = torch.empty(cdiv(K, 128), blocks, dtype=torch.uint8, device=codes.device)
    _fold_kernel[(cdiv(K, 128 * wide), cdiv(blocks, tall))](
        codes.view(torch.int16), scale.view(torch.uint8).contiguous(), out.view(torch.int16), shared, M,
        K // 2, groups, codes.stride(0) // 2, blocks, ROWS=rows, BLOCKS=tall, SPANS=wide, num_warps=4)
    return out, shared.T


# ---- bring -------------------------------------------------------------------------------------------------

@gluon.jit
def _item(item, tiles_t, tiles_n, steps, each):
    """(part of K, tile of tokens, tile of weight rows, first step, last step + 1) of an item."""
    part, tile = item // (tiles_t * tiles_n), item % (tiles_t * tiles_n)
    band, within = tile // (BAND * tiles_n), tile % (BAND * tiles_n)
    tall = gl.minimum(tiles_t - band * BAND, BAND)
    first = part * each
    return part, band * BAND + within % tall, within // tall, first, gl.minimum(first + each, steps)


@gluon.jit
def _bring(ring, x_desc, w_desc, walk, GROUPS: gl.constexpr, HALVES: gl.constexpr):
    x, w, full, empty = ring
    items, tiles_t, tiles_n, steps, each = walk
    STAGES: gl.constexpr = x.shape[0] // GROUPS
    BLOCK_N: gl.constexpr = w.shape[1]
    NBYTES: gl.constexpr = GROUPS * x_desc.block_type.nbytes + HALVES * w_desc.block_type.nbytes
    count = 0  # steps so far
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        part, tile_t, tile_n, first, end = _item(item, tiles_t, tiles_n, steps, each)
        for step in range(first, end):
            stage = count % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(bar, NBYTES)
            for half in gl.static_range(HALVES):
                at = (tile_n * HALVES + half) * BLOCK_N
                engine_copy(w_desc, [at, step * STEP], bar, w.index(stage * HALVES + half))
            for group in gl.static_range(GROUPS):
                at = (tile_t * GROUPS + group) * 64
                engine_copy(x_desc, [at, step * STEP], bar, x.index(stage * GROUPS + group))
            count += 1


# ---- multiply ----------------------------------------------------------------------------------------------

@gluon.constexpr_function
def _sums(blocks):
    """How four warps hold [64 tokens, blocks, 32 weight rows], as the tensor core leaves them."""
    regs = [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16]]
    regs += [[0, 1 << i, 0] for i in range(blocks.bit_length() - 1)]
    lanes = [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[16, 0, 0], [32, 0, 0]], [], [64, blocks, 32])


@gluon.jit
def _product(x, w, at: gl.constexpr, SIZE: gl.constexpr):
    """Begin x w^T over SIZE channels."""
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, w.shape[0], 32])
    zero = gl.full([64, w.shape[0]], 0.0, gl.float32, TILE)
    x, w = x.slice(at, SIZE, dim=1), w.slice(at, SIZE, dim=1)
    return warpgroup_mma(x, w.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _scale(word, J: gl.constexpr):
    """Byte J of words that hold E8M0 scales, as a number; as in gemm.py."""
    bits = word.to(gl.int32) << (23 - 8 * J) if J < 3 else word.to(gl.int32) >> 1
    return (bits & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def _add(acc, part, xs, ws, J: gl.constexpr, SUMS: gl.constexpr):
    """acc [tokens, blocks, 32 weight rows] + a product times the scales of group J."""
    scale = (_scale(xs, J)[:, None] * _scale(ws, J)[None, :])[:, :, None]
    return acc + gl.convert_layout(part.reshape(acc.shape), SUMS, assert_trivial=True) * scale


@gluon.jit
def _blocks(n, N, stride, ROWS: gl.constexpr, SUMS: gl.constexpr):
    """Where the scales of each 32 weight rows of a tile are; beyond the last one that one's."""
    row = n + 32 * gl.arange(0, SUMS.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))
    return gl.minimum(row, N - 1) // ROWS * stride


@gluon.jit
def _put(acc, out, part, t, n, T, N, group: gl.constexpr):
    """Write 64 tokens of a tile: the engine does, or the threads where it cannot."""
    y_smem, y_desc, y_ptr = out
    WIDE: gl.constexpr = acc.shape[1] * acc.shape[2]
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 32])
    y = gl.convert_layout(acc.reshape([64, WIDE]), TILE, assert_trivial=True)
    if y_desc is None:
        row, column = gl.arange(0, 64, gl.SliceLayout(1, TILE)), gl.arange(0, WIDE, gl.SliceLayout(0, TILE))
        inside = (t + row < T)[:, None] & (n + column < N)[None, :]
        y_at = y_ptr + (part.to(gl.int64) * T + t) * N + n + row.to(gl.int64)[:, None] * N + column[None, :]
        gl.store(y_at, y.to(y_ptr.dtype.element_ty), inside)
    else:
        tma.store_wait(0)
        tl.debug_barrier()
        y_smem.index(group).store(y.to(gl.bfloat16))
        fence_async_shared()
        tl.debug_barrier()
        engine_store(y_desc, [t, n], y_smem.index(group))


@gluon.jit
def _multiply(ring, out, scales, walk, size, GROUPS: gl.constexpr, HALVES: gl.constexpr, ROWS: gl.constexpr,
              COUNT: gl.constexpr, group: gl.constexpr):
    x_smem, w_smem, full, empty = ring
    xs_ptr, ws_ptr, stride_xs, span_xs, stride_ws, span_ws = scales
    items, tiles_t, tiles_n, steps, each = walk
    T, N = size
    STAGES: gl.constexpr = x_smem.shape[0] // GROUPS
    BLOCK_N: gl.constexpr = w_smem.shape[1]
    SUMS: gl.constexpr = _sums(BLOCK_N // 32)
    SIZE: gl.constexpr = STEP // COUNT
    gl.static_assert(HALVES == 1 or COUNT == 1, "registers do for one product of the second half")
    count = 0  # steps so far
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        part, tile_t, tile_n, first, end = _item(item, tiles_t, tiles_n, steps, each)
        t, n = (tile_t * GROUPS + group) * 64, tile_n * HALVES * BLOCK_N
        row = t + gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))
        xs_at, ws_at = gl.minimum(row, T - 1) * stride_xs, _blocks(n, N, stride_ws, ROWS, SUMS)
        xs_next = gl.load(xs_ptr + first * span_xs + xs_at)
        ws_next = gl.load(ws_ptr + first * span_ws + ws_at)
        acc = gl.full(SUMS.shape, 0.0, gl.float32, SUMS)
        if HALVES == 2:
            ws2_at = _blocks(n + BLOCK_N, N, stride_ws, ROWS, SUMS)
            ws2_next = gl.load(ws_ptr + first * span_ws + ws2_at)
            acc2 = gl.full(SUMS.shape, 0.0, gl.float32, SUMS)
        for step in range(first, end):
            xs, ws, after = xs_next, ws_next, gl.minimum(step + 1, end - 1)  # asked for a step ahead
            xs_next = gl.load(xs_ptr + after * span_xs + xs_at)
            ws_next = gl.load(ws_ptr + after * span_ws + ws_at)
            if HALVES == 2:
                ws2 = ws2_next
                ws2_next = gl.load(ws_ptr + after * span_ws + ws2_at)
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            x, w = x_smem.index(stage * GROUPS + group), w_smem.index(stage * HALVES)
            begun = _product(x, w, 0, SIZE)
            for j in gl.static_range(1, COUNT):  # the next product is under way while one is added
                following = _product(x, w, j * SIZE, SIZE)
                acc = _add(acc, warpgroup_mma_wait(1, deps=(begun,)), xs, ws, j - 1, SUMS)
                begun = following
            done = warpgroup_mma_wait(0, deps=(begun,))
            if HALVES == 2:
                acc = _add(acc, done, xs, ws, COUNT - 1, SUMS)
                w2 = w_smem.index(stage * HALVES + 1)
                done = warpgroup_mma_wait(0, deps=(_product(x, w2, 0, SIZE),))
            tl.debug_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            if HALVES == 2:
                acc2 = _add(acc2, done, xs, ws2, COUNT - 1, SUMS)
            else:
                acc = _add(acc, done, xs, ws, COUNT - 1, SUMS)
            count += 1
        _put(acc, out, part, t, n, T, N, group)
        if HALVES == 2:
            _put(acc2, out, part, t, n + BLOCK_N, T, N, group)
    tma.store_wait(0)


# ---- both --------------------------------------------------------------------------------------------------

@gluon.jit(do_not_specialize=["items", "tiles_t", "tiles_n", "steps", "each", "T", "stride_xs", "span_xs",
                              "stride_ws", "span_ws"])
def _gemm_hopper_kernel(x_desc, w_desc, y_desc, y_ptr, xs_ptr, ws_ptr, items, tiles_t, tiles_n, steps, each,
                        T, N, stride_xs, span_xs, stride_ws, span_ws, STAGES: gl.constexpr,
                        GROUPS: gl.constexpr, HALVES: gl.constexpr, ROWS: gl.constexpr, COUNT: gl.constexpr,
                        REGISTERS: gl.constexpr):
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    x = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * GROUPS, 64, STEP], x_desc.layout)
    w = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * HALVES, BLOCK_N, STEP], w_desc.layout)
    ring = x, w, _barriers(STAGES, 1), _barriers(STAGES, GROUPS)
    if y_desc is None:
        y: gl.constexpr = None
    else:
        y = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 64, BLOCK_N], y_desc.layout)
    out, scales = (y, y_desc, y_ptr), (xs_ptr, ws_ptr, stride_xs, span_xs, stride_ws, span_ws)
    walk, size = (items, tiles_t, tiles_n, steps, each), (T, N)
    if GROUPS == 1:
        gl.warp_specialize([
            (_multiply, (ring, out, scales, walk, size, GROUPS, HALVES, ROWS, COUNT, 0)),
            (_bring, (ring, x_desc, w_desc, walk, GROUPS, HALVES)),
        ], [1], [REGISTERS[1]])
    elif GROUPS == 2:
        gl.warp_specialize([
            (_multiply, (ring, out, scales, walk, size, GROUPS, HALVES, ROWS, COUNT, 0)),
            (_multiply, (ring, out, scales, walk, size, GROUPS, HALVES, ROWS, COUNT, 1)),
            (_bring, (ring, x_desc, w_desc, walk, GROUPS, HALVES)),
        ], [4, 1], [REGISTERS[0], REGISTERS[1]])
    else:
        gl.warp_specialize([
            (_multiply, (ring, out, scales, walk, size, GROUPS, HALVES, ROWS, COUNT, 0)),
            (_multiply, (ring, out, scales, walk, size, GROUPS, HALVES, ROWS, COUNT, 1)),
            (_multiply, (ring, out, scales, walk, size, GROUPS, HALVES, ROWS, COUNT, 2)),
            (_bring, (ring, x_desc, w_desc, walk, GROUPS, HALVES)),
        ], [4, 4, 1], [REGISTERS[0], REGISTERS[0], REGISTERS[1]])


# ---- on the host -------------------------------------------------------------------------------------------

def takes(x: Tensor, weight: Tensor, block: tuple[int, int], dtype: torch.dtype, way: str) -> bool:
    """Whether such x [T, K] and weights [N, K] are for this kernel: its engine copies whole 16 bytes."""
    N, K = weight.shape
    whole = K % 16 == 0 and all(v.stride(0) % 16 == 0 and v.data_ptr() % 16 == 0 for v in (x, weight))
    if way == "spans":
        fits = dtype == torch.bfloat16 and N % 8 == 0 and (block[1] == 128 or block == (32, 32))
    else:
        fits = block[1] == 32 and K % STEP.value == 0
    return whole and fits


def _described(rows: Tensor, height: int, width: int, dtype: gl.dtype) -> TensorDescriptor:
    """Rows as an engine copies them, a tile of so many at a time."""
    layout = gl.NVMMASharedLayout.get_default_for([height, width], dtype)
    return TensorDescriptor.from_tensor(rows, [height, width], layout)


def multiply(x: Tensor, xs: Tensor, weight: Tensor, ws: Tensor, rows: int, y: Tensor, parts: int, each: int,
             config: dict) -> None:
    """Write y [T, N] of codes and their scales, or [parts, T, N] of `each` steps of K; `rows` of the weight
    share a scale, and 32 channels where scales are words of four.
    """
    (T, K), N, groups = x.shape, weight.shape[0], config["block_t"] // 64
    bn, whole = min(config["block_n"], 128), y.dtype == torch.bfloat16 and N % 8 == 0
    tiles = cdiv(T, config["block_t"]), cdiv(N, config["block_n"])
    items = tiles[0] * tiles[1] * parts
    _gemm_hopper_kernel[(min(items, config["fill"] * common.processors(x)),)](
        _described(x, 64, STEP.value, gl.float8e4nv), _described(weight, bn, STEP.value, gl.float8e4nv),
        _described(y, 64, bn, gl.bfloat16) if whole else None, y, xs, ws, items, *tiles,
        cdiv(K, STEP.value), each, T, N, *xs.stride(), *ws.stride(), config["num_stages"], groups,
        config["block_n"] // bn, rows, xs.element_size(), REGISTERS[groups], num_warps=4,
        maxnreg=128 if groups == 1 else None)  # so that a processor has two programs
