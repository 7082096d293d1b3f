"""Selection: keys scored as they are stored, and the best of a row found without sorting it.

Hadamard
    The transform is a product with a matrix of signs, each the parity of the bits that row and column share:
    made in registers, exact in bfloat16, and one step of a tensor core.

Scores
    A program has KEYS keys of a request in registers, as the matrix operand that wgmma takes from there, and
    the queries of ROWS rows, all heads of them, in shared memory.

    key    | group 0 | group 1 | group 2 | group 3 | s0 s1 s2 s3 |      64 bytes of e2m1 pairs, 4 of scales
    low    |  16 even channels of each group ...   |                    bits moved: e4m3, exact
    high   |  16 odd channels of each group ...    |
    query  per 32 bytes, two groups, two columns for each head, even and odd channels apart: one with zeros
           where the first group is, one where the second is

    So each group has sums of its own, whole numbers below 2^13 and thus exact even in the accumulators of FP8
    products; float32 then applies the key's scales, the relu and the head's weight.  Two columns are what a
    thread holds side by side, and 64 of them the fewest that keep a tensor core busy.  68 bytes are read per
    key and row block, and 8 of the table; 2 are written per row.  The keys as numbers would be 256.
    On Hopper, keys that lie side by side are scored by the kernel of pages.py.

Top-k
    peaks    ..#.|....|#...|.#..     maxima of chunks, read at full width by as many programs as there are
    chunks   the k best of them      an entry of the best k lies in one of the best k chunks, ties included
    picks    the k best in those     again a tile in registers, its threshold found by counting: of the maxima
                                     bit by bit, of their values upward from that of the maxima

    Rows that fit a tile skip the first two.  Blocks of candidates are chunks whose maxima are asked for.

Shapes
    v [..., Y] bfloat16, Y a power of two from 16 to 128 -> [..., Y].
    q [B, Q, X, 128] rounded numbers, weight [B, Q, X], pool [P, 68] uint8, table [B, S] and visible [B, Q]
    int64 -> scores [B, Q, S] in the weight's dtype.  Scores [..., S] bfloat16 or float32 -> indices
    [..., k] int64.

Units
    Bytes: 68 B S + 2 B Q S for scores, 68 B Q C size + 2 B Q C size in blocks; 2 S a row for the top-k.

Errors
    ValueError names an argument whose shape does not fit.  Other widths and packings, float64, and rows that
    a tile of chunks cannot hold are refused; scores need sm_89.

Numerics
    Products of a group are exact where the largest channels of a query's groups lie within 2^13 of each
    other; a smaller group is rounded to 2^-16 of the head's largest channel.  Sums in float32, one rounding.

Source
    kernels.md 1.5, 2.3; the references are in layers/indexer.py.
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
    cdiv,
    dot,
    e2m1_high,
    e2m1_low,
    e4m3_operand,
    inverse,
    ld,
    narrow,
    pow2,
    refuse,
    require,
    rows_of,
    too_wide,
    tuned,
    up_to,
)

WIDTH, NBYTES = 128, 68  # of an index key, in numbers and as stored
SPREAD = 64  # rows of a program that transforms them, however many there are: a row's bits are the same


def _tile(keys: int, columns: int, programs: int, warps: int, stages: int, registers: int = 168) -> dict:
    return {"KEYS": keys, "COLUMNS": columns, "PROGRAMS": programs, "num_warps": warps, "num_stages": stages,
            "maxnreg": registers}


# by heads times rows that score the same keys, not yet measured: keys of a tile; columns of which a product
# has two each; programs per processor at most, best a multiple of those that it holds at once: three of 4
# warps with 168 registers.  As a row of the table comes before its key, two stages are one tile in flight.
CONFIGS = {32: _tile(128, 32, 6, 4, 5), 1 << 62: _tile(64, 64, 6, 4, 5)}
if common.INTERPRET:
    CONFIGS = {32: _tile(128, 32, 1, 4, 3), 1 << 62: _tile(64, 64, 1, 4, 3)}

# not yet measured: values that a program reads; by rows, entries of a tile that picks, per warp, and its
# registers: where rows queue, a second program works while one waits for all of its warps
PEAKS = {"VALUES": 4096, "num_warps": 4}
PICK = {256: {"LANES": 512, "maxnreg": None}, 1 << 62: {"LANES": 512, "maxnreg": 64}}
DIRECT = 16384 if not common.INTERPRET else 64  # values up to which a row is one tile
LARGEST = 32768  # values of a tile

CANDIDATES = {
    "indexer.scores_cached": (
        _tile(128, 32, 3, 4, 5), _tile(128, 32, 6, 4, 5), _tile(128, 32, 12, 4, 5), _tile(128, 32, 3, 4, 7),
        _tile(128, 32, 6, 4, 7), _tile(128, 32, 8, 4, 5, 128), _tile(64, 32, 8, 4, 7, 128),
        _tile(128, 32, 4, 8, 7, 128), _tile(64, 64, 3, 4, 5), _tile(64, 64, 6, 4, 7),
        _tile(128, 64, 4, 4, 5, 255)),
    "indexer.topk/peaks": tuple({"VALUES": values, "num_warps": warps} for values, warps in
                                ((2048, 4), (4096, 4), (8192, 4), (8192, 8), (16384, 8))),
    "indexer.topk/pick": tuple({"LANES": lanes, "maxnreg": registers} for lanes, registers in
                               ((256, None), (512, None), (512, 64), (1024, None), (2048, None))),
}


# ---- scores ------------------------------------------------------------------------------------------------

@triton.jit
def _query(q_ptr, at, scale, real, HALF: tl.constexpr, ODD: tl.constexpr):
    """[32 bytes, columns]: what the even or odd channels of half of the keys' bytes meet, e4m3.

    Columns go in pairs, one for each group of the half, with zeros where the other group is.
    """
    byte = tl.arange(0, 32)[:, None]
    mine = real[None, :] & (byte // 16 == tl.arange(0, at.shape[0])[None, :] % 2)
    x = ld(q_ptr + at[None, :] + 64 * HALF + 2 * byte + ODD, mine)
    return e4m3_operand(x * inverse(scale)[None, :])


@triton.jit
def _twice(x):
    """Each element two times, side by side."""
    return tl.join(x, x).reshape(2 * x.shape[0])


@triton.jit
def _of_half(score, byte, even, odd, scales):
    """score [KEYS, columns / 2] + products over a half's two groups of channels, times the keys' scales."""
    product = dot(e2m1_low(byte), even, tl.zeros([byte.shape[0], even.shape[1]], tl.float32))
    product = dot(e2m1_high(byte), odd, product)
    first, second = product.reshape(byte.shape[0], even.shape[1] // 2, 2).split()
    # a scale of byte 0, which is not quite zero, stands beside codes that are
    left = ((scales & 0xFF) << 23).to(tl.float32, bitcast=True)
    right = (((scales >> 8) & 0xFF) << 23).to(tl.float32, bitcast=True)
    return score + first * left[:, None] + second * right[:, None]


@triton.jit(do_not_specialize=["Q", "count", "row_blocks", "spans", "tiles"])
def _indexer_scores_cached_fwd_kernel(q_ptr, weight_ptr, byte_ptr, word_ptr, table_ptr, visible_ptr,
                                      block_ptr, out_ptr, Q, S, count, row_blocks, spans, tiles,
                                      X: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
                                      KEYS: tl.constexpr, STAGES: tl.constexpr):
    """Scores of S places of a row: of all `count` entries, or (ROWS 1) of those in listed blocks of SIZE."""
    block = tl.program_id(0) % row_blocks
    span = tl.program_id(0) // row_blocks
    request = (span // spans).to(tl.int64)
    first = (span % spans) * tiles * KEYS
    last = tl.minimum(first + tiles * KEYS, S)

    column = tl.arange(0, ROWS * X)
    real = block * ROWS + column // X < Q
    head = (request * Q + block * ROWS) * X + column
    q_at = head * 128
    channel = tl.arange(0, 128)[None, :]
    most = tl.max(tl.abs(ld(q_ptr + q_at[:, None] + channel, real[:, None])), axis=1)
    power = tl.maximum(most, 1e-30).to(tl.int32, bitcast=True) & 0x7F800000  # at or below, of two
    scale = power.to(tl.float32, bitcast=True) / 128  # e4m3 reaches 448
    q_twice, scale_twice, real_twice = _twice(q_at), _twice(scale), _twice(real)
    even0 = _query(q_ptr, q_twice, scale_twice, real_twice, 0, 0)
    odd0 = _query(q_ptr, q_twice, scale_twice, real_twice, 0, 1)
    even1 = _query(q_ptr, q_twice, scale_twice, real_twice, 1, 0)
    odd1 = _query(q_ptr, q_twice, scale_twice, real_twice, 1, 1)
    weight = ld(weight_ptr + head, real) * scale * 64  # codes of keys are 2^-6 of their values

    row = block * ROWS + tl.arange(0, ROWS)[None, :]
    mine = row < Q
    seen = tl.load(visible_ptr + request * Q + row, mine, other=0).to(tl.int32)
    limit = tl.minimum(tl.max(seen), last) if block_ptr is None else last
    out = out_ptr + (request * Q + row) * S
    byte = tl.arange(0, 32)[None, :]
    for start in tl.range(first, limit, KEYS, num_stages=STAGES):
        place = start + tl.arange(0, KEYS)
        key, there = place, place < limit
        if block_ptr is not None:
            listed = tl.load(block_ptr + (request * Q + block) * (S // SIZE) + place // SIZE, there, other=-1)
            key = (listed * SIZE + place % SIZE).to(tl.int32)
            there = (key >= 0) & (key < tl.max(seen))
            key = tl.where(there, key, count)
        at = tl.load(table_ptr + request * count + key, there, other=0).to(tl.int32).to(tl.int64)
        codes = byte_ptr + at[:, None] * 68 + byte  # every row of the table is a row of the pool
        left = tl.load(codes)
        right = tl.load(codes + 32)
        scales = tl.load(word_ptr + at * 17 + 16)
        score = tl.zeros([KEYS, ROWS * X], tl.float32)
        score = _of_half(score, left, even0, odd0, scales)
        score = _of_half(score, right, even1, odd1, scales >> 16)
        score = tl.maximum(score, 0.0) * weight[None, :]
        total = tl.sum(score.reshape(KEYS, ROWS, X), axis=2)
        total = narrow(tl.where(key[:, None] < seen, total, float("-inf")), out_ptr.dtype.element_ty)
        tl.store(out + place[:, None], total, (place[:, None] < last) & mine)
    for start in range(first + tl.cdiv(tl.maximum(limit - first, 0), KEYS) * KEYS, last, KEYS):
        place = (start + tl.arange(0, KEYS))[:, None]
        none = tl.full([KEYS, ROWS], float("-inf"), tl.float32)
        tl.store(out + place, narrow(none, out_ptr.dtype.element_ty), (place < last) & mine)


def _unlike(q: Tensor, weight: Tensor, pool: Tensor, packing: Any) -> str | None:
    """Why cached keys or queries are beyond the kernel, or None."""
    if pool.dtype != torch.uint8:
        return "the keys are numbers; the kernel reads them packed"
    if (packing.width, packing.fmt, packing.tail, pool.shape[-1]) != (WIDTH, "fp4_32", 0, NBYTES):
        return f"keys of {packing.width} in {packing.fmt}; the kernel reads {WIDTH} in fp4_32, {NBYTES} bytes"
    heads = q.shape[2]
    if heads != pow2(heads) or not 16 <= heads <= 128:
        return f"{heads} index heads; the kernel takes 16, 32, 64 or 128"
    return None


@triton.jit
def _hadamard_kernel(v_ptr, stride, y_ptr, rows, scale, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    col = tl.arange(0, WIDTH)
    shared = col[:, None] & col[None, :]
    for half in tl.static_range(3):
        shared ^= shared >> (4 >> half)
    sign = narrow(1.0 - 2.0 * (shared & 1).to(tl.float32), tl.bfloat16)
    v = tl.load(v_ptr + row * stride + col[None, :], mask=row < rows, other=0.0)
    y = dot(v, sign, tl.zeros((ROWS, WIDTH), tl.float32)) * scale
    tl.store(y_ptr + row * WIDTH + col[None, :], narrow(y, tl.bfloat16), mask=row < rows)


def _unspread(v: Tensor) -> str | None:
    """Why it cannot transform this, or None."""
    width = v.shape[-1]
    if v.dtype != torch.bfloat16 or width not in (16, 32, 64, 128):
        return f"it takes 16, 32, 64 or 128 channels of bfloat16, not {width} of {v.dtype}"
    return refuse(v)


@ops.implement("indexer.hadamard", "triton", when=_unspread)
def hadamard(v: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last axis."""
    x, y, width = rows_of(v), torch.empty(v.shape, dtype=v.dtype, device=v.device), v.shape[-1]
    if len(x):
        _hadamard_kernel[(cdiv(len(x), SPREAD),)](x, x.stride(0), y, len(x), width**-0.5, width, SPREAD)
    return y


@ops.implement("indexer.scores_cached", "triton",
               when=lambda q_BQXY, weight_BQX, pool, table_BS, visible_BQ, packing, dtype, row_tile=None,
               block_BQC=None, size=1, run=1:
               _unlike(q_BQXY, weight_BQX, pool, packing) or too_wide(q_BQXY, weight_BQX, dtype)
               or refuse(q_BQXY, weight_BQX, pool, table_BS, visible_BQ, block_BQC, sm=89))
def scores_cached(q_BQXY: Tensor, weight_BQX: Tensor, pool: Tensor, table_BS: Tensor, visible_BQ: Tensor,
                  packing: Any, dtype: torch.dtype, row_tile: int | None = None,
                  block_BQC: Tensor | None = None, size: int = 1, run: int = 1) -> Tensor:
    """Scores [B, Q, S] of the keys in rows `table` of a pool, -inf outside what a row may see.

    Given blocks of `size` entries, only of those: [B, Q, C * size].
    """
    B, Q, X, width = q_BQXY.shape
    count = table_BS.shape[1]
    S = count if block_BQC is None else block_BQC.shape[-1] * size
    require(width == WIDTH, "q_BQXY", f"has {width} channels, keys {WIDTH}")
    require(weight_BQX.shape == (B, Q, X), "weight_BQX", f"must be [{B}, {Q}, {X}]")
    require(table_BS.shape[0] == B and table_BS.dtype == torch.int64, "table_BS", f"must be [{B}, S] int64")
    require(visible_BQ.shape == (B, Q) and visible_BQ.dtype == torch.int64, "visible_BQ",
            f"must be [{B}, {Q}] int64")
    require(pool.is_contiguous() and pool.data_ptr() % 4 == 0, "pool", "must be contiguous, from 4 bytes on")
    require(block_BQC is None or (block_BQC.shape[:2] == (B, Q) and block_BQC.dtype == torch.int64),
            "block_BQC", f"must be [{B}, {Q}, C] int64")
    out = torch.empty(B, Q, S, dtype=weight_BQX.dtype, device=q_BQXY.device)
    if not out.numel():
        return out
    together = 1 if row_tile or block_BQC is not None else min(Q, 4)  # rows that score the same keys
    if block_BQC is None and common.capability(q_BQXY) == 90:
        from dskit.kernels import pages  # which cannot be interpreted

        if pages.takes(q_BQXY, pool, run):
            pages.scores(q_BQXY.contiguous(), weight_BQX.contiguous(), pool, table_BS.contiguous(),
                         visible_BQ.contiguous(), out, together, bool(row_tile))
            return out
    config = up_to(CONFIGS, together * X)
    if not row_tile:
        config = tuned("indexer.scores_cached", (B * Q * S, together, X), config)
    rows, keys = max(1, config["COLUMNS"] // X) if block_BQC is None else 1, config["KEYS"]
    row_blocks, all_tiles = cdiv(Q, rows), cdiv(S, keys)
    programs = config["PROGRAMS"] * common.processors(q_BQXY)
    tiles = cdiv(all_tiles, max(1, programs // (B * row_blocks)))
    spans = cdiv(all_tiles, tiles)
    _indexer_scores_cached_fwd_kernel[(B * row_blocks * spans,)](
        q_BQXY.contiguous(), weight_BQX.contiguous(), pool, pool.view(torch.int32), table_BS.contiguous(),
        visible_BQ.contiguous(), None if block_BQC is None else block_BQC.contiguous(), out, Q, S, count,
        row_blocks, spans, tiles, X=X, SIZE=size, ROWS=rows, KEYS=keys, STAGES=config["num_stages"],
        num_warps=config["num_warps"], maxnreg=config["maxnreg"])
    return out


# ---- the best of a row -------------------------------------------------------------------------------------

@triton.jit
def _rank(x):
    """float32 -> uint32 in the same order; both zeros are one, and 0 is below minus infinity."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _peaks_kernel(x_ptr, stride_row, visible_ptr, peak_ptr, count, SIZE: tl.constexpr, WIDE: tl.constexpr,
                  CHUNKS: tl.constexpr):
    """The largest of each chunk of SIZE values, as float32; given `visible`, infinity in the newest chunk."""
    row = tl.program_id(1).to(tl.int64)
    chunks = tl.cdiv(count, SIZE)
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    lane = tl.arange(0, WIDE)[None, :]
    i = chunk[:, None] * SIZE + lane
    x = ld(x_ptr + row * stride_row + i, (i < count) & (lane < SIZE), float("-inf"))
    peak = tl.max(x, axis=1)
    if visible_ptr is not None:
        newest = tl.maximum(tl.load(visible_ptr + row) - 1, 0) // SIZE
        peak = tl.where(chunk == newest, float("inf"), peak)
    tl.store(peak_ptr + row * chunks + chunk, peak, chunk < chunks)


@triton.jit
def _enough(rank, tau, k):
    return tl.sum((rank >= tau).to(tl.int32)) >= k


@triton.jit
def _pick_kernel(x_ptr, stride_row, chunk_ptr, tau_ptr, out_ptr, count, k, SIZE: tl.constexpr,
                 DROP: tl.constexpr, LANES: tl.constexpr, OUT: tl.constexpr):
    """The places of the k best values above minus infinity of a row, ascending; ties to the lower place.

    chunk_ptr: only values of these k chunks of SIZE, ascending and -1 where there are fewer, can be among
    them; tau_ptr then holds the rank of the least of the chunks' maxima, else takes that of the k-th value.
    DROP: low bits in which no two values differ.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_row
    least = tl.full((), 0x007FFFFF >> DROP, tl.uint32)  # the rank of minus infinity
    if chunk_ptr is not None:
        slot = tl.arange(0, LANES // SIZE)
        chunk = tl.load(chunk_ptr + row * k + slot, slot < k, other=-1)
        chunk = tl.where(chunk >= 0, chunk, tl.cdiv(count, SIZE))
        place = chunk[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        rank = _rank(ld(x_ptr + place, place < count, float("-inf")).reshape(LANES)) >> DROP
        i = place.reshape(LANES)
        # the k-th value is rarely far above the k-th maximum: steps double until one is too far, then halve
        tau = tl.load(tau_ptr + row).to(tl.uint32, bitcast=True)
        step = tl.full((), 1, tl.uint32)
        while (tau + step > tau) & _enough(rank, tau + step, k):
            tau += step
            step += step
        while step > 1:
            step = step >> 1
            tau = tl.where((tau + step > tau) & _enough(rank, tau + step, k), tau + step, tau)
    else:
        i = tl.arange(0, LANES)
        rank = _rank(ld(x_ptr + i, i < count, float("-inf"))) >> DROP
        tau = tl.full((), 0, tl.uint32)
        for bit in range(DROP, 32):
            higher = tau | (tl.full((), 0x80000000, tl.uint32) >> (bit - DROP) >> DROP)
            tau = tl.where(_enough(rank, higher, k), higher, tau)
        tau = tl.maximum(tau, least)
        if tau_ptr is not None:
            tl.store(tau_ptr + row, tau.to(tl.int32, bitcast=True))
    above = (rank > tau).to(tl.int32)
    tie = ((rank == tau) & (rank > least)).to(tl.int32)
    both = tl.cumsum((above << 16) | tie)  # a tile has at most 2^15 of either
    more = tl.sum(above)
    before, ties = both >> 16, tl.minimum(both & 0xFFFF, k - more)
    taken = (above != 0) | ((tie != 0) & ((both & 0xFFFF) <= k - more))
    found = more + tl.minimum(tl.sum(tie), k - more)
    tl.store(out_ptr + row * k + before + ties - 1, i.to(out_ptr.dtype.element_ty), taken)
    lane = tl.arange(0, OUT)
    none = tl.full([OUT], -1, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * k + lane, none, (lane >= found) & (lane < k))


def _chunk(count: int, k: int) -> int:
    """Values of a chunk such that the maxima of a row and the values of its k best chunks are both few."""
    size = 2
    while size * size * k < count:
        size *= 2
    return size


def _too_many(count: int, k: int) -> str | None:
    """Why the best k of rows of `count` values are beyond the kernels, or None."""
    size = _chunk(count, k)
    if count <= DIRECT or max(cdiv(count, size), size * pow2(k)) <= LARGEST:
        return None
    return f"the best {k} of {count} values; a tile holds {LARGEST}"


def _peaks(x: Tensor, size: int, visible: Tensor | None = None) -> Tensor:
    """Maxima [R, chunks] of rows x [R, n], float32."""
    rows, count = x.shape
    peaks = torch.empty(rows, cdiv(count, size), dtype=torch.float32, device=x.device)
    wide = pow2(size)
    config = tuned("indexer.topk/peaks", (rows * count, size), PEAKS)
    chunks = max(1, config["VALUES"] // wide)
    _peaks_kernel[(cdiv(peaks.shape[1], chunks), rows)](
        x, x.stride(0), visible, peaks, count, SIZE=size, WIDE=wide, CHUNKS=chunks,
        num_warps=config["num_warps"])
    return peaks


def _best(x: Tensor, k: int, bits: int, dtype: torch.dtype) -> Tensor:
    """Places [R, k] of the k best of rows x [R, n], of which only the upper `bits` differ."""
    rows, count = x.shape
    if count <= DIRECT:
        return _pick(x, None, None, k, 1, bits, dtype)
    size = _chunk(count, k)
    tau = torch.empty(rows, dtype=torch.int32, device=x.device)
    chunks = _pick(_peaks(x, size), None, tau, k, 1, bits, torch.int32)
    return _pick(x, chunks, tau, k, size, bits, dtype)


def _pick(x: Tensor, chunks: Tensor | None, tau: Tensor | None, k: int, size: int, bits: int,
          dtype: torch.dtype) -> Tensor:
    rows, count = x.shape
    out = torch.empty(rows, k, dtype=dtype, device=x.device)
    lanes = pow2(count) if chunks is None else pow2(k) * size
    config = tuned("indexer.topk/pick", (rows, lanes, bits), up_to(PICK, rows))
    _pick_kernel[(rows,)](x, x.stride(0), chunks, tau, out, count, k, SIZE=size, DROP=32 - bits, LANES=lanes,
                          OUT=pow2(k), num_warps=max(1, min(32, lanes // config["LANES"])),
                          maxnreg=config["maxnreg"])
    return out


def _bits(x: Tensor) -> int:
    """Upper bits in which float32 values that came from x's dtype differ."""
    return 16 if x.dtype == torch.bfloat16 else 32


@ops.implement("indexer.topk", "triton", when=lambda score_BQS, k:
               _too_many(score_BQS.shape[-1], k) or too_wide(score_BQS) or refuse(score_BQS))
def topk(score_BQS: Tensor, k: int) -> Tensor:
    """The k best entries of each row with a score above -inf, ascending, padded with -1: int64 [..., k]."""
    require(k > 0, "k", f"is {k}; it must be at least 1")
    lead = score_BQS.shape[:-1]
    if not score_BQS.numel():
        return torch.full((*lead, k), -1, dtype=torch.int64, device=score_BQS.device)
    return _best(rows_of(score_BQS), k, _bits(score_BQS), torch.int64).view(*lead, k)


@ops.implement("indexer.blocks", "triton", when=lambda score_BQS, visible_BQ, size, count:
               _too_many(cdiv(score_BQS.shape[-1], size), count) or too_wide(score_BQS)
               or refuse(score_BQS, visible_BQ))
def blocks(score_BQS: Tensor, visible_BQ: Tensor, size: int, count: int) -> Tensor:
    """The `count` best blocks, as `topk` gives them; the newest visible block is always one."""
    require(size > 0 and count > 0, "size, count", f"are {size}, {count}; they must be at least 1")
    require(visible_BQ.shape == score_BQS.shape[:-1], "visible_BQ", f"must be {list(score_BQS.shape[:-1])}")
    lead, x = score_BQS.shape[:-1], rows_of(score_BQS)
    if not x.numel():
        return torch.full((*lead, count), -1, dtype=torch.int64, device=x.device)
    best = _peaks(x, size, visible_BQ.contiguous())
    return _best(best, count, _bits(x), torch.int64).view(*lead, count)
