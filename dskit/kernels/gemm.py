"""Products with FP8 weights as they are stored: codes of e4m3 and one power of two per block.

Ways, of which a table measured on the GPU chooses by shape
    codes    [T, K] codes x [N, K] codes.  A step reads SPAN groups of K; the tensor core multiplies the codes
             of one group, and one multiply-add per element of the tile adds its sum, scaled, to the total:

                 K   │ 32 │ 32 │ 32 │ 32 │            sum += 2^(row) 2^(block) (codes . codes)
                 x   │ s0   s1   s2   s3 │ per row
                 w   │ r0   r1   r2   r3 │ per block of weight rows

             A tile is kept as [T, blocks, rows of a block], so that a thread needs one product of scales per
             row and block, and no multiplication per element.
    numbers  bfloat16 x FP8: a tile of weights is widened, exactly, with its scales.
             Either way may be turned, y^T = w x^T: the left operand has 64 rows at least, the right one 8.
    restored weights are widened once into memory, and a library multiplies bfloat16: three times the bytes
             of the weight, and no conversion between products.
    groups, spans
             codes with a scale for 32 or 128 channels, brought by a warp of its own: gemm_hopper.py, for
             Hopper and what it takes; the rest goes the way of the table above.  For spans scales of 32
             channels are folded beforehand.
    Few rows leave too few tiles to stream the weight at full speed: K is cut into parts, which a second
    kernel adds in order, so that a result has the same bits every time.

Shapes
    x [T, K], or [T, groups * K]; weight [N, K], scale [ceil(N / rows), ceil(K / cols)]; y [T, N].

Units
    Bytes: N K weights, once for every tile of T; restored, 3 N K for the scratch and 2 N K for the product.
    2 T N K operations; by codes T N K / 32 multiply-adds beside the tensor core, as many cycles as its own at
    FP8's speed, so that bfloat16 at half of it is as fast where nothing hides them.

Errors
    ValueError names an argument that does not fit.

Numerics
    Sums of 32 products, in spans of 128, are rounded by the tensor core (to about 13 bits), all others are
    float32.

Source
    kernels.md 1.2, 2.3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dskit import ops
from dskit.kernels.common import (
    capability,
    cdiv,
    dot,
    from_e8m0,
    ld,
    narrow,
    processors,
    refuse,
    require,
    rows_of,
    to_bf16,
    tuned,
    up_to,
)


def _way(way: str, block_t: int, block_n: int, block_k: int, fill: int, num_warps: int, num_stages: int,
         tall: int = 1, tma: int = 0, turned: int = 1) -> dict[str, int | str]:
    return {"way": way, "block_t": block_t, "block_n": block_n, "block_k": block_k, "fill": fill,
            "tall": tall, "tma": tma, "turned": turned, "num_warps": num_warps, "num_stages": num_stages}


def _codes(block_t: int, block_n: int, fill: int, num_warps: int, num_stages: int, tall: int = 1,
           tma: int = 0, turned: int = 0) -> dict[str, int | str]:
    return _way("codes", block_t, block_n, 0, fill, num_warps, num_stages, tall, tma, turned)


def _numbers(block_t: int, block_n: int, block_k: int, fill: int, num_warps: int, num_stages: int,
             turned: int = 1) -> dict[str, int | str]:
    return _way("numbers", block_t, block_n, block_k, fill, num_warps, num_stages, turned=turned)


def _hopper(way: str, block_t: int, block_n: int, fill: int, num_stages: int) -> dict[str, int | str]:
    return _way(way, block_t, block_n, 128, fill, 4, num_stages, tma=1, turned=0)


# rows up to -> a way, its tile, and programs that a multiprocessor should get (K is cut for it)
RESTORED = _way("restored", 0, 32, 256, 0, 4, 1)
PROJECT = {16: _numbers(16, 64, 128, 4, 4, 4), 32: _numbers(32, 64, 128, 3, 4, 4),
           64: _numbers(64, 64, 128, 3, 4, 3), 256: _numbers(128, 128, 64, 1, 8, 5, turned=0),
           1 << 62: RESTORED}
PLAIN = {16: PROJECT[16], 32: PROJECT[32], 256: _codes(64, 128, 2, 4, 4), 1 << 62: RESTORED}
CODED = PLAIN | {16: _codes(16, 64, 4, 4, 5, turned=1), 32: _codes(32, 64, 4, 4, 5, turned=1)}
SPANS = {1024: _codes(64, 128, 1, 4, 4, tma=1),  # a scale for 128 channels: fewer sums are under way
         1 << 62: _codes(128, 128, 1, 8, 4, tall=2)}
FEW = (_numbers(16, 64, 128, 4, 4, 4), _numbers(16, 64, 128, 2, 4, 6), _numbers(32, 64, 128, 3, 4, 4),
       _numbers(64, 64, 128, 3, 4, 3), _numbers(64, 64, 64, 4, 4, 5),
       *(_numbers(*each, turned=0) for each in ((64, 128, 64, 2, 4, 4), (64, 256, 64, 1, 8, 5),
                                                (128, 64, 64, 2, 8, 4), (128, 128, 64, 1, 8, 5),
                                                (128, 128, 64, 2, 8, 4), (128, 128, 128, 1, 8, 3),
                                                (128, 256, 64, 1, 8, 4))))
WIDE = (RESTORED, _numbers(128, 128, 64, 1, 4, 3, turned=0), _numbers(128, 256, 64, 1, 8, 3, turned=0),
        _numbers(256, 128, 64, 1, 8, 3, turned=0), _numbers(128, 128, 64, 1, 8, 4, turned=0))
HOPPER = {"groups": (_hopper("groups", 128, 128, 1, 6), _hopper("groups", 128, 64, 1, 8),
                     _hopper("groups", 64, 128, 2, 4), _hopper("groups", 64, 64, 2, 6)),
          "spans": (_hopper("spans", 128, 256, 1, 4), _hopper("spans", 192, 128, 1, 4),
                    _hopper("spans", 128, 128, 1, 6))}
# the same for Hopper, where one was the fastest at most widths that were timed on an H200 with 128 and with
# 4,096 rows, 2026-11-30; those of 33 to 64 rows are taken as those of 128
FAST = {32: None, 256: HOPPER["groups"][2], 1024: None, 1 << 62: HOPPER["spans"][0]}
CANDIDATES = {
    "gemm.fp8/few": (*FEW, *HOPPER["groups"],
                     _codes(16, 64, 4, 4, 5, turned=1), _codes(16, 128, 2, 4, 6, turned=1),
                     _codes(32, 64, 4, 4, 5, turned=1), _codes(32, 128, 2, 4, 6, turned=1),
                     _codes(64, 64, 3, 4, 4, turned=1), _codes(64, 64, 3, 4, 4), _codes(64, 128, 2, 4, 4),
                     _codes(128, 64, 1, 8, 4)),
    "gemm.fp8/many": (*WIDE, *HOPPER["spans"], _codes(128, 128, 1, 8, 4), _codes(64, 128, 1, 4, 3),
                      _codes(128, 64, 1, 8, 4, 2)),
    "gemm.fp8/spans": (_codes(128, 128, 1, 8, 4, 2), _codes(128, 128, 1, 8, 3, 2),
                       _codes(128, 128, 1, 8, 4, 2, 1), _codes(128, 128, 1, 8, 4),
                       _codes(128, 128, 1, 8, 4, 1, 1), _codes(64, 128, 1, 4, 3),
                       _codes(64, 128, 1, 4, 4, 1, 1), _codes(128, 64, 1, 8, 4, 2, 1), RESTORED,
                       *HOPPER["spans"]),
    "gemm.project/few": FEW, "gemm.project/many": WIDE}
MANY = 256  # rows beyond which a product is bound by arithmetic
BAND = tl.constexpr(8)  # tiles of rows that are walked side by side, so that weights stay in the L2
PIECE = 1024  # elements whose parts one program adds
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # scales read at once -> the word that holds them


# ---- kernels -----------------------------------------------------------------------------------------------

@triton.jit
def _tile(tiles_t, tiles_n):
    """(tile of rows, tile of weight rows) of a program: bands of BAND row tiles, walked across N."""
    pid = tl.program_id(0)
    band = pid // (BAND * tiles_n)
    tall = tl.minimum(tiles_t - band * BAND, BAND)
    within = pid % (BAND * tiles_n)
    return band * BAND + within % tall, within // tall


@triton.jit
def _scale(word, J: tl.constexpr):
    """Byte J of words that hold the E8M0 scales of consecutive groups, as a number.

    Byte 0, 2^-127, is taken as zero, and 255, no number, as infinity: what they scale is no weight's.
    """
    return (((word.to(tl.int32) >> (8 * J)) & 0xFF) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _group(ptr, desc, at, first, k, K, TMA: tl.constexpr, EVEN: tl.constexpr):
    """The codes of one group for a tile of rows: a copy by the engine, or by the threads."""
    if TMA:
        return desc.load([at, first])
    elif EVEN:
        return tl.load(ptr + first)
    else:
        return tl.load(ptr + first, mask=first + k < K, other=0.0)


@triton.jit
def _add(acc, x, w, xs, ws, J: tl.constexpr, TURNED: tl.constexpr):
    """acc [rows, blocks, weight rows of a block] + products of codes times the scales of group J.

    Turned it is [blocks, weight rows of a block, rows].
    """
    xs, ws = _scale(xs, J), _scale(ws, J)
    if TURNED:
        codes = dot(w, tl.trans(x), tl.zeros((w.shape[0], x.shape[0]), tl.float32))
        scale = (ws[:, None] * xs[None, :])[:, None, :]
    else:
        codes = dot(x, tl.trans(w), tl.zeros((x.shape[0], w.shape[0]), tl.float32))
        scale = (xs[:, None] * ws[None, :])[:, :, None]
    return acc + codes.reshape(acc.shape) * scale


@triton.jit
def _put(y_ptr, acc, t, n, T, N, TURNED: tl.constexpr):
    y = tl.trans(acc.reshape(n.shape[0], t.shape[0])) if TURNED else acc.reshape(t.shape[0], n.shape[0])
    y = narrow(y, y_ptr.dtype.element_ty)
    tl.store(y_ptr + t.to(tl.int64)[:, None] * N + n[None, :], y, mask=(t[:, None] < T) & (n[None, :] < N))


@triton.jit
def _gemm_fp8_kernel(x_ptr, x_desc, xs_ptr, w_ptr, w_desc, ws_ptr, y_ptr, T, N, K, stride_x, stride_xs,
                     stride_w, stride_ws, steps, tiles_t, tiles_n, BLOCK_T: tl.constexpr,
                     BLOCK_N: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
                     TALL: tl.constexpr, TMA: tl.constexpr, TURNED: tl.constexpr, EVEN: tl.constexpr):
    """A tile of y, or of one part of K of it, TALL * BLOCK_T rows high: each w serves both halves.

    Rows beyond the last repeat it and are not written.
    """
    tile_t, tile_n = _tile(tiles_t, tiles_n)
    BLOCKS: tl.constexpr = max(1, BLOCK_N // ROWS)
    at_t, at_n = tile_t * (BLOCK_T * TALL), tile_n * BLOCK_N
    t, n = at_t + tl.arange(0, BLOCK_T), at_n + tl.arange(0, BLOCK_N)
    row, k = tl.minimum(t, T - 1), tl.arange(0, GROUP)[None, :]
    x_at, xs_at = x_ptr + row.to(tl.int64)[:, None] * stride_x + k, row * stride_xs
    w_at = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * stride_w + k
    ws_at = tl.minimum(at_n // ROWS + tl.arange(0, BLOCKS), tl.cdiv(N, ROWS) - 1) * stride_ws
    SHAPE: tl.constexpr = ((BLOCKS, BLOCK_N // BLOCKS, BLOCK_T) if TURNED else
                           (BLOCK_T, BLOCKS, BLOCK_N // BLOCKS))
    acc = tl.zeros(SHAPE, tl.float32)
    if TALL == 2:
        row = tl.minimum(t + BLOCK_T, T - 1)
        x2_at, xs2_at = x_ptr + row.to(tl.int64)[:, None] * stride_x + k, row * stride_xs
        acc2 = tl.zeros(SHAPE, tl.float32)
    start = tl.program_id(1) * steps
    last = tl.cdiv(K, GROUP * SPAN) - 1
    xs_next, ws_next = tl.load(xs_ptr + xs_at + start), tl.load(ws_ptr + ws_at + start)
    if TALL == 2:
        xs2_next = tl.load(xs_ptr + xs2_at + start)
    for step in range(start, tl.minimum(start + steps, last + 1)):
        xs, ws, after = xs_next, ws_next, tl.minimum(step + 1, last)  # scales are asked for a step ahead
        xs_next, ws_next = tl.load(xs_ptr + xs_at + after), tl.load(ws_ptr + ws_at + after)
        if TALL == 2:
            xs2 = xs2_next
            xs2_next = tl.load(xs_ptr + xs2_at + after)
        for j in tl.static_range(SPAN):
            first = (step * SPAN + j) * GROUP
            w = _group(w_at, w_desc, at_n, first, k, K, TMA, EVEN)
            x = _group(x_at, x_desc, at_t, first, k, K, TMA, EVEN)
            acc = _add(acc, x, w, xs, ws, j, TURNED)
            if TALL == 2:
                x2 = _group(x2_at, x_desc, at_t + BLOCK_T, first, k, K, TMA, EVEN)
                acc2 = _add(acc2, x2, w, xs2, ws, j, TURNED)
    y_ptr += tl.program_id(1).to(tl.int64) * T * N
    _put(y_ptr, acc, t, n, T, N, TURNED)
    if TALL == 2:
        _put(y_ptr, acc2, t + BLOCK_T, n, T, N, TURNED)


@triton.jit
def _gemm_numbers_kernel(x_ptr, w_ptr, ws_ptr, y_ptr, T, N, K, stride_x, stride_w, stride_ws, steps, tiles_t,
                         tiles_n, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                         ROWS: tl.constexpr, COLS: tl.constexpr, TURNED: tl.constexpr, EVEN: tl.constexpr):
    """A tile of y of one group of columns of x, or of one part of K of it; w has N rows for each group."""
    tile_t, tile_n = _tile(tiles_t, tiles_n)
    part, group = tl.program_id(1), tl.program_id(2)
    BLOCKS: tl.constexpr = max(1, BLOCK_N // ROWS)
    SPANS: tl.constexpr = max(1, BLOCK_K // COLS)
    t, n = tile_t * BLOCK_T + tl.arange(0, BLOCK_T), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k, span = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, SPANS)[None, :]
    block = group * (N // ROWS) + tl.minimum(tile_n * BLOCK_N // ROWS + tl.arange(0, BLOCKS),
                                             tl.cdiv(N, ROWS) - 1)
    x_at = x_ptr + tl.minimum(t, T - 1).to(tl.int64)[:, None] * stride_x + group * K + k
    w_at = w_ptr + (group * N + tl.minimum(n, N - 1)).to(tl.int64)[:, None] * stride_w + k
    ws_at = ws_ptr + block[:, None] * stride_ws
    beyond = tl.cdiv(K, COLS) - 1
    acc = tl.zeros((BLOCK_N, BLOCK_T) if TURNED else (BLOCK_T, BLOCK_N), tl.float32)
    ahead = tl.load(ws_at + tl.minimum(part * steps * BLOCK_K // COLS + span, beyond))
    for step in range(part * steps, tl.minimum((part + 1) * steps, tl.cdiv(K, BLOCK_K))):
        first, scale = step * BLOCK_K, from_e8m0(ahead)
        ahead = tl.load(ws_at + tl.minimum((first + BLOCK_K) // COLS + span, beyond))
        if EVEN:
            x, w = tl.load(x_at + first), ld(w_at + first)
        else:
            x = tl.load(x_at + first, mask=first + k < K, other=0.0)
            w = ld(w_at + first, mask=first + k < K)
        w = w.reshape(BLOCKS, BLOCK_N // BLOCKS, SPANS, BLOCK_K // SPANS) * scale[:, None, :, None]
        w = to_bf16(w.reshape(BLOCK_N, BLOCK_K))
        acc = dot(w, tl.trans(x), acc) if TURNED else dot(x, tl.trans(w), acc)
    wide = tl.num_programs(2) * N
    y_ptr += part.to(tl.int64) * T * wide + group * N
    y_at = y_ptr + t.to(tl.int64)[:, None] * wide + n[None, :]
    y = narrow(tl.trans(acc) if TURNED else acc, y_ptr.dtype.element_ty)
    tl.store(y_at, y, mask=(t[:, None] < T) & (n[None, :] < N))


@triton.jit
def _gemm_restore_kernel(w_ptr, ws_ptr, out_ptr, N, K, stride_w, stride_ws, BLOCK_N: tl.constexpr,
                         BLOCK_K: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr):
    """A tile of weights as numbers; its rows share their scales."""
    SPANS: tl.constexpr = max(1, BLOCK_K // COLS)
    first_n, first_k = tl.program_id(1) * BLOCK_N, tl.program_id(0) * BLOCK_K
    n, k = first_n + tl.arange(0, BLOCK_N)[:, None], first_k + tl.arange(0, BLOCK_K)[None, :]
    span = first_k // COLS + tl.arange(0, SPANS)
    scale = from_e8m0(tl.load(ws_ptr + first_n // ROWS * stride_ws + span, mask=span * COLS < K, other=0))
    inside = (n < N) & (k < K)
    w = ld(w_ptr + n.to(tl.int64) * stride_w + k, mask=inside)
    w = w.reshape(BLOCK_N, SPANS, BLOCK_K // SPANS) * scale[None, :, None]
    tl.store(out_ptr + n.to(tl.int64) * K + k, to_bf16(w.reshape(BLOCK_N, BLOCK_K)), mask=inside)


@triton.jit
def _gemm_sum_kernel(part_ptr, y_ptr, size, PARTS: tl.constexpr, PIECE: tl.constexpr):
    """Add the parts of K, the first first."""
    at = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    total = tl.load(part_ptr + at, mask=at < size, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(part_ptr + at + part * size, mask=at < size, other=0.0)
    tl.store(y_ptr + at, narrow(total, y_ptr.dtype.element_ty), mask=at < size)


# ---- launches ----------------------------------------------------------------------------------------------

def _config(name: str, table: dict, rows: int, row_tile: int | None, *widths: int,
            default: dict | None = None) -> dict:
    """The way and its tile for so many rows; with `row_tile` neither depends on the rows or on the GPU."""
    if row_tile:
        return up_to(table, min(row_tile, MANY))
    return tuned(name, (rows, *widths), default or up_to(table, rows))


def _cut(tiles: int, steps: int, fill: int, like: Tensor) -> tuple[int, int]:
    """(parts of K, steps of each) so that every multiprocessor has `fill` programs, of 4 steps at least."""
    wanted = fill * processors(like) // max(1, tiles)
    each = cdiv(steps, max(1, min(wanted, steps // 4)))
    return cdiv(steps, each), each


def _summed(parts: int, shape: tuple[int, int], dtype: torch.dtype, launch, like: Tensor) -> Tensor:
    """What `launch` writes, [T, N] of `dtype`; of several parts of K the sum."""
    y = torch.empty(shape, dtype=dtype, device=like.device)
    if parts == 1:
        launch(y)
        return y
    scratch = torch.empty(parts, *shape, dtype=torch.float32, device=like.device)
    launch(scratch)
    _gemm_sum_kernel[(cdiv(y.numel(), PIECE),)](scratch, y, y.numel(), PARTS=parts, PIECE=PIECE, num_warps=4)
    return y


def _by_codes(x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, block: tuple[int, int],
              dtype: torch.dtype, config: dict, row_tile: int | None) -> Tensor:
    """x [T, K] e4m3 codes and their scales."""
    (T, K), N, group = x.shape, weight.shape[0], block[1]
    bt, bn, tall = config["block_t"], config["block_n"], config["tall"]
    span = next(n for n in (4, 2, 1) if n * group <= max(128, group) and K % (n * group) == 0 or n == 1)
    even = K % (span * group) == 0
    tma = bool(config["tma"]) and all(s.stride(0) % 16 == 0 and s.data_ptr() % 16 == 0 for s in (x, weight))
    descs = (_descriptor(x, bt, group), _descriptor(weight, bn, group)) if tma else (None, None)
    tiles = cdiv(T, bt * tall), cdiv(N, bn)
    parts, steps = _cut(cdiv(row_tile or T, bt * tall) * tiles[1], cdiv(K, span * group), config["fill"], x)
    x_scale, scale = (s.view(torch.uint8).contiguous().view(WORDS[span]) for s in (x_scale, scale))

    def launch(y: Tensor) -> None:
        _gemm_fp8_kernel[(tiles[0] * tiles[1], parts)](
            x, descs[0], x_scale, weight, descs[1], scale, y, T, N, K, x.stride(0), x_scale.stride(0),
            weight.stride(0), scale.stride(0), steps, *tiles, BLOCK_T=bt, BLOCK_N=bn, ROWS=block[0],
            GROUP=group, SPAN=span, TALL=tall, TMA=tma, TURNED=bool(config["turned"]), EVEN=even,
            num_warps=config["num_warps"], num_stages=config["num_stages"])

    return _summed(parts, (T, N), dtype, launch, x)


def _for_hopper(config: dict | None, x: Tensor, weight: Tensor, block: tuple[int, int],
                dtype: torch.dtype) -> bool:
    """Whether this is a way of gemm_hopper.py, and what it takes."""
    if config is None or capability(x) != 90:
        return False
    from dskit.kernels import gemm_hopper  # which is not interpreted

    return gemm_hopper.takes(x, weight, block, dtype, config["way"])


def _by_hopper(x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, rows: int, dtype: torch.dtype,
               config: dict) -> Tensor:
    """As by codes, with a warp of its own that brings; `spans` folds what has a scale for 32 channels."""
    from dskit.kernels import gemm_hopper

    T, N, spans = x.shape[0], weight.shape[0], cdiv(x.shape[1], 128)
    x_scale, scale = x_scale.view(torch.uint8), scale.view(torch.uint8)
    if config["way"] == "groups":
        x_scale, scale = x_scale.contiguous().view(torch.int32), scale.contiguous().view(torch.int32)
    else:
        x, x_scale = gemm_hopper.folded(x, x_scale, 1) if x_scale.shape[1] > spans else (x, x_scale)
        weight, scale = gemm_hopper.folded(weight, scale, rows) if scale.shape[1] > spans else (weight, scale)
    parts, each = _cut(cdiv(T, config["block_t"]) * cdiv(N, config["block_n"]), spans, config["fill"], x)

    def launch(y: Tensor) -> None:
        gemm_hopper.multiply(x, x_scale, weight, scale, rows, y, parts, each, config)

    return _summed(parts, (T, N), dtype, launch, x)


def _descriptor(codes: Tensor, rows: int, cols: int) -> TensorDescriptor:
    return TensorDescriptor(codes, codes.shape, codes.stride(), [rows, cols])


def _by_numbers(x: Tensor, weight: Tensor, scale: Tensor, block: tuple[int, int], groups: int,
                dtype: torch.dtype, config: dict, row_tile: int | None) -> Tensor:
    """x [T, groups * K] of bfloat16."""
    if config["way"] == "restored":
        return _by_library(x, _in_memory(weight, scale, block, config), groups, dtype)
    (T, K), N = (x.shape[0], x.shape[1] // groups), weight.shape[0] // groups
    bt, bn, bk = config["block_t"], config["block_n"], config["block_k"]
    tiles = cdiv(T, bt), cdiv(N, bn)
    parts, steps = _cut(cdiv(row_tile or T, bt) * tiles[1] * groups, cdiv(K, bk), config["fill"], x)
    scale = scale.view(torch.uint8)

    def launch(y: Tensor) -> None:
        _gemm_numbers_kernel[(tiles[0] * tiles[1], parts, groups)](
            x, weight, scale, y, T, N, K, x.stride(0), weight.stride(0), scale.stride(0), steps, *tiles,
            BLOCK_T=bt, BLOCK_N=bn, BLOCK_K=bk, ROWS=block[0], COLS=block[1], TURNED=bool(config["turned"]),
            EVEN=K % bk == 0, num_warps=config["num_warps"], num_stages=config["num_stages"])

    return _summed(parts, (T, groups * N), dtype, launch, x)


def _in_memory(weight: Tensor, scale: Tensor, block: tuple[int, int], config: dict) -> Tensor:
    """The weight as bfloat16, exactly."""
    (N, K), bn, bk = weight.shape, min(config["block_n"], block[0]), config["block_k"]
    wide = torch.empty(N, K, dtype=torch.bfloat16, device=weight.device)
    _gemm_restore_kernel[(cdiv(K, bk), cdiv(N, bn))](
        weight, scale.view(torch.uint8), wide, N, K, weight.stride(0), scale.stride(0), BLOCK_N=bn,
        BLOCK_K=bk, COLS=block[1], ROWS=block[0], num_warps=config["num_warps"])
    return wide


def _by_library(x: Tensor, weight: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """x [T, groups * K] times weight [groups * N, K], both bfloat16, summed in float32."""
    if not x.is_cuda:  # interpreted
        x, weight = x.float(), weight.float()
    elif dtype == torch.float32 and groups == 1:
        return torch.mm(x, weight.T, out_dtype=dtype)
    if groups == 1:
        return torch.mm(x, weight.T).to(dtype)
    y = torch.empty(x.shape[0], groups, weight.shape[0] // groups, dtype=x.dtype, device=x.device)
    torch.bmm(x.unflatten(1, (groups, -1)).transpose(0, 1), weight.unflatten(0, (groups, -1)).transpose(1, 2),
              out=y.transpose(0, 1))
    return y.flatten(1).to(dtype)


# ---- the ops -----------------------------------------------------------------------------------------------

def _cannot(x: Tensor, weight: Tensor, scale: Tensor | None, block: tuple[int, int], coded: bool = False,
            groups: int = 1) -> str | None:
    """Why these tensors cannot be multiplied here, or None."""
    if scale is None:
        return "the weight is held as numbers: a library multiplies those"
    if weight.dtype != torch.float8_e4m3fn:
        return f"weight is {weight.dtype}; codes of e4m3 are expected"
    if not coded and x.dtype != torch.bfloat16:
        return f"x is {x.dtype}; products of e4m3 are exact with bfloat16"
    if any(n not in (32, 64, 128) for n in block):
        return f"scales are for blocks of {block[0]} x {block[1]}; 32, 64 and 128 are known"
    if weight.shape[0] // groups % block[0] and groups > 1:
        return f"a group's {weight.shape[0] // groups} weight rows are no whole blocks of {block[0]}"
    return refuse(x, weight, scale, sm=90)  # e4m3 operands, and tiles that fill its shared memory


@ops.implement("gemm.fp8", "triton", when=lambda x, x_scale, weight, scale, block, *rest:
               _cannot(x, weight, scale, block, x_scale is not None))
def fp8(x: Tensor, x_scale: Tensor | None, weight: Tensor, scale: Tensor, block: tuple[int, int],
        dtype: torch.dtype, held: torch.dtype, row_tile: int | None = None) -> Tensor:
    """x [..., K], rounded: numbers, or codes with their scales, times weight [N, K] -> [..., N] of `dtype`.

    Either becomes the other, which loses nothing, where that way is the faster.
    """
    N, K = weight.shape
    require(x.shape[-1] == K, "x", f"has {x.shape[-1]} channels, the weight {K}")
    x, weight, lead, fmt = rows_of(x), rows_of(weight), x.shape[:-1], f"fp8_{block[1]}"
    if x_scale is not None:
        x_scale = rows_of(x_scale)
        require(x_scale.shape[1] == cdiv(K, block[1]), "x_scale", f"must have {cdiv(K, block[1])} columns")
    if not x.shape[0]:
        return torch.empty(*lead, N, dtype=dtype, device=x.device)
    T, coded, wide = x.shape[0], x_scale is not None, block[1] >= 128
    table = (CODED if coded else PLAIN) | (SPANS if wide else {})
    part = "few" if T <= MANY else "spans" if wide else "many"
    fast = up_to(FAST, max(T, 33) if coded else T)  # fewer numbers are not worth rounding first
    config = _config(f"gemm.fp8/{part}", table, T, row_tile, N, K, block[1], int(coded),
                     default=fast if _for_hopper(fast, x, weight, block, dtype) else None)
    if config["way"] in HOPPER and not _for_hopper(config, x, weight, block, dtype):
        config = up_to(table, T)
    if config["way"] in ("codes", *HOPPER):
        fmt = "fp8_128" if config["way"] == "spans" else fmt  # folded at once
        codes, x_scale = (x, x_scale) if coded else _compiled("linear.encode")(x, fmt)
        codes = codes.view(torch.float8_e4m3fn)
        if config["way"] == "codes":
            y = _by_codes(codes, x_scale, weight, scale, block, dtype, config, row_tile)
        else:
            y = _by_hopper(codes, x_scale, weight, scale, block[0], dtype, config)
    else:
        x = _compiled("linear.decode")(x, x_scale, fmt, torch.bfloat16) if coded else x
        y = _by_numbers(x, weight, scale, block, 1, dtype, config, row_tile)
    return y.view(*lead, N)


def _compiled(op: str):
    """The kernel of another op."""
    return ops.find(op).implementation("triton").function


@ops.implement("gemm.project", "triton", when=lambda o_TAH, weight, scale, block, groups, *rest:
               _cannot(o_TAH, weight, scale, block, groups=groups))
def project(o_TAH: Tensor, weight: Tensor, scale: Tensor, block: tuple[int, int], groups: int,
            dtype: torch.dtype, held: torch.dtype, row_tile: int | None = None) -> Tensor:
    """Heads of group g times weight[g] of [G*O, A/G*H] -> [T, G*O] of `dtype`."""
    x, weight = rows_of(o_TAH.flatten(1)), rows_of(weight)
    require(x.shape[1] == groups * weight.shape[1], "o_TAH",
            f"has {x.shape[1]} values a row; {groups} groups of {weight.shape[1]} are expected")
    if not x.shape[0]:
        return torch.empty(0, weight.shape[0], dtype=dtype, device=x.device)
    T, N, K = x.shape[0], weight.shape[0] // groups, weight.shape[1]
    part = "few" if T <= MANY else "many"
    config = _config(f"gemm.project/{part}", PROJECT, T, row_tile, N, K, groups)
    return _by_numbers(x, weight, scale, block, groups, dtype, config, row_tile)
