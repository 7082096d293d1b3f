"""Cases of the ops in layers/norm.py.

Shapes: rows, width; with `gap` x is a float32 slice of rows that are wider by so much.
Errors: none of its own.
Source: kernels.md 1.1.
"""

from __future__ import annotations

import torch

from dskit.testing import Cases, Maker, Shape

EPS = 1e-20
SIZES = ((0, 96), (1, 96), (2, 33), (17, 128), (65, 40), (3, 1), (5, 1280))
EDGES = (*({"rows": rows, "width": width} for rows, width in SIZES), {"rows": 7, "width": 48, "gap": 5})
ROWS = (1, 32, 128, 512, 4096)
TRUNK = tuple({"rows": rows, "width": 5120} for rows in ROWS)
FROZEN = tuple({"rows": rows, "width": width} for width in (5120, 1280, 512, 128) for rows in ROWS)


def _rows(shape: Shape, maker: Maker) -> torch.Tensor:
    """Rows of normal values of different sizes, the last one zero; with a gap they are a slice."""
    rows, width, gap = shape["rows"], shape["width"], shape.get("gap", 0)
    size = maker.uniform(rows, 1, low=0.1, high=3.0)
    x = maker.normal(rows, width + gap, dtype=torch.float32) * size
    x[1:][-1:] = 0
    return x[:, :width] if gap else x.bfloat16()


def _gain(shape: Shape, maker: Maker) -> torch.Tensor:
    return maker.normal(shape["width"], dtype=torch.float32, scale=0.2) + 1


def _rms(shape: Shape, maker: Maker) -> tuple:
    return _rows(shape, maker), _gain(shape, maker), EPS, torch.bfloat16


def _add_rms(shape: Shape, maker: Maker) -> tuple:
    return _rows(shape, maker), _rows(shape, maker), _gain(shape, maker), EPS, torch.bfloat16


def _rms_quantize(shape: Shape, maker: Maker) -> tuple:
    return _rows(shape, maker), _gain(shape, maker), EPS, "fp8_32", torch.bfloat16


def _cost(per_element: int, gain: int = 4):
    return lambda s: (per_element * s["rows"] + gain) * s["width"]


CASES = [
    Cases("norm.rms", _rms, "E", EDGES, FROZEN, nbytes=_cost(4), flop=_cost(4, 0), grads=(0, 1)),
    Cases("norm.add_rms", _add_rms, "XE", EDGES, TRUNK, nbytes=_cost(8), flop=_cost(5, 0), rounds=True,
          grads=(0, 1, 2)),
    Cases("norm.rms_quantize", _rms_quantize, "EQ", EDGES, FROZEN, nbytes=_cost(6), flop=_cost(16, 0),
          rounds=True, grads=(0, 1)),
]
