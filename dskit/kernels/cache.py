"""Cache rows written and read in one pass: norm, rotation, rounding and scatter while a row is in registers.

Tiling
    One program is one warp with a few rows.  Everything is done on pairs of neighbouring channels: the unit
    of the rotation, and a word of two bfloat16.

        v       | a b | a b | ...        4 bytes a pair
        gain    | g g | ...              8 bytes, float32
        turn              | c s | ...    8 bytes, for the last channels
        row     | codes ... | scales |   1 byte a pair (e2m1) or 2 (e4m3)

    Fused because each part would read and write the vector again: norm, rotation, rounding and scatter of a
    window vector are four kernels that move 5.6 kB, in one 1.5 kB.

Shapes
    v [T, ..., H] of bfloat16; a cache [S, nbytes] of uint8 or [S, H] of bfloat16 or float32; rows to read
    int64 of any shape.

Units
    Bytes per row: 2 H read, nbytes written, 2 H more for the normed vector; reading: nbytes and 2 H.

Errors
    ValueError names an argument whose shape does not fit.  Odd widths and values that are not bfloat16 are
    refused, and so are numbers to be read, where a gather is all there is to do.

Source
    kernels.md 1.1 (norm_rope_quant_store, load_cache).
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
    bf16_pair,
    cdiv,
    e2m1_byte,
    e2m1_pair,
    e4m3,
    e4m3_pair,
    fp32_pair,
    from_bf16_pair,
    from_e2m1_byte,
    from_e4m3_pair,
    from_fp16_pair,
    from_fp32_pair,
    inverse,
    pow2,
    refuse,
    require,
    scale_byte,
    scale_fp4,
    scale_fp4e,
    scale_fp8,
    scale_value,
    tuned,
    up_to,
)

# rows of a call -> pairs and warps of a program.  A warp is enough to norm a row by shuffles, and where a
# lane knows that none of its pairs turn, the compiler leaves that out.
CONFIGS = {4096: {"pairs": 256, "num_warps": 1}, 1 << 62: {"pairs": 512, "num_warps": 1}}
PAIRS = tuple({"pairs": pairs, "num_warps": warps} for pairs, warps in
              ((128, 1), (256, 1), (512, 1), (1024, 1), (512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8)))
CANDIDATES = {"cache.ready": PAIRS, "cache.write_": PAIRS, "cache.read": PAIRS}
HELD = torch.uint8, torch.bfloat16, torch.float32


# ---- kernels -----------------------------------------------------------------------------------------------

@triton.jit
def _pairs(WIDE: tl.constexpr):
    """The pairs of a row; a lane is to hold four neighbours, 16 bytes, also where it stores fewer bytes."""
    return tl.max_contiguous(tl.arange(0, WIDE), 4)[None, :]


@triton.jit
def _normed(word, gain, eps, PAIRS: tl.constexpr):
    """RMSNorm of rows of bfloat16 pairs."""
    a, b = from_bf16_pair(word)
    scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1, keep_dims=True) / (2 * PAIRS) + eps)
    gain_a, gain_b = from_fp32_pair(gain)
    return bf16_pair(a * scale * gain_a, b * scale * gain_b)


@triton.jit
def _turned(word, turn, pair, FIRST: tl.constexpr):
    """The last pairs of rows, each a complex number, times their turns."""
    a, b = from_bf16_pair(word)
    c, s = from_fp32_pair(turn)
    return tl.where(pair >= FIRST, bf16_pair(a * c - b * s, a * s + b * c), word)


@triton.jit
def _scales(word, pair, CODED: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr):
    """(scales [ROWS, groups]; what values are multiplied by before they are rounded, [ROWS, groups])."""
    a, b = from_bf16_pair(word)
    size = tl.where(pair < CODED, tl.maximum(tl.abs(a), tl.abs(b)), 0.0)
    amax = tl.max(size.reshape(size.shape[0], size.shape[1] // GROUP, GROUP), axis=2)
    if KIND == "fp8":
        scale = scale_fp8(amax)
        factor = inverse(scale)
    elif KIND == "fp4_32":
        scale = scale_fp4(amax)
        factor = inverse(scale) * 0.00006103515625  # 2^-14: see e2m1_pair
    else:
        scale = scale_fp4e(amax)
        factor = 0.00006103515625 / scale
    return scale, factor


@triton.jit
def _spread(value, GROUP: tl.constexpr):
    """One value per group [ROWS, groups] -> the same for each pair of the group."""
    groups = value[:, :, None].broadcast_to(value.shape[0], value.shape[1], GROUP)
    return groups.reshape(value.shape[0], value.shape[1] * GROUP)


@triton.jit
def _e2m1(word, factor, KIND: tl.constexpr):
    """Pairs times the factor of their group -> the nearest e2m1 values, as e2m1_pair gives them."""
    a, b = from_bf16_pair(word)
    a, b = a * factor, b * factor
    if KIND == "fp4_16":  # an e4m3 scale may be too small: 6 * 2^-14 is the largest
        a = tl.clamp(a, -0.0003662109375, 0.0003662109375)
        b = tl.clamp(b, -0.0003662109375, 0.0003662109375)
    return e2m1_pair(a, b)


@triton.jit
def _store_bytes(word, scale, factor, half_ptr, byte_ptr, to, real, pair, KIND: tl.constexpr,
                 GROUP: tl.constexpr, CODED: tl.constexpr, WIDTH: tl.constexpr, SCALES: tl.constexpr,
                 SCALES_AT: tl.constexpr, NBYTES: tl.constexpr):
    """A packed row: codes, pairs that stay in bfloat16, scales, padding."""
    factor = _spread(factor, GROUP)
    if KIND == "fp8":
        a, b = from_bf16_pair(word)
        at = half_ptr + to * (NBYTES // 2) + pair
        tl.store(at, e4m3_pair(a * factor, b * factor), real & (pair < CODED))
        if CODED < WIDTH:
            tail = real & (pair >= CODED) & (pair < WIDTH)
            tl.store(at + pair - CODED, (word & 0xFFFF).to(tl.uint16), tail)
            tl.store(at + pair - CODED + 1, (word >> 16).to(tl.uint16), tail)
    else:
        codes = e2m1_byte(_e2m1(word, factor, KIND))
        tl.store(byte_ptr + to * NBYTES + pair, codes, real & (pair < CODED))
    group = tl.arange(0, scale.shape[1])[None, :]
    tl.store(byte_ptr + to * NBYTES + SCALES_AT + group, scale_byte(scale, KIND), real & (group < SCALES))
    if SCALES_AT + SCALES < NBYTES:
        pad = SCALES_AT + SCALES + tl.arange(0, 4)[None, :] + tl.zeros_like(to).to(tl.int32)
        tl.store(byte_ptr + to * NBYTES + pad, tl.zeros_like(pad).to(tl.uint8), real & (pad < NBYTES))


@triton.jit
def _store_pairs(a, b, word_ptr, at, mask):
    """Two numbers as one word, of bfloat16 or float32 by the pointer's type."""
    if word_ptr.dtype.element_ty == tl.int64:
        tl.store(word_ptr + at, fp32_pair(a, b), mask)
    else:
        tl.store(word_ptr + at, bf16_pair(a, b).to(tl.int32, bitcast=True), mask)


@triton.jit
def _rounded(word, scale, factor, pair, KIND: tl.constexpr, GROUP: tl.constexpr, CODED: tl.constexpr):
    """Pairs quantised and restored, float32; those that stay in bfloat16 as they are."""
    scale, factor = _spread(scale, GROUP), _spread(factor, GROUP)
    whole_a, whole_b = from_bf16_pair(word)
    if KIND == "fp8":
        a, b = e4m3(whole_a * factor) * scale, e4m3(whole_b * factor) * scale
    else:
        a, b = from_fp16_pair(_e2m1(word, factor, KIND))
        a, b = a * (scale * 16384.0), b * (scale * 16384.0)
    return tl.where(pair < CODED, a, whole_a), tl.where(pair < CODED, b, whole_b)


@triton.jit(do_not_specialize=["rows"])
def _cache_write_fwd_kernel(v_ptr, stride_v, gain_ptr, turn_ptr, slot_ptr, half_ptr, byte_ptr, word_ptr,
                            normed_ptr, rows, eps, HEADS: tl.constexpr, WIDTH: tl.constexpr,
                            TURNS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
                            CODED: tl.constexpr, SCALES: tl.constexpr, SCALES_AT: tl.constexpr,
                            NBYTES: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    pair = _pairs(WIDE)
    real = row < rows
    here = real & (pair < WIDTH)
    word = tl.load(v_ptr + row * stride_v + pair, here, other=0).to(tl.uint32, bitcast=True)
    # whatever has to be read is asked for at once, before anything waits for the sum of squares
    if gain_ptr is not None:  # for each row, so that it lies as the rows do
        gain = tl.load(gain_ptr + pair, here, other=0)
    if turn_ptr is not None:
        at = row // HEADS * TURNS + pair - (WIDTH - TURNS)
        turn = tl.load(turn_ptr + at, here & (pair >= WIDTH - TURNS), other=0)
    to = row
    if slot_ptr is not None:
        to = tl.load(slot_ptr + row, real, other=-1)
    if gain_ptr is not None:
        word = _normed(word, gain, eps, WIDTH)
        if normed_ptr is not None:
            tl.store(normed_ptr + row * WIDTH + pair, word.to(tl.int32, bitcast=True), here)
    if turn_ptr is not None:
        word = _turned(word, turn, pair, WIDTH - TURNS)
    if slot_ptr is not None:
        real &= to >= 0
    scale, factor = _scales(word, pair, CODED, KIND, GROUP)
    if word_ptr is None:
        _store_bytes(word, scale, factor, half_ptr, byte_ptr, to, real, pair, KIND, GROUP, CODED, WIDTH,
                     SCALES, SCALES_AT, NBYTES)
    else:
        a, b = _rounded(word, scale, factor, pair, KIND, GROUP, CODED)
        _store_pairs(a, b, word_ptr, to * WIDTH + pair, real & (pair < WIDTH))


@triton.jit(do_not_specialize=["count"])
def _cache_read_fwd_kernel(half_ptr, byte_ptr, row_ptr, out_ptr, count, WIDTH: tl.constexpr,
                           KIND: tl.constexpr, GROUP: tl.constexpr, CODED: tl.constexpr,
                           SCALES: tl.constexpr, SCALES_AT: tl.constexpr, NBYTES: tl.constexpr,
                           WIDE: tl.constexpr, ROWS: tl.constexpr):
    at = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    pair = _pairs(WIDE)
    group = tl.arange(0, WIDE // GROUP)[None, :]
    row = tl.load(row_ptr + at, at < count, other=-1)
    real = row >= 0
    scale = tl.load(byte_ptr + row * NBYTES + SCALES_AT + group, real & (group < SCALES), other=0)
    scale = _spread(scale_value(scale, KIND), GROUP)
    if KIND == "fp8":
        code = tl.load(half_ptr + row * (NBYTES // 2) + pair, real & (pair < CODED), other=0)
        a, b = from_e4m3_pair(code.to(tl.uint16, bitcast=True))
    else:
        a, b = from_e2m1_byte(tl.load(byte_ptr + row * NBYTES + pair, real & (pair < CODED), other=0))
        scale = scale * 16384.0
    a, b = a * scale, b * scale
    if CODED < WIDTH:
        tail = half_ptr + row * (NBYTES // 2) + 2 * pair - CODED
        low = tl.load(tail, real & (pair >= CODED) & (pair < WIDTH), other=0).to(tl.uint16, bitcast=True)
        high = tl.load(tail + 1, real & (pair >= CODED) & (pair < WIDTH), other=0).to(tl.uint16, bitcast=True)
        tail_a, tail_b = from_bf16_pair(low.to(tl.uint32) | (high.to(tl.uint32) << 16))
        a, b = tl.where(pair < CODED, a, tail_a), tl.where(pair < CODED, b, tail_b)
    _store_pairs(a, b, out_ptr, at * WIDTH + pair, (at < count) & (pair < WIDTH))


# ---- launches ----------------------------------------------------------------------------------------------

def _constants(name: str, packing: Any, rows: int, steady: bool = False) -> dict[str, Any]:
    """Compile-time sizes of a packing, in pairs of channels, and an op's tile for so many rows; `steady`: for
    any number.
    """
    kind, group = common.layout(packing.fmt)
    codes, tail, scales, _ = packing.parts
    wide = max(group, pow2(packing.width)) // 2
    config = up_to(CONFIGS, 1 if steady else rows)
    if not steady:
        config = tuned(name, (rows, packing.width, packing.fmt), config)
    held = max(1, config["pairs"] // wide)
    return {"WIDTH": packing.width // 2, "KIND": kind, "GROUP": group // 2, "CODED": packing.coded // 2,
            "SCALES": scales, "SCALES_AT": codes + tail, "NBYTES": packing.nbytes, "WIDE": wide, "ROWS": held,
            "num_warps": config["num_warps"]}


def _words(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [R, K] of x [..., K] seen as words of `dtype`; copied only where words do not lie side by side."""
    size = dtype.itemsize // x.itemsize
    rows = x.reshape(-1, x.shape[-1])
    aligned = rows.stride(1) == 1 and rows.stride(0) % size == 0 and rows.storage_offset() % size == 0
    return (rows if aligned else rows.clone(memory_format=torch.contiguous_format)).view(dtype)


def _write(v: Tensor, gain: Tensor | None, eps: float, turn: Tensor | None, slots: Tensor | None,
           packing: Any, keep: bool, steady: bool, cache: Tensor) -> Tensor | None:
    """Fill rows `slots` (None: all, in order) of a contiguous cache; returns the normed v to keep."""
    width, tokens = packing.width, v.shape[0]
    require(v.shape[-1] == width, "v", f"has {v.shape[-1]} channels, the packing {width}")
    require(gain is None or gain.shape == (width,), "gain_H", f"must be [{width}]")
    require(turn is None or (turn.shape[0] == tokens and 2 * turn.shape[1] <= width), "turn_T",
            f"must be [{tokens}, at most {width // 2}]")
    normed = None if not keep else v if gain is None else torch.empty(v.shape, dtype=v.dtype, device=v.device)
    rows = v.numel() // width
    require(slots is None or slots.shape == (rows,), "slots_T", f"must be [{rows}]")
    if not rows:
        return normed
    packed, words = cache.dtype == torch.uint8, {2: torch.int32, 4: torch.int64}
    sizes = _constants("cache.ready" if slots is None else "cache.write_", packing, rows, steady)
    v_words = _words(v, torch.int32)
    gain_words = None if gain is None else _words(gain.float(), torch.int64)
    turn_words = None if turn is None else torch.view_as_real(turn.contiguous()).view(torch.int64)
    _cache_write_fwd_kernel[(cdiv(rows, sizes["ROWS"]),)](
        v_words, v_words.stride(0), gain_words, turn_words, None if slots is None else slots.contiguous(),
        cache.view(torch.int16) if packed else None, cache if packed else None,
        None if packed else cache.view(words[cache.itemsize]),
        None if gain is None or normed is None else normed.view(torch.int32), rows, eps, rows // tokens,
        TURNS=0 if turn is None else turn.shape[1], **sizes)
    return normed


def _odd(packing: Any) -> str | None:
    """Why rows of a packing are beyond these kernels, or None."""
    if packing.fmt is None:
        return "exact numerics round nothing"
    if packing.width % 2 or packing.tail % 2 or (packing.tail and packing.fmt.startswith("fp4")):
        return f"a width of {packing.width} with {packing.tail} channels left in bfloat16, in {packing.fmt}"
    return None


def _cannot(v: Tensor, packing: Any, held: torch.dtype, *tensors: Tensor | None) -> str | None:
    """Why rows of v cannot be made ready here for a cache that holds `held`, or None."""
    if v.dtype != torch.bfloat16:
        return f"v is {v.dtype}; the kernel rounds bfloat16"
    return _odd(packing) or _beyond(held) or refuse(v, *tensors)


def _beyond(dtype: torch.dtype) -> str | None:
    return None if dtype in HELD else f"rows of {dtype}; the kernel knows {', '.join(map(str, HELD))}"


# ---- the ops -----------------------------------------------------------------------------------------------

@ops.implement("cache.ready", "triton", when=lambda v, gain_H, eps, turn_T, packing, packed, *_, **__:
               _cannot(v, packing, torch.uint8 if packed else packing.dtype, gain_H, turn_T))
def ready(v: Tensor, gain_H: Tensor | None, eps: float, turn_T: Tensor | None, packing: Any, packed: bool,
          keep: bool = False, steady: bool = False) -> tuple[Tensor, Tensor | None]:
    """v [T, ..., H] normed, rotated, rounded: (rows for a cache, the normed v to keep)."""
    width, dtype = (packing.nbytes, torch.uint8) if packed else (packing.width, packing.dtype)
    rows = torch.empty(*v.shape[:-1], width, dtype=dtype, device=v.device)
    return rows, _write(v, gain_H, eps, turn_T, None, packing, keep, steady, rows)


@ops.implement("cache.write_", "triton", when=lambda cache, v, gain, eps, turn, slots, packing, *_, **__:
               _cannot(v, packing, cache.dtype, cache, gain, turn, slots))
def write_(cache: Tensor, v_TH: Tensor, gain_H: Tensor | None, eps: float, turn_T: Tensor | None,
           slots_T: Tensor, packing: Any, keep: bool = False, steady: bool = False
           ) -> tuple[Tensor, Tensor | None]:
    """`ready`, put in rows `slots` of a cache, -1 nowhere: (the cache, the normed v to keep)."""
    require(cache.is_contiguous(), "cache", "must be contiguous")
    return cache, _write(v_TH, gain_H, eps, turn_T, slots_T, packing, keep, steady, cache)


@ops.implement("cache.read", "triton", when=lambda cache, rows, packing, dtype:
               "the cache holds numbers, which a gather reads" if cache.dtype != torch.uint8 else
               _odd(packing) or _beyond(dtype) or refuse(cache, rows))
def read(cache: Tensor, rows: Tensor, packing: Any, dtype: torch.dtype) -> Tensor:
    """Rows of a packed cache as numbers, [..., H] of `dtype`; zeros for row -1."""
    require(cache.shape[1:] == (packing.nbytes,) and cache.is_contiguous(), "cache",
            f"must be contiguous [S, {packing.nbytes}]")
    out = torch.empty(*rows.shape, packing.width, dtype=dtype, device=cache.device)
    if rows.numel():
        sizes = _constants("cache.read", packing, rows.numel())
        words = out.view(torch.int32 if dtype == torch.bfloat16 else torch.int64)
        _cache_read_fwd_kernel[(cdiv(rows.numel(), sizes["ROWS"]),)](
            cache.view(torch.int16), cache, rows.contiguous(), words, rows.numel(), **sizes)
    return out
