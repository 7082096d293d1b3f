"""Cases of the roundings in layers/linear.py.

Shapes: v [rows, width], `bits` and `group` of the format; with `gap` v is a float32 slice of rows that are
wider by so much.
Errors: none of its own.
Source: kernels.md 1.1, 0.2.
"""

from __future__ import annotations

import torch

from dskit import ops
from dskit.testing import Cases, Maker, Shape

FORMATS = ((8, 32), (8, 64), (8, 128), (4, 32), (4, 16))
EDGES = tuple({"rows": rows, "width": width, "bits": bits, "group": group} | gap
              for bits, group in FORMATS
              for rows, width, gap in ((0, 64, {}), (1, group, {}), (17, 2 * group, {}), (5, group + 10, {}),
                                       (3, 4, {}), (7, 128, {"gap": 6})))
ROWS = (1, 32, 128, 512, 4096)
FROZEN = tuple({"rows": rows, "width": width, "bits": bits, "group": group}
               for width, bits, group in ((5120, 8, 32), (8192, 8, 32), (1280, 8, 32), (512, 8, 32),
                                          (512, 8, 64), (512, 4, 16), (128, 4, 32))
               for rows in ROWS)


def _fmt(shape: Shape) -> str:
    return f"fp{shape['bits']}_{shape['group']}"


def _values(shape: Shape, maker: Maker) -> torch.Tensor:
    """Rows of different sizes with zeros of both signs, tiny values, ties and a row of zeros."""
    rows, width, gap = shape["rows"], shape["width"], shape.get("gap", 0)
    x = maker.normal(rows, width + gap, dtype=torch.float32)
    x *= torch.exp2(maker.integers(12, rows, 1, low=-12).float())
    x[:, 1::7], x[:, 2::7] = 0.0, -0.0
    x[:, 3::11] *= 1e-6
    x[:, 4::5] = (4 * x[:, 4::5]).round() / 4
    x[2:3] = 0
    return x[:, :width] if gap else x.bfloat16()


def _quantize(shape: Shape, maker: Maker) -> tuple:
    return _values(shape, maker), _fmt(shape), torch.bfloat16


def _encode(shape: Shape, maker: Maker) -> tuple:
    return _values(shape, maker), _fmt(shape)


def _decode(shape: Shape, maker: Maker) -> tuple:
    encode = ops.find("linear.encode").reference
    return *encode(_values(shape, maker), _fmt(shape)), _fmt(shape), torch.bfloat16


def _stored(shape: Shape) -> int:
    """Bytes of codes and scales."""
    return shape["rows"] * (shape["width"] * shape["bits"] // 8 + -(-shape["width"] // shape["group"]))


def _elements(shape: Shape) -> int:
    return shape["rows"] * shape["width"]


CASES = [
    Cases("linear.quantize", _quantize, "X", EDGES, FROZEN, nbytes=lambda s: 4 * _elements(s),
          flop=lambda s: 13 * _elements(s), rounds=True, grads=(0,)),
    Cases("linear.encode", _encode, "XX", EDGES, FROZEN, nbytes=lambda s: 2 * _elements(s) + _stored(s),
          flop=lambda s: 8 * _elements(s), rounds=True),
    Cases("linear.decode", _decode, "X", EDGES, FROZEN, nbytes=lambda s: 2 * _elements(s) + _stored(s),
          flop=lambda s: 2 * _elements(s), rounds=True),
]
