"""RMSNorm in one pass: a row is read once, held in registers, and everything that belongs to it is written.

Tiling
    A program holds ROWS rows at a time, each as two pieces of a power of two, 5120 = 4096 + 1024, so that no
    lane idles at the widths of the model.  Up to 1,024 channels a warp has rows of its own and sums by
    shuffles.

        lanes    0 .. 31 | 0 .. 31 | ...      8 channels (16 bytes of bfloat16) each, then the next 256
        MAIN     ████████████████████████     REST ██████

    `add_rms` also reads the residual and writes the sum; `rms_quantize` rounds the normalised row in groups
    while it is in registers.  Fused because each op saves a pass over memory and a launch.  The backward
    kernel is persistent: a program walks over rows and keeps its part of the gain's gradient in registers.

Shapes
    x, residual, results [..., D] of bfloat16, float16 or float32 with any strides; gain [D] or None.

Units
    Bytes per row of D bfloat16 channels: rms 4 D, add_rms 8 D, rms_quantize 6 D; about 5 operations per
    channel, 17 with the rounding.

Errors
    ValueError names an argument whose shape does not fit.  float64 is refused.

Source
    kernels.md 1.1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dskit import ops
from dskit.kernels import common
from dskit.kernels.common import (
    cdiv,
    ld,
    narrow,
    pow2,
    refuse,
    require,
    restored,
    rows_of,
    too_wide,
    tuned,
    up_to,
)


def _config(lane: int, early: bool, resident: int = 1 << 20, stages: int = 1,
            whole: bool = False) -> dict[str, int]:
    """Channels of a lane; whether the gain is read before the rows, once for all of them; programs per
    multiprocessor; stages of the loop over rows; whether a row is one piece, some lanes of it idle, so that
    there is one sum to wait for.
    """
    return {"lane": lane, "early": early, "resident": resident, "stages": stages, "whole": whole}


CONFIGS = {1 << 19: _config(8, True, whole=True), 1 << 22: _config(16, True, whole=True),
           1 << 62: _config(32, False)}  # by elements
if common.INTERPRET:  # programs cost most
    CONFIGS = {1 << 62: _config(32, False)}
LANES = (*(_config(lane, early) for lane in (8, 16, 32) for early in (True, False)), _config(64, False),
         *(_config(*sizes) for sizes in (
             (16, True, 4, 2), (16, True, 4, 3), (32, True, 4, 3), (32, True, 6, 2), (32, False, 8, 2))),
         *(_config(lane, True, whole=True) for lane in (8, 16, 32)))
STEADY = _config(8, True, whole=True)  # of rows whose sums must not depend on how many there are
CANDIDATES = {"norm.rms": LANES, "norm.add_rms": LANES, "norm.rms_quantize": LANES}
BACKWARD = 16  # elements per lane of the backward pass, which holds four values of each; not yet measured
RESIDENT = 16 if not common.INTERPRET else 1  # its warps on a multiprocessor; few, so that loops are walked


# ---- kernels -----------------------------------------------------------------------------------------------

@triton.jit
def _at(row, rows, WIDTH: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr):
    """Columns of a piece, and which of its elements exist."""
    col = FIRST + tl.arange(0, SIZE)[None, :]
    return col, (row < rows) & (col < WIDTH)


@triton.jit
def _read(x_ptr, stride_x, residual_ptr, stride_residual, total_ptr, row, rows, WIDTH: tl.constexpr,
          FIRST: tl.constexpr, SIZE: tl.constexpr):
    """A piece of rows and its sum of squares; with a residual, of the rounded sum, which is stored."""
    col, mask = _at(row, rows, WIDTH, FIRST, SIZE)
    x = ld(x_ptr + row * stride_x + col, mask)
    if residual_ptr is not None:
        total = narrow(x + ld(residual_ptr + row * stride_residual + col, mask), total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * WIDTH + col, total, mask=mask)
        x = total.to(tl.float32)
    return x, tl.sum(x * x, axis=1, keep_dims=True)


@triton.jit
def _gain(gain_ptr, WIDTH: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr):
    """The gain of a piece; 1 without one."""
    col = FIRST + tl.arange(0, SIZE)[None, :]
    return 1.0 if gain_ptr is None else ld(gain_ptr + col, col < WIDTH)


@triton.jit
def _write(y, y_ptr, q_ptr, row, rows, WIDTH: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr,
           ROWS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr):
    """Round and store a finished piece; with a KIND also quantised and restored."""
    col, mask = _at(row, rows, WIDTH, FIRST, SIZE)
    y = narrow(y, y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * WIDTH + col, y, mask=mask)
    if KIND is not None:
        groups = y.to(tl.float32).reshape(ROWS * SIZE // GROUP, GROUP)
        q = restored(groups, KIND).reshape(ROWS, SIZE)
        tl.store(q_ptr + row * WIDTH + col, narrow(q, q_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_rows(first, x_ptr, stride_x, residual_ptr, stride_residual, gain_ptr, gain, gain2, total_ptr, y_ptr,
               q_ptr, rows, eps, WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
               ROWS: tl.constexpr, EARLY: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr):
    """Read ROWS rows, and write all that belongs to them."""
    row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    x, square = _read(x_ptr, stride_x, residual_ptr, stride_residual, total_ptr, row, rows, WIDTH, 0, MAIN)
    if REST:
        x2, square2 = _read(x_ptr, stride_x, residual_ptr, stride_residual, total_ptr, row, rows, WIDTH,
                            MAIN, REST)
        square += square2
    scale = tl.rsqrt(square / WIDTH + eps)
    if not EARLY:  # many programs hide the wait: keep the registers
        gain = _gain(gain_ptr, WIDTH, 0, MAIN)
    _write(x * scale * gain, y_ptr, q_ptr, row, rows, WIDTH, 0, MAIN, ROWS, KIND, GROUP)
    if REST:
        if not EARLY:
            gain2 = _gain(gain_ptr, WIDTH, MAIN, REST)
        _write(x2 * scale * gain2, y_ptr, q_ptr, row, rows, WIDTH, MAIN, REST, ROWS, KIND, GROUP)


@triton.jit
def _norm_fwd_kernel(x_ptr, stride_x, residual_ptr, stride_residual, gain_ptr, total_ptr, y_ptr, q_ptr, rows,
                     eps, WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr,
                     EARLY: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
                     ONCE: tl.constexpr):
    gain, gain2 = 1.0, 1.0
    if EARLY:  # few programs: ask for the gain before anything has to be waited for
        gain = _gain(gain_ptr, WIDTH, 0, MAIN)
        gain2 = _gain(gain_ptr, WIDTH, MAIN, REST) if REST else 1.0
    if ONCE:  # a loop would wait for the gain before it asks for the rows
        _norm_rows(tl.program_id(0) * ROWS, x_ptr, stride_x, residual_ptr, stride_residual, gain_ptr, gain,
                   gain2, total_ptr, y_ptr, q_ptr, rows, eps, WIDTH, MAIN, REST, ROWS, EARLY, KIND, GROUP)
    else:
        for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
            _norm_rows(first, x_ptr, stride_x, residual_ptr, stride_residual, gain_ptr, gain, gain2,
                       total_ptr, y_ptr, q_ptr, rows, eps, WIDTH, MAIN, REST, ROWS, EARLY, KIND, GROUP)


@triton.jit
def _pull(x_ptr, stride_x, dy_ptr, stride_dy, gain_ptr, row, rows, WIDTH: tl.constexpr, FIRST: tl.constexpr,
          SIZE: tl.constexpr):
    """(x, dy, dy * gain, sum of squares, sum of x * dy * gain) of a piece of rows."""
    col, mask = _at(row, rows, WIDTH, FIRST, SIZE)
    x = ld(x_ptr + row * stride_x + col, mask)
    dy = ld(dy_ptr + row * stride_dy + col, mask)
    h = dy * _gain(gain_ptr, WIDTH, FIRST, SIZE)
    return x, dy, h, tl.sum(x * x, axis=1, keep_dims=True), tl.sum(x * h, axis=1, keep_dims=True)


@triton.jit
def _push(dx, dtotal_ptr, stride_dtotal, dx_ptr, row, rows, WIDTH: tl.constexpr, FIRST: tl.constexpr,
          SIZE: tl.constexpr):
    """Store a piece of x's gradient, with what came through the sum beside it."""
    col, mask = _at(row, rows, WIDTH, FIRST, SIZE)
    if dtotal_ptr is not None:
        dx += ld(dtotal_ptr + row * stride_dtotal + col, mask)
    tl.store(dx_ptr + row * WIDTH + col, narrow(dx, dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_bwd_kernel(x_ptr, stride_x, gain_ptr, dy_ptr, stride_dy, dtotal_ptr, stride_dtotal, dx_ptr,
                     dgain_ptr, rows, eps, WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
                     ROWS: tl.constexpr):
    """dx = s h - x (s^3 / D) sum(x h) with h = dy gain, s = rsqrt(mean(x^2) + eps); dgain = sum(dy x s)."""
    main_gain = tl.zeros([ROWS, MAIN], tl.float32)
    if REST:
        rest_gain = tl.zeros([ROWS, REST], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        x, dy, h, square, along = _pull(x_ptr, stride_x, dy_ptr, stride_dy, gain_ptr, row, rows, WIDTH,
                                        0, MAIN)
        if REST:
            x2, dy2, h2, square2, along2 = _pull(x_ptr, stride_x, dy_ptr, stride_dy, gain_ptr, row, rows,
                                                 WIDTH, MAIN, REST)
            square += square2
            along += along2
        scale = tl.rsqrt(square / WIDTH + eps)
        along = along / WIDTH * scale * scale * scale
        _push(h * scale - x * along, dtotal_ptr, stride_dtotal, dx_ptr, row, rows, WIDTH, 0, MAIN)
        main_gain += dy * x * scale
        if REST:
            _push(h2 * scale - x2 * along, dtotal_ptr, stride_dtotal, dx_ptr, row, rows, WIDTH, MAIN, REST)
            rest_gain += dy2 * x2 * scale
    if dgain_ptr is not None:
        here = dgain_ptr + tl.program_id(0) * WIDTH
        col = tl.arange(0, MAIN)
        tl.store(here + col, tl.sum(main_gain, axis=0), mask=col < WIDTH)
        if REST:
            col = MAIN + tl.arange(0, REST)
            tl.store(here + col, tl.sum(rest_gain, axis=0), mask=col < WIDTH)


# ---- launches ----------------------------------------------------------------------------------------------

def _tile(width: int, lane: int, group: int = 1, whole: bool = False) -> dict[str, int]:
    """Pieces, rows and warps of a program whose lanes take `lane` channels of the first piece.

    Pieces hold whole groups, and at least 8 channels for each lane: fewer would lay the second piece out in
    another way than the first, and their common sum would move one of them through shared memory.
    """
    main = max(group, pow2(width) if whole else pow2(width + 1) // 2)
    warps = min(16, max(1, main // (32 * lane)))
    rest = max(group, pow2(width - main), min(main, 256 * warps)) if width > main else 0
    return {"MAIN": main, "REST": rest, "ROWS": max(1, 32 * lane // main), "num_warps": warps}


def _forward(x: Tensor, residual: Tensor | None, gain: Tensor | None, eps: float, fmt: str | None,
             dtype: torch.dtype, steady: bool = False) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """(sum or None, normalised, quantised or None), all in the shape of x."""
    width = x.shape[-1]
    require(gain is None or gain.shape == (width,), "gain_D", f"must be [{width}], as wide as x")
    require(residual is None or residual.shape == x.shape, "residual", f"must be {list(x.shape)} like x")
    kind, group = (None, 1) if fmt is None else common.layout(fmt)
    x_TD, add_TD = rows_of(x), None if residual is None else rows_of(residual)
    total = None
    if residual is not None:
        total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    y = x.new_empty(x.shape, dtype=dtype)
    q = None if fmt is None else torch.empty_like(y)
    rows = x_TD.shape[0]
    if rows:
        name = "norm.add_rms" if residual is not None else "norm.rms_quantize" if fmt else "norm.rms"
        config = STEADY if steady else tuned(name, (rows, width), up_to(CONFIGS, x.numel()))
        tile = _tile(width, config["lane"], group, config["whole"])
        wanted = cdiv(rows, tile["ROWS"])
        programs = min(wanted, config["resident"] * common.processors(x))
        _norm_fwd_kernel[(programs,)](
            x_TD, x_TD.stride(0), add_TD, 0 if add_TD is None else add_TD.stride(0),
            None if gain is None else gain.contiguous(), total, y, q, rows, eps, width, EARLY=config["early"],
            KIND=kind, GROUP=group, STAGES=config["stages"],
            ONCE=programs == wanted and config["stages"] == 1, **tile)
    return total, y, q


def _backward(x: Tensor, gain: Tensor | None, dy: Tensor, dtotal: Tensor | None, eps: float,
              learned: bool) -> tuple[Tensor, Tensor | None]:
    """(gradient of x in its dtype, gradient of the gain in its if it is learned)."""
    width = x.shape[-1]
    x_TD, dy_TD, dtotal_TD = rows_of(x), rows_of(dy), None if dtotal is None else rows_of(dtotal)
    tile = _tile(width, BACKWARD)
    most = max(1, common.processors(x) * RESIDENT // tile["num_warps"])
    programs = min(cdiv(x_TD.shape[0], tile["ROWS"]), most)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgain = x.new_empty(programs, width, dtype=torch.float32) if learned else None
    if programs:
        _norm_bwd_kernel[(programs,)](
            x_TD, x_TD.stride(0), None if gain is None else gain.contiguous(), dy_TD, dy_TD.stride(0),
            dtotal_TD, 0 if dtotal is None else dtotal_TD.stride(0), dx, dgain, x_TD.shape[0], eps, width,
            **tile)
    return dx, dgain.sum(0).to(gain.dtype) if learned else None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, gain, eps, fmt, dtype, steady):
        total, y, q = _forward(x, residual, gain, eps, fmt, dtype, steady)
        ctx.save_for_backward(x if total is None else total, gain)
        ctx.eps, ctx.dtypes = eps, (x.dtype, None if residual is None else residual.dtype)
        ctx.set_materialize_grads(False)
        return total, y, q

    @staticmethod
    def backward(ctx, dtotal, dy, dq):
        x, gain = ctx.saved_tensors
        dy = dy if dq is None else dq if dy is None else dy + dq  # the rounding passes gradients through
        if dy is None:
            dx, dgain = dtotal, None
        else:
            dx, dgain = _backward(x, gain, dy, dtotal, ctx.eps, ctx.needs_input_grad[2])
        dx, dresidual = (None if dtype is None or dx is None else dx.to(dtype) for dtype in ctx.dtypes)
        return dx, dresidual, dgain, None, None, None, None


def _norm(x, residual, gain, eps, fmt, dtype, steady=False):
    needed = any(t is not None and t.requires_grad for t in (x, residual, gain))
    run = _Norm.apply if torch.is_grad_enabled() and needed else _forward
    return run(x, residual, gain, eps, fmt, dtype, steady)


# ---- the ops -----------------------------------------------------------------------------------------------

@ops.implement("norm.rms", "triton", grad=True, when=lambda x, gain_D, eps, dtype, steady=False:
               too_wide(x, dtype) or refuse(x, gain_D))
def rms(x: Tensor, gain_D: Tensor | None, eps: float, dtype: torch.dtype, steady: bool = False) -> Tensor:
    """RMSNorm of the last axis, [..., D] -> [..., D] of `dtype`."""
    return _norm(x, None, gain_D, eps, None, dtype, steady)[1]


@ops.implement("norm.add_rms", "triton", grad=True, when=lambda x, residual, gain_D, eps, dtype:
               too_wide(x, residual, dtype) or refuse(x, residual, gain_D))
def add_rms(x: Tensor, residual: Tensor, gain_D: Tensor | None, eps: float,
            dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x + residual, its RMSNorm in `dtype`)."""
    return _norm(x, residual, gain_D, eps, None, dtype)[:2]


@ops.implement("norm.rms_quantize", "triton", grad=True, when=lambda x, gain_D, eps, fmt, dtype:
               too_wide(x, dtype) or refuse(x, gain_D))
def rms_quantize(x: Tensor, gain_D: Tensor | None, eps: float, fmt: str,
                 dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(RMSNorm of x in `dtype`; that, quantised in `fmt` and restored)."""
    return _norm(x, None, gain_D, eps, fmt, dtype)[1:]
