"""One token per row without a sort: each row of logits is read once, then only where it matters.

Tiling
    `_stats` cuts the rows into chunks of WIDTH logits and keeps of each its largest logit and the sum of its
    exponentials: 1/32 of the bytes.  `_pick` gives a row to one program:

    chunks   ..|..#..|.....|.#...|.....|#....     their maxima bound the threshold from below
    found    # # #                                the logits not below that bound: a few dozen or hundred
    tau      the exact threshold among them       then the walk: the chunk that u falls in, and the token

    A threshold is "the largest value such that it and all above weigh at least so much" (tokens for top-k,
    probability for top-p).  Values are compared as integers in the same order, and each pass over them weighs
    16 pivots, so that eight passes find any float32.  The same search runs over the chunks, where a maximum
    stands for its whole chunk, and over the logits found.

Bytes
    4 R V once, plus 8 R V / WIDTH for the chunks and what is found.  At 128 rows of 129,280 that read takes
    15.4 us on an H200; a sort reads and writes the rows many times.  The logits found have room for all of a
    row, since a flat one (a nucleus of most of the vocabulary) is copied; two passes later only those between
    the nearest pivots are kept.

Shapes
    logits [R, V] float32; temperature, top_p, min_p, u [R] float64; top_k [R] int64 -> ids [R] int64.

Errors
    ValueError naming the argument whose shape or dtype is wrong.

Numerics
    Exponentials and the sums of a tile in float32, sums of tiles and along the walk in float64: an id differs
    from the float64 reference's only where u, top_p or min_p lies within about 1e-6 of a boundary.

Source
    kernels.md 1.9; the reference is engine/sampler.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dskit import ops
from dskit.kernels.common import (
    GREEDY_BELOW,
    cdiv,
    first_beyond,
    pow2,
    refuse,
    require,
    softmax_scale,
    too_wide,
    tuned,
)

WIDTH = 64  # logits of a chunk: 256 bytes
FLAT = 8192  # logits to look at, beyond which a program takes so many at a time
STATS = {"chunks": 64, "num_warps": 4}  # of a program
PICK = {"lanes": 1024, "pivots": 16, "num_warps": 8}  # values of a tile, pivots of a pass
CANDIDATES = {
    "sampler.draw/stats": tuple({"chunks": chunks, "num_warps": warps} for chunks, warps in
                                ((32, 2), (32, 4), (64, 2), (64, 4), (64, 8), (128, 4), (128, 8))),
    "sampler.draw/pick": tuple({"lanes": lanes, "pivots": pivots, "num_warps": warps} for lanes, pivots, warps
                               in ((512, 16, 4), (1024, 8, 8), (1024, 16, 4), (1024, 16, 8), (1024, 32, 8),
                                   (2048, 8, 8), (2048, 16, 8), (2048, 8, 16), (2048, 16, 16)))}

ROUGH = tl.constexpr(2**14)  # keys: at most a 512th of a value
LOWEST = tl.constexpr(-2139095041)  # the key of minus infinity


# ---- values as integers ------------------------------------------------------------------------------------

@triton.jit
def _key(x):
    """float32 -> int32 in the same order; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """int32 -> the float32 whose key it is."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _floor(top, temperature, min_p):
    """The least key whose probability is not below min_p times the top's."""
    least = top.to(tl.float64) + temperature * tl.log(tl.maximum(min_p, 1e-300))
    key = _key(least.to(tl.float32))
    key = tl.minimum(tl.where(_value(key).to(tl.float64) < least, key + 1, key), _key(top))
    return tl.where(min_p > 0, key, LOWEST)


# ---- first kernel: what each chunk holds -------------------------------------------------------------------

@triton.jit
def _draw_stats_kernel(logits_ptr, temperature_ptr, peak_ptr, mass_ptr, stride_row, vocab, chunks,
                       WIDTH: tl.constexpr, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    i = chunk[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(logits_ptr + row * stride_row + i, i < vocab, float("-inf"))
    peak = tl.max(x, axis=1)
    base = tl.where(peak == float("-inf"), 0.0, peak)  # a chunk of minus infinities weighs 0, not NaN
    mass = tl.sum(tl.exp2((x - base[:, None]) * softmax_scale(tl.load(temperature_ptr + row))), axis=1)
    tl.store(peak_ptr + row * chunks + chunk, peak, chunk < chunks)
    tl.store(mass_ptr + row * chunks + chunk, mass, chunk < chunks)


# ---- the search --------------------------------------------------------------------------------------------

@triton.jit
def _search(x_ptr, mass_ptr, count, low, high, base, fine, by_mass, target, top, scale, WIDTH: tl.constexpr,
            PIVOTS: tl.constexpr, LANES: tl.constexpr):
    """(low, high, what is above): keys at most `fine` apart, and between them the largest such that it and
    all above weigh `target`; `base` is what weighs above `high` and is not among the values.

    A value weighs 1, or by mass its probability over the top's.  With WIDTH > 1 the values are maxima of
    chunks, and a weight is at most what the chunk holds from the pivot up (all its mass but for WIDTH - 1
    logits just below the pivot; the maximum at least).
    """
    lane = tl.arange(0, PIVOTS)
    low, high, above = low.to(tl.int64), high.to(tl.int64), base
    while high - low > fine:
        step = (high - low) // PIVOTS + 1
        pivot = (low + lane * step).to(tl.int32)
        total = tl.zeros([PIVOTS], tl.float64) + base
        for start in range(0, count, LANES):
            i = start + tl.arange(0, LANES)
            x = tl.load(x_ptr + i, i < count, float("-inf"))
            one = tl.where(by_mass, tl.exp2((x - top) * scale), (i < count).to(tl.float32))
            weight = one[None, :]
            if WIDTH > 1:
                whole = tl.where(by_mass, tl.load(mass_ptr + i, i < count, 0.0) * one, one)
                below = (WIDTH - 1) * tl.exp2((tl.maximum(_value(pivot), -1e30) - top) * scale)
                weight = tl.maximum(weight, whole[None, :] - below[:, None])
            total += tl.sum(tl.where(_key(x)[None, :] >= pivot[:, None], weight, 0.0), axis=1).to(tl.float64)
        best = tl.maximum(tl.sum((total >= target).to(tl.int32)) - 1, 0)
        above = tl.where(best == PIVOTS - 1, above, tl.sum(tl.where(lane == best + 1, total, 0.0)))
        low += best * step
        high = tl.minimum(low + step - 1, high)
    return low.to(tl.int32), high.to(tl.int32), above


@triton.jit
def _mass_above(x_ptr, count, tau, top, scale, LANES: tl.constexpr):
    """Probability, over the top's, of the values above key tau."""
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, count, LANES):
        i = start + tl.arange(0, LANES)
        x = tl.load(x_ptr + i, i < count, float("-inf"))
        total += tl.sum(tl.where(_key(x) > tau, tl.exp2((x - top) * scale), 0.0)).to(tl.float64)
    return total


# ---- collecting --------------------------------------------------------------------------------------------

@triton.jit
def _list_chunks(list_ptr, peak, low, count):
    """Write the numbers of the chunks that reach key `low`, ascending; returns how many."""
    chunk = tl.arange(0, peak.shape[0])
    reach = ((_key(peak) >= low) & (chunk < count)).to(tl.int32)
    tl.store(list_ptr + tl.cumsum(reach) - 1, chunk, reach != 0)
    tl.debug_barrier()
    return tl.sum(reach)


@triton.jit
def _collect(logits_ptr, list_ptr, found_ptr, listed, low, vocab, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """Write the logits of the listed chunks that reach key `low`; returns how many."""
    found = 0
    for start in range(0, listed * WIDTH, LANES):
        i = start + tl.arange(0, LANES)
        inside = i < listed * WIDTH
        at = tl.load(list_ptr + i // WIDTH, inside, 0) * WIDTH + i % WIDTH
        inside = inside & (at < vocab)
        x = tl.load(logits_ptr + at, inside, float("-inf"))
        take = (inside & (_key(x) >= low)).to(tl.int32)
        tl.store(found_ptr + found + tl.cumsum(take) - 1, x, take != 0)
        found += tl.sum(take)
    tl.debug_barrier()
    return found


@triton.jit
def _keep(found_ptr, found, low, high, LANES: tl.constexpr):
    """Move what was found from key `low` to `high` to the front; returns how many."""
    kept = 0
    for start in range(0, found, LANES):
        i = start + tl.arange(0, LANES)
        x = tl.load(found_ptr + i, i < found, float("-inf"))
        take = ((i < found) & (_key(x) >= low) & (_key(x) <= high)).to(tl.int32)
        at = kept + tl.cumsum(take) - 1
        tl.debug_barrier()  # all have read what is overwritten now
        tl.store(found_ptr + at, x, take != 0)
        kept += tl.sum(take)
    tl.debug_barrier()
    return kept


@triton.jit
def _split_chunks(logits_ptr, list_ptr, mass_ptr, ties_ptr, listed, tau, vocab, top, scale,
                  WIDTH: tl.constexpr, LANES: tl.constexpr):
    """Of each listed chunk: the probability above key tau, and how many logits equal it."""
    for start in range(0, listed, LANES // WIDTH):
        n = start + tl.arange(0, LANES // WIDTH)
        chunk = tl.load(list_ptr + n, n < listed, 0)
        at = chunk[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        x = tl.load(logits_ptr + at, (n < listed)[:, None] & (at < vocab), float("-inf"))
        key = _key(x)
        tl.store(mass_ptr + chunk, tl.sum(tl.where(key > tau, tl.exp2((x - top) * scale), 0.0), axis=1),
                 n < listed)
        tl.store(ties_ptr + chunk, tl.sum(((key == tau) & (at < vocab)).to(tl.int32), axis=1), n < listed)
    tl.debug_barrier()


# ---- second kernel: one program chooses --------------------------------------------------------------------

@triton.jit
def _draw_pick_kernel(logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, u_ptr, peak_ptr, mass_ptr,
                      list_ptr, ties_ptr, found_ptr, id_ptr, stride_row, vocab, chunks,
                      WIDTH: tl.constexpr, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, LANES: tl.constexpr,
                      FLAT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_row
    found_ptr += row * vocab
    peak_ptr += row * chunks
    mass_ptr += row * chunks
    list_ptr += row * chunks
    ties_ptr += row * chunks
    temperature = tl.load(temperature_ptr + row)
    scale = softmax_scale(temperature)

    chunk = tl.arange(0, CHUNKS)
    peak = tl.load(peak_ptr + chunk, chunk < chunks, float("-inf"))
    top = tl.max(peak)
    top = tl.where(top > float("-inf"), top, 0.0)
    mass = (tl.load(mass_ptr + chunk, chunk < chunks, 0.0) * tl.exp2((peak - top) * scale)).to(tl.float64)

    # what stays: every logit above tau, and the first `room` of those that equal it
    tau = tl.full((), LOWEST, tl.int32)
    room = vocab
    top_k = tl.where(temperature < GREEDY_BELOW, 1, tl.load(top_k_ptr + row))
    top_p = tl.load(top_p_ptr + row)
    limited = (top_k > 0) & (top_k < vocab)
    if limited | (top_p < 1):
        kept = tl.sum(mass)
        target = tl.where(limited, top_k.to(tl.float64), top_p * kept)
        high, above = _key(top), tl.full((), 0.0, tl.float64)
        tau, bound, weight = _search(peak_ptr, mass_ptr, chunks, tau, high, above, ROUGH, limited == 0,
                                     target, top, scale, WIDTH, PIVOTS, LANES)
        listed = _list_chunks(list_ptr, peak, tau, chunks)
        if listed * WIDTH > FLAT:
            found = _collect(logits_ptr, list_ptr, found_ptr, listed, tau, vocab, WIDTH, FLAT)
        else:
            found = _collect(logits_ptr, list_ptr, found_ptr, listed, tau, vocab, WIDTH, LANES)
        if limited:
            tau, bound, weight = _search(found_ptr, mass_ptr, found, tau, high, above, 0, False, target, top,
                                         scale, 1, PIVOTS, LANES)
            room = (top_k - weight.to(tl.int64)).to(tl.int32)
            kept = _mass_above(found_ptr, found, tau, top, scale, LANES)
            kept += room * tl.exp2((_value(tau) - top) * scale).to(tl.float64)
        if top_p < 1:
            least = tau
            target = top_p * kept
            if found > FLAT:  # narrow it down, and go on with few
                fine = (high.to(tl.int64) - tau) >> 8
                tau, high, above = _search(found_ptr, mass_ptr, found, tau, high, above, fine, True, target,
                                           top, scale, 1, PIVOTS, LANES)
                found = _keep(found_ptr, found, tau, high, FLAT)
            tau, bound, above = _search(found_ptr, mass_ptr, found, tau, high, above, 0, True, target, top,
                                        scale, 1, PIVOTS, LANES)
            one = tl.exp2((_value(tau) - top) * scale).to(tl.float64)
            fit = tl.minimum(tl.ceil((target - above) / one), tl.cast(vocab, tl.float64)).to(tl.int32)
            room = tl.minimum(tl.where(tau == least, room, vocab), tl.maximum(fit, 1))
    floor = _floor(top, temperature, tl.load(min_p_ptr + row))
    room = tl.where(floor > tau, vocab, room)
    tau = tl.maximum(tau, floor)

    ties = tl.full([CHUNKS], 0, tl.int32)
    if tau > LOWEST:
        listed = _list_chunks(list_ptr, peak, tau, chunks)
        if listed * WIDTH > FLAT:
            _split_chunks(logits_ptr, list_ptr, mass_ptr, ties_ptr, listed, tau, vocab, top, scale, WIDTH,
                          FLAT)
        else:
            _split_chunks(logits_ptr, list_ptr, mass_ptr, ties_ptr, listed, tau, vocab, top, scale, WIDTH,
                          LANES)
        reach = (_key(peak) >= tau) & (chunk < chunks)
        mass = tl.load(mass_ptr + chunk, reach, 0.0).to(tl.float64)
        ties = tl.load(ties_ptr + chunk, reach, 0)
    ties = tl.minimum(tl.maximum(room - (tl.cumsum(ties) - ties), 0), ties)
    mass += ties * tl.exp2((_value(tau) - top) * scale).to(tl.float64)
    target = tl.load(u_ptr + row) * tl.sum(mass)
    best = first_beyond(mass, target)
    target -= tl.sum(tl.where(chunk < best, mass, 0.0))
    room = tl.sum(tl.where(chunk == best, ties, 0))

    at = best * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(logits_ptr + at, at < vocab, float("-inf"))
    tie = ((_key(x) == tau) & (at < vocab)).to(tl.int32)
    stays = (_key(x) > tau) | ((tie != 0) & (tl.cumsum(tie) <= room))
    weight = tl.where(stays, tl.exp2((x - top) * scale), 0.0).to(tl.float64)
    tl.store(id_ptr + row, (best * WIDTH + first_beyond(weight, target)).to(tl.int64))


@ops.implement("sampler.draw", "triton", when=lambda logits, *rest: too_wide(logits) or refuse(logits, *rest))
def draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
         u: Tensor) -> Tensor:
    """Scale, filter and draw: one id per row, int64."""
    require(logits.dim() == 2 and logits.dtype == torch.float32, "logits", "must be [R, V] float32")
    rows, vocab = logits.shape
    wanted = {"temperature": temperature, "top_p": top_p, "min_p": min_p, "u": u}
    for name, column in wanted.items():
        require(column.shape == (rows,) and column.dtype == torch.float64, name, "must be [R] float64")
    require(top_k.shape == (rows,) and top_k.dtype == torch.int64, "top_k", "must be [R] int64")
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return ids
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    columns = [c.contiguous() for c in (temperature, top_k, top_p, min_p, u)]
    chunks = cdiv(vocab, WIDTH)
    peak, mass = torch.empty(2, rows, chunks, device=logits.device)
    listed, ties = torch.empty(2, rows, chunks, dtype=torch.int32, device=logits.device)
    found = torch.empty(rows, vocab, device=logits.device)
    stats = tuned("sampler.draw/stats", (rows, vocab), STATS)
    pick = tuned("sampler.draw/pick", (rows, vocab), PICK)
    _draw_stats_kernel[(rows, cdiv(chunks, stats["chunks"]))](
        logits, columns[0], peak, mass, logits.stride(0), vocab, chunks, WIDTH=WIDTH, CHUNKS=stats["chunks"],
        num_warps=stats["num_warps"])
    _draw_pick_kernel[(rows,)](
        logits, *columns, peak, mass, listed, ties, found, ids, logits.stride(0), vocab, chunks, WIDTH=WIDTH,
        CHUNKS=pow2(max(chunks, 16)), PIVOTS=pick["pivots"], LANES=pick["lanes"],
        FLAT=FLAT, num_warps=pick["num_warps"])
    return ids
