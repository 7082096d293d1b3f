"""Cases of layers/rope.py.

Shapes: x [rows, heads, width], with heads 0 [rows, width]; turn [rows, pairs]; `inverse` 1 turns back; with
`gap` x is a slice of rows that are wider by so much.
Errors: none of its own.
Source: kernels.md 1.1.
"""

from __future__ import annotations

import math

import torch

from dskit.testing import Cases, Maker, Shape

EDGES = tuple({"rows": rows, "heads": heads, "width": width, "pairs": pairs, "inverse": inverse} | gap
              for rows, heads, width, pairs, inverse, gap in (
                  (0, 3, 24, 4, 0, {}), (1, 0, 64, 32, 0, {}), (3, 5, 24, 4, 0, {}), (3, 5, 24, 4, 1, {}),
                  (17, 0, 40, 20, 1, {}), (65, 2, 16, 3, 0, {}), (4, 3, 48, 8, 0, {"gap": 6}),
                  (5, 1, 512, 32, 1, {}), (2, 3, 2, 1, 0, {})))
FROZEN = tuple({"rows": rows, "heads": heads, "width": width, "pairs": 32, "inverse": inverse}
               for heads, width, inverse in ((64, 512, 0), (64, 512, 1), (0, 512, 0), (32, 128, 0))
               for rows in (1, 32, 128, 512, 4096))


def _rotate(shape: Shape, maker: Maker) -> tuple:
    rows, width, gap = shape["rows"], shape["width"], shape.get("gap", 0)
    heads = (shape["heads"],) if shape["heads"] else ()
    x = maker.normal(rows, *heads, width + gap)[..., :width]
    angle = maker.uniform(rows, shape["pairs"], high=2 * math.pi)
    return x, torch.polar(torch.ones_like(angle), angle), bool(shape["inverse"])


CASES = [
    Cases("rope.rotate", _rotate, "E", EDGES, FROZEN,
          nbytes=lambda s: s["rows"] * (4 * max(1, s["heads"]) * s["width"] + 8 * s["pairs"]),
          flop=lambda s: 6 * s["rows"] * max(1, s["heads"]) * s["pairs"], grads=(0,)),
]
