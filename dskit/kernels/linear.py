"""Rounding to narrow formats and back: groups of channels that share a scale, read once and written once.

Tiling
    A tile is [GROUPS, SIZE], the groups of one row after those of another, so the width of a row does not
    matter where whole groups fill it.  A lane holds 8 neighbouring channels (16 bytes of bfloat16); a group
    of 32 spreads over 4 lanes, which find its largest magnitude by two shuffles.

        lanes   0    1    2    3  | 4    5    6    7  | ...
        group   ████ 0 ██████████   ████ 1 ██████████

    `quantize` keeps the restored values, since e4m3 and e2m1 times a scale are exact in bfloat16; `encode`
    keeps codes and scales, as caches hold them, and `decode` reads those.  One pass replaces the reference's
    nine over memory.

Shapes
    v [..., K] of bfloat16, float16 or float32 with any strides; codes uint8 [..., K] in fp8 and [..., K/2] in
    fp4, the even channel in the low nibble; scales uint8 [..., ceil(K / group)].

Units
    Bytes per bfloat16 channel: quantize 4, encode and decode 3 in fp8 and 2.5 in fp4, and one per group;
    about 13 operations per channel.

Errors
    ValueError names a format, a width or a shape that does not fit.  float64 is refused.

Source
    kernels.md 1.1, 0.2; model.md 3.1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dskit import ops
from dskit.kernels import common
from dskit.kernels.common import cdiv, layout, ld, narrow, refuse, require, rows_of, too_wide, tuned, up_to

# elements of a call -> elements of a lane, warps of a program.  Interpreted, programs cost most.
CONFIGS = {1 << 19: {"lane": 8, "num_warps": 4}, 1 << 22: {"lane": 16, "num_warps": 4},
           1 << 62: {"lane": 32, "num_warps": 4}}
if common.INTERPRET:
    CONFIGS = {1 << 62: {"lane": 32, "num_warps": 4}}
LANES = tuple({"lane": lane, "num_warps": warps} for warps in (2, 4, 8) for lane in (8, 16, 32))
CANDIDATES = {"linear.quantize": LANES, "linear.encode": LANES, "linear.decode": LANES}


# ---- kernels -----------------------------------------------------------------------------------------------

@triton.jit
def _place(WIDTH: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """(group, its row, its first column) for each line of a tile, [GROUPS, 1]."""
    group = (tl.program_id(0) * GROUPS + tl.arange(0, GROUPS))[:, None]
    PER_ROW: tl.constexpr = (WIDTH + SIZE - 1) // SIZE
    return group, (group // PER_ROW).to(tl.int64), group % PER_ROW * SIZE


@triton.jit
def _read(v_ptr, stride_v, row, first, rows, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """A tile of v in float32, zero beyond the row's end, and where its elements are stored."""
    col = first + tl.arange(0, SIZE)[None, :]
    mask = (row < rows) & (col < WIDTH)
    return ld(v_ptr + row * stride_v + col, mask), row * WIDTH + col, mask


@triton.jit
def _linear_quantize_kernel(v_ptr, stride_v, y_ptr, rows, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
                            SIZE: tl.constexpr, KIND: tl.constexpr):
    group, row, first = _place(WIDTH, GROUPS, SIZE)
    v, at, mask = _read(v_ptr, stride_v, row, first, rows, WIDTH, SIZE)
    tl.store(y_ptr + at, narrow(common.restored(v, KIND), y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _linear_encode_kernel(v_ptr, stride_v, codes_ptr, scales_ptr, rows, WIDTH: tl.constexpr,
                          GROUPS: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr):
    group, row, first = _place(WIDTH, GROUPS, SIZE)
    v, at, mask = _read(v_ptr, stride_v, row, first, rows, WIDTH, SIZE)
    value, scale = common.scaled(v, KIND)
    if KIND == "fp8":
        tl.store(codes_ptr + at, common.e4m3_code(value), mask=mask)
    else:
        pair = first // 2 + tl.arange(0, SIZE // 2)[None, :]
        tl.store(codes_ptr + row * (WIDTH // 2) + pair, common.pack(common.e2m1_code(value)),
                 mask=(row < rows) & (pair < WIDTH // 2))
    tl.store(scales_ptr + group, common.scale_byte(scale, KIND), mask=row < rows)


@triton.jit
def _linear_decode_kernel(codes_ptr, scales_ptr, y_ptr, rows, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
                          SIZE: tl.constexpr, KIND: tl.constexpr):
    group, row, first = _place(WIDTH, GROUPS, SIZE)
    col = first + tl.arange(0, SIZE)[None, :]
    mask = (row < rows) & (col < WIDTH)
    if KIND == "fp8":
        value = common.from_e4m3(tl.load(codes_ptr + row * WIDTH + col, mask=mask, other=0))
    else:
        pair = first // 2 + tl.arange(0, SIZE // 2)[None, :]
        some = (row < rows) & (pair < WIDTH // 2)
        byte = tl.load(codes_ptr + row * (WIDTH // 2) + pair, mask=some, other=0)
        value = common.from_e2m1(common.unpack(byte))
    scale = common.scale_value(tl.load(scales_ptr + group, mask=row < rows, other=0), KIND)
    tl.store(y_ptr + row * WIDTH + col, narrow(value * scale, y_ptr.dtype.element_ty), mask=mask)


# ---- launches ----------------------------------------------------------------------------------------------

def _launch(name: str, kernel, rows: int, width: int, kind: str, size: int, *tensors) -> None:
    """Run an op's kernel over the groups of [rows, width]."""
    groups = rows * cdiv(width, size)
    config = tuned(name, (groups, kind, size), up_to(CONFIGS, groups * size))
    tile = max(1, 32 * config["num_warps"] * config["lane"] // size)
    if groups:
        kernel[(cdiv(groups, tile),)](*tensors, rows, width, GROUPS=tile, SIZE=size, KIND=kind,
                                      num_warps=config["num_warps"])


def _lines(v: Tensor, size: int) -> Tensor:
    """v [..., K] as [rows, K]; as lines of one group each where nothing lies between them."""
    whole = v.is_contiguous() and v.shape[-1] % size == 0
    return v.view(-1, size) if whole else rows_of(v)


def _quantize(v: Tensor, fmt: str, dtype: torch.dtype) -> Tensor:
    kind, size = layout(fmt)
    lines, y = _lines(v, size), torch.empty(v.shape, dtype=dtype, device=v.device)
    _launch("linear.quantize", _linear_quantize_kernel, *lines.shape, kind, size, lines, lines.stride(0), y)
    return y


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, fmt, dtype):
        ctx.dtype = v.dtype
        return _quantize(v, fmt, dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype), None, None


# ---- the ops -----------------------------------------------------------------------------------------------

def _whole_rows(v: Tensor, fmt: str) -> str | None:
    size = v.shape[-1]
    return f"a row of {size} is one group" if fmt == f"fp8_{size}" and size != common.pow2(size) else None


@ops.implement("linear.quantize", "triton", grad=True, when=lambda v, fmt, dtype:
               too_wide(v, dtype) or _whole_rows(v, fmt) or refuse(v))
def quantize(v: Tensor, fmt: str, dtype: torch.dtype) -> Tensor:
    """Quantise and restore, [..., K] -> [..., K] of `dtype`; a gradient passes straight through."""
    if torch.is_grad_enabled() and v.requires_grad:
        return _StraightThrough.apply(v, fmt, dtype)
    return _quantize(v, fmt, dtype)


@ops.implement("linear.encode", "triton", when=lambda v, fmt: too_wide(v) or refuse(v))
def encode(v: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """Quantise v [..., K] to (codes [..., K] or [..., K/2], scales [..., groups]), both uint8."""
    kind, size = layout(fmt)
    width = v.shape[-1]
    require(kind == "fp8" or width % 2 == 0, "v", f"has {width} channels; {fmt} packs them in pairs")
    codes = v.new_empty(*v.shape[:-1], width if kind == "fp8" else width // 2, dtype=torch.uint8)
    scales = v.new_empty(*v.shape[:-1], cdiv(width, size), dtype=torch.uint8)
    lines = _lines(v, size)
    _launch("linear.encode", _linear_encode_kernel, *lines.shape, kind, size, lines, lines.stride(0), codes,
            scales)
    return codes, scales


@ops.implement("linear.decode", "triton", when=lambda codes, scales, fmt, dtype:
               too_wide(dtype) or refuse(codes, scales))
def decode(codes: Tensor, scales: Tensor, fmt: str, dtype: torch.dtype) -> Tensor:
    """Inverse of encode: [..., K] of `dtype`."""
    kind, size = layout(fmt)
    per_byte = 1 if kind == "fp8" else 2
    width = codes.shape[-1] * per_byte
    want = (*codes.shape[:-1], cdiv(width, size))
    require(codes.itemsize == 1 and scales.itemsize == 1, "codes", "and scales must be bytes")
    require(scales.shape == want, "scales", f"must be {list(want)} for {width} channels of {fmt}")
    y = torch.empty(*codes.shape[:-1], width, dtype=dtype, device=codes.device)
    codes, scales = (t.view(torch.uint8).contiguous() for t in (codes, scales))
    _launch("linear.decode", _linear_decode_kernel, *_lines(y, size).shape, kind, size, codes, scales, y)
    return y
