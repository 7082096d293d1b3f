"""mHC in one pass over the streams: write, read and the product that makes the next weights.

Tiling
    `_boundary_fwd_kernel` cuts [T, N, D] into tiles of rows and channels, all N streams of them.  A program
    walks over some tiles of its rows and leaves one partial product per row; `_finish_fwd_kernel` adds
    those up to the weights (Sinkhorn included) and norms x, which lies in L2 by then.

                    channels ->  program (0, 0)     program (0, 1)
        rows 0..     y  [tile][tile][tile] ... | [tile][tile][tile] ...      new X_k = q_k y + sum_j C_jk X_j
                     X0 [tile][tile][tile] ... | ...                         x = sum_k p_k X_k
                     ..                                                      part[row, program] =
                     X3 [tile][tile][tile] ... | ...                         (X fn^T, sum of squares)

    Each part can be left out: `write`, `read` and `mixes` are the same kernel.  Two launches and no arrival
    counter: the last program of 32 rows would norm 320 kB alone, longer than a launch takes; this way every
    row has a program, and the weights have theirs beside it.

    The product runs on tensor cores at every row count.  X holds bfloat16 values, fn is float32: as the sum
    of two bfloat16 it keeps 17 bits, which costs less accuracy than a float32 sum of 20,480 terms does.  Only
    streams in float32 are multiplied without them.

Shapes
    X_TND bfloat16 or float32, any strides but the last; y_TD, x_TD; p_TN, q_TN, C_TNN float32; fn [C, N*D]
    with C = (2 + N) N.

Units
    Bytes per row of bfloat16: write (4 N + 2) D, read (2 N + 2) D, mixes 2 N D, boundary (4 N + 4) D, and 4 C
    N D once for fn, which every block of rows reads again from L2.

Errors
    ValueError names an argument whose shape does not fit; dtypes other than bfloat16 and float32 are refused.

Source
    kernels.md 1.6 and 2.3; model.md 3.6.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dskit import ops
from dskit.kernels import common
from dskit.kernels.common import (
    INTERP,
    cdiv,
    dot,
    ld,
    narrow,
    pow2,
    processors,
    refuse,
    require,
    rounded_bf16,
    to_bf16,
    tuned,
    up_to,
)


class Tile(NamedTuple):
    """Rows and channels of a tile, the stages of its loop, programs per multiprocessor, warps, and of how
    many streams the channels are multiplied at once.
    """

    rows: int
    channels: int
    stages: int
    resident: int
    warps: int = 4
    together: int = 4


# largest number of rows -> tile; four warps, since with more of them each would multiply fn's pieces again.
# Chosen by the compiler's report.  Interpreted, programs cost most.
MIXING = {16: Tile(16, 32, 2, 4), 256: Tile(32, 32, 2, 3, 4, 1), 1 << 62: Tile(64, 32, 2, 2)}
BEFORE_HOPPER = {1 << 62: Tile(16, 32, 2, 2)}  # operands in registers: a larger tile spills
PLAIN = {16: Tile(16, 32, 2, 4), 256: Tile(32, 32, 2, 3, 4, 1), 1 << 62: Tile(64, 32, 2, 4, 4, 1)}  # mixes
MOVING = {1 << 62: Tile(8, 256, 1, 1 << 20)}  # without the product: one tile per program
STEADY = Tile(16, 32, 2, 0), 8  # and slices, where a row's bits must not depend on the rows beside it
if common.INTERPRET:
    MIXING = PLAIN = {1 << 62: Tile(16, 64, 1, 1)}
    MOVING = {1 << 62: Tile(16, 128, 1, 1 << 20)}
PRODUCTS = tuple(Tile(*tile)._asdict() for tile in (
    (16, 32, 2, 4), (16, 64, 2, 5), (32, 32, 2, 5, 4, 1), (32, 32, 2, 3, 4, 1), (32, 32, 3, 2),
    (32, 32, 2, 1), (64, 32, 2, 2), (64, 32, 2, 2, 4, 1), (64, 32, 3, 2, 4, 1), (64, 64, 2, 1, 8),
    (32, 32, 3, 3, 4, 1), (32, 64, 2, 1, 8), (128, 32, 3, 1, 8), (128, 32, 2, 1, 8, 1)))
MIXES = tuple(Tile(*tile)._asdict() for tile in (
    (16, 32, 2, 4), (16, 64, 2, 5), (32, 32, 2, 5, 4, 1), (32, 32, 2, 3, 4, 1), (32, 32, 2, 7, 4, 1),
    (32, 32, 3, 3), (64, 32, 2, 4, 4, 1), (64, 32, 3, 3, 4, 1), (64, 32, 2, 3), (32, 64, 2, 2, 8),
    (64, 64, 2, 1, 8), (128, 32, 3, 1, 8)))
MOVES = tuple(Tile(rows, channels, 1, 1 << 20, warps)._asdict() for rows, channels, warps in (
    (1, 1024, 4), (1, 512, 2), (2, 512, 4), (4, 256, 4), (4, 512, 4), (8, 128, 4), (8, 256, 4), (8, 256, 8)))
SINKHORN = {"numbers": 512, "num_warps": 4}  # of the matrices that a program holds
CANDIDATES = {
    "mhc.mixes": MIXES, "mhc.boundary": PRODUCTS, "mhc.read": MOVES, "mhc.write": MOVES,
    "mhc.sinkhorn": tuple({"numbers": numbers, "num_warps": warps} for numbers, warps in
                          ((128, 1), (256, 1), (256, 2), (512, 1), (512, 4), (1024, 4), (2048, 4)))}
BACKWARD = 64, 64  # rows and channels of a tile of the product's backward pass; not yet measured
WALKING = 2048 if common.INTERPRET else 512  # elements of a stream's tile in the other backward passes
FAR = 32 << 20  # bytes of streams that pass through L2 without staying there, so that x does


# ---- kernels: forward --------------------------------------------------------------------------------------

@triton.jit
def _times(w, x, acc, BF16: tl.constexpr):
    """acc + w @ x of float32 w [1, C, K] and x [K, M]; with BF16 x holds bfloat16 values, w is in two pieces.

    x is the operand that a tensor core reads from shared memory: were it the other, the compiler would
    compute it once more in the layout of that one's registers.
    """
    if BF16:
        rest = w - rounded_bf16(w)
        pieces = to_bf16(tl.where(tl.arange(0, 2)[:, None, None] == 0, w, rest))
        return dot(pieces.reshape(2 * w.shape[1], w.shape[2]), to_bf16(x), acc)
    else:
        return dot(w.reshape(w.shape[1], w.shape[2]), x, acc)


@triton.jit
def _folded(acc, BF16: tl.constexpr):
    """The product [C, M] from what `_times` added up."""
    if BF16:
        return tl.sum(acc.reshape(2, acc.shape[0] // 2, acc.shape[1]), axis=0)
    else:
        return acc


@triton.jit
def _beside(tiles, N: tl.constexpr):
    """Tiles [A, B] as one [A, N * B], whose neighbours come from all of them; N is 1, 2 or 4.

    A thread keeps what it holds: one product over four streams' channels waits for memory once, not four
    times, and its operands agree on the order.
    """
    if N == 1:
        return tiles[0]
    elif N == 2:
        return tl.join(tiles[0], tiles[1]).reshape(tiles[0].shape[0], 2 * tiles[0].shape[1])
    else:
        both = tl.join(tl.join(tiles[0], tiles[1]), tl.join(tiles[2], tiles[3]))
        return both.reshape(tiles[0].shape[0], 4 * tiles[0].shape[1])


@triton.jit
def _weights(ptr, row, live, COUNT: tl.constexpr):
    """The columns of [T, COUNT] as a tuple of [M]."""
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (ld(ptr + row * COUNT + i, live),)
    return found


@triton.jit
def _mixed(y, streams, q, C, k: tl.constexpr, N: tl.constexpr):
    """Stream k after a write: q_k y + sum_j C_jk X_j."""
    new = q[k][:, None] * y
    for j in tl.static_range(N):
        new += C[j * N + k][:, None] * streams[j]
    return new


@triton.jit
def _boundary_fwd_kernel(y_ptr, stride_y, X_ptr, stride_t, stride_n, p_ptr, q_ptr, C_ptr, fn_ptr, out_ptr,
                         x_ptr, part_ptr, rows, tiles, D: tl.constexpr, N: tl.constexpr, COLS: tl.constexpr,
                         BF16: tl.constexpr, EVICT: tl.constexpr, BLOCK_M: tl.constexpr,
                         BLOCK_D: tl.constexpr, STAGES: tl.constexpr, TOGETHER: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < rows
    start = tl.program_id(1) * tiles * BLOCK_D
    c = tl.arange(0, COLS)
    if y_ptr is not None:
        q, C = _weights(q_ptr, row, live, N), _weights(C_ptr, row, live, N * N)
    if p_ptr is not None:
        p = _weights(p_ptr, row, live, N)
    product = tl.zeros([2 * COLS if BF16 else COLS, BLOCK_M], tl.float32)
    square = tl.zeros([BLOCK_M], tl.float32)
    for first in tl.range(start, tl.minimum(start + tiles * BLOCK_D, D), BLOCK_D, num_stages=STAGES):
        col = first + tl.arange(0, BLOCK_D)
        here = live[:, None] & (col < D)[None, :]
        streams = ()
        for j in tl.static_range(N):
            at = X_ptr + row[:, None] * stride_t + j * stride_n + col[None, :]
            streams = streams + (tl.load(at, mask=here, other=0.0, eviction_policy=EVICT).to(tl.float32),)
        if y_ptr is not None:
            y = ld(y_ptr + row[:, None] * stride_y + col[None, :], here)
        x = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        squares = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        factors, news = (), ()
        for k in tl.static_range(N):
            new = streams[k]
            if y_ptr is not None:
                new = _mixed(y, streams, q, C, k, N)
                if BF16:
                    new = rounded_bf16(new)
                at = out_ptr + (row[:, None] * N + k) * D + col[None, :]
                tl.store(at, narrow(new, out_ptr.dtype.element_ty), mask=here, eviction_policy=EVICT)
            if p_ptr is not None:
                x += p[k][:, None] * new
            if fn_ptr is not None:
                squares += new * new
                at = fn_ptr + c[:, None] * (N * D) + k * D + col[None, :]
                factors = factors + (ld(at, (c < (2 + N) * N)[:, None] & (col < D)[None, :]),)
                news = news + (new,)
                if (k + 1) % TOGETHER == 0:
                    w, operand = _beside(factors, TOGETHER), _beside(news, TOGETHER)
                    product = _times(w[None, :, :], tl.trans(operand), product, BF16)
                    factors, news = (), ()
        square += tl.sum(squares, axis=1)
        if p_ptr is not None:
            tl.store(x_ptr + row[:, None] * D + col[None, :], narrow(x, x_ptr.dtype.element_ty), mask=here,
                     eviction_policy="evict_last" if EVICT != "" else "")
    if fn_ptr is not None:
        here = part_ptr + (row * tl.num_programs(1) + tl.program_id(1)) * COLS
        tl.store(here[None, :] + c[:, None], _folded(product, BF16),
                 mask=live[None, :] & (c < (2 + N) * N)[:, None])
        tl.store(here + (2 + N) * N, square, mask=live)


@triton.jit
def _entries(N: tl.constexpr, SIDE: tl.constexpr):
    """Offsets [1, SIDE * SIDE] in a row-major N x N matrix, and which of them exist."""
    i = tl.arange(0, SIDE * SIDE)[None, :]
    j, k = i // SIDE, i % SIDE
    return j * N + k, (j < N) & (k < N)


@triton.jit
def _softmax(B):
    E = tl.exp(B - tl.max(B, axis=2, keep_dims=True))
    return E / tl.sum(E, axis=2, keep_dims=True)


@triton.jit
def _inverse(x):
    """1 / x of a normal number, to the last bit or the one before: a division would check its range."""
    if INTERP:
        inverse = 1.0 / x
    else:
        inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32,
                                            is_pure=True, pack=1)
    return inverse


@triton.jit
def _even(C, axis: tl.constexpr, eps):
    """(C divided by its sums over an axis, the factor that did it)."""
    factor = _inverse(tl.sum(C, axis=axis, keep_dims=True) + eps)
    return C * factor, factor


@triton.jit
def _rounds(C, eps, count):
    for _ in range(count):
        C, _factor = _even(C, 2, eps)
        C, _factor = _even(C, 1, eps)
    return C


@triton.jit
def _sinkhorn(B, real, eps, iters):
    """[R, N, N] -> [R, N, N]: row softmax, then rounds of making columns and rows sum to one."""
    C, _factor = _even(tl.where(real, _softmax(B) + eps, 0.0), 1, eps)
    return _rounds(C, eps, iters - 1)


@triton.jit
def _added(part_ptr, row, live, at, real, slices, COLS: tl.constexpr, SLICES: tl.constexpr):
    """Columns `at` [1, C] of the partial products of rows [R, 1], added over the slices: [R, C].

    Many slices are read at once, and then the sums lie in every warp; with many rows each is to have its own.
    """
    if row.shape[0] < 16:
        s = tl.arange(0, SLICES)[None, :, None]
        offset = (row[:, :, None] * slices + s) * COLS + at[:, None, :]
        sums = tl.sum(ld(part_ptr + offset, live[:, :, None] & (s < slices) & real[:, None, :]), axis=1)
    else:
        sums = tl.zeros([row.shape[0], at.shape[1]], tl.float32)
        for i in tl.static_range(SLICES):
            there = live & (tl.zeros_like(row) + i < slices) & real
            sums += ld(part_ptr + (row * slices + i) * COLS + at, there)
    return sums


@triton.jit
def _norm_of(part_ptr, row, live, slices, eps, D: tl.constexpr, N: tl.constexpr, COLS: tl.constexpr,
             SLICES: tl.constexpr):
    """1 / rms of the streams of rows, [R, 1]."""
    at = (2 + N) * N + tl.arange(0, 1)[None, :]
    return tl.rsqrt(_added(part_ptr, row, live, at, at >= 0, slices, COLS, SLICES) / (N * D) + eps)


@triton.jit
def _finish_weights(part_ptr, base_ptr, scale_ptr, p_ptr, q_ptr, C_ptr, program, rows, slices, eps, hc_eps,
                    iters, D: tl.constexpr, N: tl.constexpr, COLS: tl.constexpr, SLICES: tl.constexpr,
                    SIDE: tl.constexpr, ROWS: tl.constexpr, TABLE: tl.constexpr):
    """A row's columns as a table of lines of N: p, q, the N lines of B, the sum of squares; read at once."""
    row = (program * ROWS + tl.arange(0, ROWS))[:, None]
    live = row < rows
    i, k = tl.arange(0, TABLE * SIDE)[None, :] // SIDE, tl.arange(0, TABLE * SIDE)[None, :] % SIDE
    at, square, logit = i * N + k, (i == 2 + N) & (k == 0), (i < 2 + N) & (k < N)
    sums = _added(part_ptr, row, live, at, logit | square, slices, COLS, SLICES)
    norm = tl.rsqrt(tl.sum(tl.where(square, sums, 0.0), axis=1, keep_dims=True) / (N * D) + eps)
    z = ld(base_ptr + at, logit) + sums * norm * ld(scale_ptr + tl.minimum(i, 2))
    gate = tl.sigmoid(z)
    tl.store(p_ptr + row * N + k, gate + hc_eps, mask=live & (i == 0) & (k < N))
    tl.store(q_ptr + row * N + k, 2.0 * gate, mask=live & (i == 1) & (k < N))
    real = logit & (i >= 2)
    B = tl.where(real, z, -1e30).reshape(ROWS, TABLE, SIDE)
    C = _sinkhorn(B, real.reshape(1, TABLE, SIDE), hc_eps, iters).reshape(ROWS, TABLE * SIDE)
    tl.store(C_ptr + row * (N * N) + at - 2 * N, C, mask=live & real)


@triton.jit
def _norm_(x_ptr, gain_ptr, program, rows, eps, D: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
           NORMS: tl.constexpr):
    """Norm rows of x in place, each in two pieces, so that no lane idles at 5120 = 4096 + 1024."""
    row, col = (program * NORMS + tl.arange(0, NORMS))[:, None], tl.arange(0, MAIN)[None, :]
    at, here = x_ptr + row * D + col, (row < rows) & (col < D)
    x = ld(at, here)
    square = tl.sum(x * x, axis=1, keep_dims=True)
    if REST:
        col2 = MAIN + tl.arange(0, REST)[None, :]
        at2, here2 = x_ptr + row * D + col2, (row < rows) & (col2 < D)
        x2 = ld(at2, here2)
        square += tl.sum(x2 * x2, axis=1, keep_dims=True)
    factor = tl.rsqrt(square / D + eps)
    tl.store(at, narrow(x * factor * ld(gain_ptr + col, col < D), x_ptr.dtype.element_ty), mask=here)
    if REST:
        y2 = x2 * factor * ld(gain_ptr + col2, col2 < D)
        tl.store(at2, narrow(y2, x_ptr.dtype.element_ty), mask=here2)


@triton.jit
def _finish_fwd_kernel(part_ptr, base_ptr, scale_ptr, p_ptr, q_ptr, C_ptr, x_ptr, gain_ptr, rows, slices,
                       mixing, eps, hc_eps, iters, D: tl.constexpr, N: tl.constexpr, COLS: tl.constexpr,
                       SLICES: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, TABLE: tl.constexpr,
                       MAIN: tl.constexpr, REST: tl.constexpr, NORMS: tl.constexpr):
    """The first `mixing` programs turn partial products into weights, the others norm rows of x in place."""
    program = tl.program_id(0).to(tl.int64)
    if program < mixing:
        _finish_weights(part_ptr, base_ptr, scale_ptr, p_ptr, q_ptr, C_ptr, program, rows, slices, eps,
                        hc_eps, iters, D, N, COLS, SLICES, SIDE, ROWS, TABLE)
    elif x_ptr is not None:
        _norm_(x_ptr, gain_ptr, program - mixing, rows, eps, D, MAIN, REST, NORMS)


@triton.jit
def _sinkhorn_fwd_kernel(B_ptr, C_ptr, rows, eps, iters, N: tl.constexpr, SIDE: tl.constexpr,
                         ROWS: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    at, real = _entries(N, SIDE)
    B = ld(B_ptr + row * (N * N) + at, (row < rows) & real, -1e30).reshape(ROWS, SIDE, SIDE)
    C = _sinkhorn(B, real.reshape(1, SIDE, SIDE), eps, iters).reshape(ROWS, SIDE * SIDE)
    tl.store(C_ptr + row * (N * N) + at, C, mask=(row < rows) & real)


# ---- kernels: backward -------------------------------------------------------------------------------------

@triton.jit
def _write_bwd_kernel(dout_ptr, y_ptr, stride_y, X_ptr, stride_t, stride_n, q_ptr, C_ptr, dy_ptr, dX_ptr,
                      dq_ptr, dC_ptr, rows, D: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr,
                      BLOCK_D: tl.constexpr):
    """dy = sum_k q_k G_k, dX_j = sum_k C_jk G_k, dq_k = <y, G_k>, dC_jk = <X_j, G_k> of the gradient G."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < rows
    q, C = _weights(q_ptr, row, live, N), _weights(C_ptr, row, live, N * N)
    sums = ()
    for _ in tl.static_range(N + N * N):
        sums = sums + (tl.zeros([BLOCK_M, BLOCK_D], tl.float32),)
    for first in range(0, D, BLOCK_D):
        col = first + tl.arange(0, BLOCK_D)
        here = live[:, None] & (col < D)[None, :]
        y = ld(y_ptr + row[:, None] * stride_y + col[None, :], here)
        G, streams, added = (), (), ()
        for n in tl.static_range(N):
            G = G + (ld(dout_ptr + (row[:, None] * N + n) * D + col[None, :], here),)
            streams = streams + (ld(X_ptr + row[:, None] * stride_t + n * stride_n + col[None, :], here),)
        dy = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for k in tl.static_range(N):
            dy += q[k][:, None] * G[k]
            added = added + (sums[k] + y * G[k],)
        tl.store(dy_ptr + row[:, None] * D + col[None, :], narrow(dy, dy_ptr.dtype.element_ty), mask=here)
        for j in tl.static_range(N):
            dX = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for k in tl.static_range(N):
                dX += C[j * N + k][:, None] * G[k]
                added = added + (sums[N + j * N + k] + streams[j] * G[k],)
            at = dX_ptr + (row[:, None] * N + j) * D + col[None, :]
            tl.store(at, narrow(dX, dX_ptr.dtype.element_ty), mask=here)
        sums = added
    for k in tl.static_range(N):
        tl.store(dq_ptr + row * N + k, tl.sum(sums[k], axis=1), mask=live)
    for i in tl.static_range(N * N):
        tl.store(dC_ptr + row * (N * N) + i, tl.sum(sums[N + i], axis=1), mask=live)


@triton.jit
def _read_bwd_kernel(dx_ptr, stride_dx, p_ptr, X_ptr, stride_t, stride_n, dp_ptr, dX_ptr, rows,
                     D: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """dX_j = p_j g, dp_j = <X_j, g> of the gradient g."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < rows
    p, sums = _weights(p_ptr, row, live, N), ()
    for _ in tl.static_range(N):
        sums = sums + (tl.zeros([BLOCK_M, BLOCK_D], tl.float32),)
    for first in range(0, D, BLOCK_D):
        col = first + tl.arange(0, BLOCK_D)
        here = live[:, None] & (col < D)[None, :]
        g = ld(dx_ptr + row[:, None] * stride_dx + col[None, :], here)
        added = ()
        for j in tl.static_range(N):
            X = ld(X_ptr + row[:, None] * stride_t + j * stride_n + col[None, :], here)
            added = added + (sums[j] + X * g,)
            at = dX_ptr + (row[:, None] * N + j) * D + col[None, :]
            tl.store(at, narrow(p[j][:, None] * g, dX_ptr.dtype.element_ty), mask=here)
        sums = added
    for j in tl.static_range(N):
        tl.store(dp_ptr + row * N + j, tl.sum(sums[j], axis=1), mask=live)


@triton.jit
def _uneven(dC, C, axis: tl.constexpr, factor):
    """The gradient before `_even`, which made C with this factor."""
    return (dC - tl.sum(dC * C, axis=axis, keep_dims=True)) * factor


@triton.jit
def _sinkhorn_bwd(B, dC, real, eps, iters):
    """The gradient of B.  Each round is reached from the first again: 16 numbers cost less than memory."""
    P = _softmax(B)
    start, first = _even(tl.where(real, P + eps, 0.0), 1, eps)
    for back in range(iters - 1):
        C, by_row = _even(_rounds(start, eps, iters - 2 - back), 2, eps)
        last, by_column = _even(C, 1, eps)
        dC = _uneven(dC, last, 1, by_column)
        dC = _uneven(dC, C, 2, by_row)
    dC = tl.where(real, _uneven(dC, start, 1, first), 0.0)
    return P * (dC - tl.sum(P * dC, axis=2, keep_dims=True))


@triton.jit
def _sinkhorn_bwd_kernel(B_ptr, dC_ptr, dB_ptr, rows, eps, iters, N: tl.constexpr, SIDE: tl.constexpr,
                         ROWS: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    at, real = _entries(N, SIDE)
    here = (row < rows) & real
    B = ld(B_ptr + row * (N * N) + at, here, -1e30).reshape(ROWS, SIDE, SIDE)
    dC = ld(dC_ptr + row * (N * N) + at, here).reshape(ROWS, SIDE, SIDE)
    dB = _sinkhorn_bwd(B, dC, real.reshape(1, SIDE, SIDE), eps, iters)
    tl.store(dB_ptr + row * (N * N) + at, dB.reshape(ROWS, SIDE * SIDE), mask=here)


@triton.jit
def _leave(du, m, scale, norm, da_ptr, du_ptr, row, at, here, size, COLS: tl.constexpr):
    """Store da = du scale / rms [COLS, T], du and du m of some logits; returns sum(da m) of rows, [R, 1]."""
    da = du * scale * norm
    tl.store(da_ptr + at * (size // COLS) + row, da, mask=here)
    tl.store(du_ptr + row * COLS + at, du, mask=here)
    tl.store(du_ptr + size + row * COLS + at, du * m, mask=here)
    return tl.sum(tl.where(here, da * m, 0.0), axis=1, keep_dims=True)


@triton.jit
def _mixes_bwd_rows_kernel(part_ptr, base_ptr, scale_ptr, dp_ptr, dq_ptr, dC_ptr, da_ptr, du_ptr, rows,
                           slices, eps, hc_eps, iters, D: tl.constexpr, N: tl.constexpr, COLS: tl.constexpr,
                           SLICES: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr):
    """From gradients of the weights to those of the raw product a and of the factor 1 / rms.

    Line (2 + N) N of da holds what every channel of the row is multiplied by: -sum(da m) / (rms N D).
    """
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    live, size = row < rows, tl.full([], rows, tl.int64) * COLS
    norm = _norm_of(part_ptr, row, live, slices, eps, D, N, COLS, SLICES)
    n = tl.arange(0, SIDE)[None, :]
    here = live & (n < N)
    m = _added(part_ptr, row, live, n, n < N, slices, COLS, SLICES) * norm
    gate = tl.sigmoid(ld(base_ptr + n, n < N) + m * ld(scale_ptr))
    du = ld(dp_ptr + row * N + n, here) * gate * (1.0 - gate)
    along = _leave(du, m, ld(scale_ptr), norm, da_ptr, du_ptr, row, n, here, size, COLS)
    m = _added(part_ptr, row, live, N + n, n < N, slices, COLS, SLICES) * norm
    gate = tl.sigmoid(ld(base_ptr + N + n, n < N) + m * ld(scale_ptr + 1))
    du = 2.0 * ld(dq_ptr + row * N + n, here) * gate * (1.0 - gate)
    along += _leave(du, m, ld(scale_ptr + 1), norm, da_ptr, du_ptr, row, N + n, here, size, COLS)
    at, real = _entries(N, SIDE)
    here = live & real
    m = _added(part_ptr, row, live, 2 * N + at, real, slices, COLS, SLICES) * norm
    B = ld(base_ptr + 2 * N + at, real, -1e30) + m * ld(scale_ptr + 2)
    dC = ld(dC_ptr + row * (N * N) + at, here).reshape(ROWS, SIDE, SIDE)
    dB = _sinkhorn_bwd(B.reshape(ROWS, SIDE, SIDE), dC, real.reshape(1, SIDE, SIDE), hc_eps, iters)
    dB = dB.reshape(ROWS, SIDE * SIDE)
    along += _leave(dB, m, ld(scale_ptr + 2), norm, da_ptr, du_ptr, row, 2 * N + at, here, size, COLS)
    tl.store(da_ptr + (size // COLS) * ((2 + N) * N) + row, -along * norm / (N * D), mask=live)


@triton.jit
def _product(a, b, acc, BF16: tl.constexpr):
    """acc + a @ b of float32, with BF16 from two bfloat16 pieces of each (their small product left out)."""
    if BF16:
        high_a, high_b = to_bf16(a), to_bf16(b)
        acc = dot(high_a, high_b, acc)
        acc = dot(high_a, to_bf16(b - high_b.to(tl.float32)), acc)
        return dot(to_bf16(a - high_a.to(tl.float32)), high_b, acc)
    else:
        return dot(a, b, acc)


@triton.jit
def _mixes_bwd_kernel(X_ptr, stride_t, stride_n, da_ptr, fn_ptr, dX_ptr, dfn_ptr, rows, steps,
                      D: tl.constexpr, N: tl.constexpr, COLS: tl.constexpr, BF16: tl.constexpr,
                      BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """dX = da fn + factor X and dfn = da^T X: a program holds some channels of fn and walks over rows."""
    tile, c = tl.program_id(0), tl.arange(0, COLS)
    blocks = tl.cdiv(D, BLOCK_D)
    n, col = tile // blocks, tile % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    at = c[:, None] * (N * D) + n * D + col[None, :]
    logit, size = c < (2 + N) * N, tl.full([], rows, tl.int64)
    real = logit[:, None] & (col < D)[None, :]
    fn = ld(fn_ptr + at, real)
    dfn = tl.zeros([2 * COLS if BF16 else COLS, BLOCK_D], tl.float32)
    start = tl.program_id(1) * steps * BLOCK_M
    for first in range(start, tl.minimum(start + steps * BLOCK_M, rows), BLOCK_M):
        row = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
        live = row < rows
        here = live[:, None] & (col < D)[None, :]
        X = ld(X_ptr + row[:, None] * stride_t + n * stride_n + col[None, :], here)
        da = ld(da_ptr + c[None, :, None] * size + row[None, None, :],
                live[None, None, :] & logit[None, :, None])
        factor = ld(da_ptr + (2 + N) * N * size + row, live)
        dX = _product(tl.trans(da.reshape(COLS, BLOCK_M)), fn, factor[:, None] * X, BF16)
        tl.store(dX_ptr + (row[:, None] * N + n) * D + col[None, :], narrow(dX, dX_ptr.dtype.element_ty),
                 mask=here)
        dfn = _times(da, X, dfn, BF16)
    tl.store(dfn_ptr + tl.program_id(1) * ((2 + N) * N * N * D) + at, _folded(dfn, BF16), mask=real)


# ---- launches ----------------------------------------------------------------------------------------------

def _refuses(*given: object, **named: object) -> str | None:
    """Why these kernels cannot take such arguments, or None."""
    tensors = [one for one in (*given, *named.values()) if isinstance(one, Tensor)]
    dtypes = [one for one in given if isinstance(one, torch.dtype)] + [tensor.dtype for tensor in tensors]
    strange = [dtype for dtype in dtypes if dtype not in (torch.bfloat16, torch.float32)]
    return f"its numbers are bfloat16 or float32, not {strange[0]}" if strange else refuse(*tensors)


def _wants_grad(*given: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in given)


def _channels_together(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 or not t.numel() else t.contiguous()


def _columns(N: int) -> int:
    """Columns of a partial product: the logits, the sum of squares, and what fills a tensor core's tile."""
    return max(16, pow2((2 + N) * N + 1))


def _tile_for(name: str, X: Tensor, steady: bool) -> tuple[Tile, int]:
    """(tile, tiles per program) of an op for streams [T, N, D], so that all programs run at once."""
    T, _, D = X.shape
    product = name in ("mhc.mixes", "mhc.boundary")
    if steady and product:
        tile, slices = STEADY
    else:
        hopper = PLAIN if name == "mhc.mixes" else MIXING
        table = MOVING if not product else hopper if refuse(X, sm=90) is None else BEFORE_HOPPER
        tile = Tile(**tuned(name, tuple(X.shape), up_to(table, T)._asdict()))
        slices = max(1, tile.resident * processors(X) // max(1, cdiv(T, tile.rows)))
    return tile, cdiv(cdiv(D, tile.channels), slices)


def _pass(y: Tensor | None, X: Tensor, p: Tensor | None, q: Tensor | None, C: Tensor | None,
          fn: Tensor | None, dtype: torch.dtype, *, held: torch.dtype | None = None, steady: bool = False
          ) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """One pass over the streams: (X' in `held`, x or None, partial products [T, slices, COLS] or None)."""
    T, N, D = X.shape
    require(y is None or y.shape == (T, D), "y_TD", f"must be {[T, D]} for streams {[T, N, D]}")
    require(p is None or p.shape == (T, N), "p_TN", f"must be {[T, N]} for streams {[T, N, D]}")
    require(y is None or q.shape == (T, N), "q_TN", f"must be {[T, N]} for streams {[T, N, D]}")
    require(y is None or C.shape == (T, N, N), "C_TNN", f"must be {[T, N, N]} for streams {[T, N, D]}")
    require(fn is None or fn.shape == ((2 + N) * N, N * D), "fn", f"must be {[(2 + N) * N, N * D]}")
    X, y = _channels_together(X), None if y is None else _channels_together(y)
    p, q, C, fn = (None if one is None else one.contiguous() for one in (p, q, C, fn))
    parts = {"mhc.write": y, "mhc.read": p, "mhc.mixes": fn}
    given = [name for name, part in parts.items() if part is not None]
    tile, tiles = _tile_for(given[0] if len(given) == 1 else "mhc.boundary", X, steady)
    slices = cdiv(cdiv(D, tile.channels), tiles)
    out = X if y is None else X.new_empty(T, N, D, dtype=held or dtype)
    x = None if p is None else X.new_empty(T, D, dtype=dtype)
    part = None if fn is None else X.new_empty(T, slices, _columns(N), dtype=torch.float32)
    if T:
        _boundary_fwd_kernel[(cdiv(T, tile.rows), slices)](
            y, 0 if y is None else y.stride(0), X, X.stride(0), X.stride(1), p, q, C, fn,
            None if y is None else out, x, part, T, tiles, D, N, _columns(N), dtype == torch.bfloat16,
            "evict_first" if X.numel() * X.itemsize > FAR else "", tile.rows, tile.channels, tile.stages,
            math.gcd(tile.together, N), num_warps=tile.warps)
    return out, x, part


def _finish_tile(slices: int, N: int) -> dict[str, int]:
    """Rows of a program that adds partial products, so that it holds them all at once."""
    return {"COLS": _columns(N), "SLICES": pow2(slices), "SIDE": pow2(N),
            "ROWS": 16 if slices <= 8 else 1}


def _finish(part: Tensor, base: Tensor, scale: Tensor, shape: torch.Size, eps: float, hc_eps: float,
            iters: int, x: Tensor | None = None, gain: Tensor | None = None
            ) -> tuple[Tensor, Tensor, Tensor]:
    """The weights (p, q, C) of streams of `shape` from partial products; norms a given x in place."""
    (T, N, D), slices = shape, part.shape[1]
    require(base.shape == ((2 + N) * N,), "base", f"must be {[(2 + N) * N]}")
    require(scale.shape == (3,), "scale", "must be [3]")
    require(gain is None or gain.shape == (D,), "gain_D", f"must be {[D]}")
    p, q, C = (part.new_empty(T, *shape) for shape in ((N,), (N,), (N, N)))
    tile, main = _finish_tile(slices, N), pow2(D) if pow2(D) == D else pow2(D) // 2
    norms = max(1, 4096 // pow2(D))
    mixing = cdiv(T, tile["ROWS"])
    if T:
        _finish_fwd_kernel[(mixing + (0 if x is None else cdiv(T, norms)),)](
            part, base.contiguous(), scale.contiguous(), p, q, C, x,
            None if gain is None else gain.contiguous(), T, slices, mixing, eps, hc_eps, iters, D, N,
            TABLE=pow2(N + 3), MAIN=main, REST=pow2(D - main) if main < D else 0, NORMS=norms, num_warps=4,
            **tile)
    return p, q, C


def _row_tile(X: Tensor) -> dict[str, int]:
    """A program of the backward kernels walks over all channels of its rows."""
    channels = min(pow2(X.shape[2]), WALKING)
    return {"BLOCK_M": WALKING // channels, "BLOCK_D": channels, "num_warps": 4}


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, X, q, C, dtype):
        ctx.save_for_backward(y, X, q, C)
        return _pass(y, X, None, q, C, None, dtype)[0]

    @staticmethod
    def backward(ctx, dout):
        y, X, q, C = ctx.saved_tensors
        (T, N, D), tile = X.shape, _row_tile(X)
        X, y = _channels_together(X), _channels_together(y)
        dy, dX = y.new_empty(T, D), X.new_empty(T, N, D)
        dq, dC = dout.new_empty(T, N, dtype=torch.float32), dout.new_empty(T, N, N, dtype=torch.float32)
        if T:
            _write_bwd_kernel[(cdiv(T, tile["BLOCK_M"]),)](
                dout.contiguous(), y, y.stride(0), X, X.stride(0), X.stride(1), q.contiguous(),
                C.contiguous(), dy, dX, dq, dC, T, D, N, **tile)
        return dy, dX, dq.to(q.dtype), dC.to(C.dtype), None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, X, dtype):
        ctx.save_for_backward(p, X)
        return _pass(None, X, p, None, None, None, dtype)[1]

    @staticmethod
    def backward(ctx, dx):
        p, X = ctx.saved_tensors
        (T, N, D), tile = X.shape, _row_tile(X)
        X, dx = _channels_together(X), _channels_together(dx)
        dp, dX = dx.new_empty(T, N, dtype=torch.float32), X.new_empty(T, N, D)
        if T:
            _read_bwd_kernel[(cdiv(T, tile["BLOCK_M"]),)](
                dx, dx.stride(0), p.contiguous(), X, X.stride(0), X.stride(1), dp, dX, T, D, N, **tile)
        return dp.to(p.dtype), dX, None


class _Mixes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, fn, base, scale, eps, hc_eps, iters, steady):
        part = _pass(None, X, None, None, None, fn, X.dtype, steady=steady)[2]
        ctx.save_for_backward(X, fn, base, scale, part)
        ctx.numbers = eps, hc_eps, iters
        return _finish(part, base, scale, X.shape, *ctx.numbers)

    @staticmethod
    def backward(ctx, dp, dq, dC):
        X, fn, base, scale, part = ctx.saved_tensors
        (T, N, D), C = X.shape, (2 + X.shape[1]) * X.shape[1]
        X, tile = _channels_together(X), _finish_tile(part.shape[1], N)
        da, du = part.new_empty(T, tile["COLS"]), part.new_empty(2, T, tile["COLS"])
        rows, channels = BACKWARD
        across = N * cdiv(D, channels)
        steps = cdiv(cdiv(T, rows), max(1, cdiv(2 * processors(X), across)))
        segments = cdiv(cdiv(T, rows), max(1, steps))
        dX, dfn = X.new_empty(T, N, D), part.new_empty(segments, C, N * D)
        if T:
            _mixes_bwd_rows_kernel[(cdiv(T, tile["ROWS"]),)](
                part, base.contiguous(), scale.contiguous(), dp.contiguous(), dq.contiguous(),
                dC.contiguous(), da, du, T, part.shape[1], *ctx.numbers, D, N, num_warps=4, **tile)
            _mixes_bwd_kernel[(across, segments)](
                X, X.stride(0), X.stride(1), da, fn.contiguous(), dX, dfn, T, steps, D, N, tile["COLS"],
                X.dtype == torch.bfloat16, rows, channels, num_warps=4)
        dbase, dscale = du[:, :, :C].sum(1)
        dscale = torch.stack([some.sum() for some in dscale.split((N, N, N * N))])
        return (dX, dfn.sum(0).to(fn.dtype), dbase.to(base.dtype), dscale.to(scale.dtype), None, None, None,
                None)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, B, iters, eps):
        ctx.save_for_backward(B)
        ctx.numbers = eps, iters
        return _sinkhorn_rows(_sinkhorn_fwd_kernel, B, *ctx.numbers)

    @staticmethod
    def backward(ctx, dC):
        (B,) = ctx.saved_tensors
        return _sinkhorn_rows(_sinkhorn_bwd_kernel, B, *ctx.numbers, dC.contiguous()), None, None


def _sinkhorn_rows(kernel, B: Tensor, eps: float, iters: int, *more: Tensor) -> Tensor:
    """Run a kernel over matrices [T, N, N]; the result has the shape and dtype of B."""
    T, N, columns = B.shape
    require(columns == N, "B_TNN", f"must hold square matrices, not {[N, columns]}")
    result, side = torch.empty_like(B, memory_format=torch.contiguous_format), pow2(N)
    config = tuned("mhc.sinkhorn", (T, N), SINKHORN)
    rows = max(1, config["numbers"] // (side * side))
    if T:
        kernel[(cdiv(T, rows),)](B.contiguous(), *more, result, T, eps, iters, N, side, rows,
                                 num_warps=config["num_warps"])
    return result


# ---- the ops -----------------------------------------------------------------------------------------------

@ops.implement("mhc.sinkhorn", "triton", when=_refuses, grad=True)
def sinkhorn(B_TNN: Tensor, iters: int, eps: float) -> Tensor:
    """Doubly stochastic matrices [T, N, N] from logits."""
    return _Sinkhorn.apply(B_TNN, iters, eps)


@ops.implement("mhc.mixes", "triton", when=_refuses, grad=True)
def mixes(X_TND: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, hc_eps: float, iters: int,
          row_tile: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Read, write and mix weights (p_TN, q_TN, C_TNN) of the streams."""
    return _Mixes.apply(X_TND, fn, base, scale, eps, hc_eps, iters, row_tile is not None)


@ops.implement("mhc.read", "triton", when=_refuses, grad=True)
def read(p_TN: Tensor, X_TND: Tensor, dtype: torch.dtype) -> Tensor:
    """x_TD = sum of the streams under the read weights."""
    return _Read.apply(p_TN, X_TND, dtype)


@ops.implement("mhc.write", "triton", when=_refuses, grad=True)
def write(y_TD: Tensor, X_TND: Tensor, q_TN: Tensor, C_TNN: Tensor, dtype: torch.dtype) -> Tensor:
    """The streams with y spread by q and mixed by C transposed."""
    return _Write.apply(y_TD, X_TND, q_TN, C_TNN, dtype)


@ops.implement("mhc.boundary", "triton", when=_refuses, grad=True)
def boundary(y_TD: Tensor | None, X_TND: Tensor, p_TN: Tensor | None, q_TN: Tensor | None,
             C_TNN: Tensor | None, fn: Tensor, base: Tensor, scale: Tensor, gain_D: Tensor, eps: float,
             hc_eps: float, iters: int, dtype: torch.dtype, row_tile: int | None = None
             ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(X', normed x_TD, p', q', C'); with a gradient, or reading with the new weights, in its parts."""
    steady = row_tile is not None
    norm = partial(ops.find("norm.rms"), steady=True) if steady else ops.find("norm.rms")
    if _wants_grad(y_TD, X_TND, p_TN, q_TN, C_TNN, fn, base, scale, gain_D):
        X = X_TND if y_TD is None else write(y_TD, X_TND, q_TN, C_TNN, dtype).to(X_TND.dtype)
        p, q, C = mixes(X, fn, base, scale, eps, hc_eps, iters, row_tile)
        return X, norm(read(p if p_TN is None else p_TN, X, dtype), gain_D, eps, dtype), p, q, C
    X, x, part = _pass(y_TD, X_TND, p_TN, q_TN, C_TNN, fn, dtype, held=X_TND.dtype, steady=steady)
    p, q, C = _finish(part, base, scale, X.shape, eps, hc_eps, iters, x, gain_D)
    return X, norm(read(p, X, dtype), gain_D, eps, dtype) if x is None else x, p, q, C
