"""Cases of the ops in layers/norm.py.

Shapes: rows, width.
Errors: none of its own.
Source: kernels.md 1.1.
"""

from __future__ import annotations

import torch

from dskit.testing import Cases, Maker, Shape

EPS = 1e-20
SIZES = ((0, 96), (1, 96), (2, 33), (17, 128), (65, 40))
EDGES = tuple({"rows": rows, "width": width} for rows, width in SIZES)
FROZEN = tuple({"rows": rows, "width": 5120} for rows in (1, 32, 128, 512, 4096))


def _rms(shape: Shape, maker: Maker) -> tuple:
    rows, width = shape["rows"], shape["width"]
    return maker.normal(rows, width), maker.normal(width, scale=0.2) + 1, EPS, torch.bfloat16


CASES = [
    Cases("norm.rms", _rms, "E", EDGES, FROZEN, nbytes=lambda s: 4 * s["rows"] * s["width"],
          flop=lambda s: 3 * s["rows"] * s["width"], grads=(0, 1)),
]
