"""Cases of the products with FP8 weights in layers/linear.py and layers/mla.py.

Shapes: rows T, n and k of the weight; block_n rows and block_k columns share a scale, 32 where not named, and
so do block_k channels of x, which comes as codes if `coded`, else as numbers, as layers give it; `groups`:
each with its k columns of x and its n rows of the weight; `steady`: rows do not see each other.
Errors: none of its own.
Source: kernels.md 1.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dskit import ops
from dskit.testing import Cases, Maker, Shape

CODED, LONG = {"coded": 1}, {"coded": 1, "block_k": 128}
V4 = {"block_n": 128, "block_k": 128}
EDGES = ({"rows": 0, "n": 32, "k": 64}, {"rows": 0, "n": 32, "k": 64} | CODED,
         {"rows": 1, "n": 64, "k": 128}, {"rows": 3, "n": 48, "k": 1056}, {"rows": 17, "n": 33, "k": 144},
         {"rows": 1, "n": 32, "k": 512} | CODED, {"rows": 67, "n": 130, "k": 64},
         {"rows": 5, "n": 40, "k": 72} | CODED, {"rows": 130, "n": 96, "k": 128} | CODED,
         {"rows": 5, "n": 40, "k": 520} | CODED | V4, {"rows": 66, "n": 130, "k": 256} | V4,
         {"rows": 9, "n": 64, "k": 160, "steady": 16}, {"rows": 9, "n": 64, "k": 192, "steady": 16} | CODED,
         {"rows": 260, "n": 48, "k": 128} | LONG, {"rows": 260, "n": 40, "k": 144},
         {"rows": 260, "n": 33, "k": 64} | CODED)
ROWS = (1, 32, 128, 512, 4096)
WIDTHS = ((1792, 5120), (32768, 1280), (5120, 8192), (4608, 5120), (5120, 2304), (25600, 6144))
FROZEN = (*({"rows": rows, "n": n, "k": k} for n, k in WIDTHS for rows in ROWS),
          *({"rows": rows, "n": n, "k": k} | CODED for n, k in WIDTHS[:3] for rows in (1, 32, 128, 4096)),
          *({"rows": rows, "n": n, "k": k} | LONG for n, k in WIDTHS[:3] for rows in (128, 4096)),
          *({"rows": rows, "n": 5120, "k": 8192} | V4 for rows in (128, 4096)))
ALONE = ((1280, 5120), (512, 5120), (2304, 5120), (4096, 1280))  # what layers multiply one by one
ALONE_V4 = ((1024, 4096), (32768, 1024), (512, 4096), (4096, 8192), (2048, 4096), (4096, 2048), (8192, 1024))
TUNED = (*({"rows": rows, "n": n, "k": k} for n, k in ALONE for rows in ROWS),
         *({"rows": rows, "n": n, "k": k} | V4 for n, k in ALONE_V4 for rows in ROWS))
GROUPED_EDGES = ({"rows": 0, "n": 32, "k": 64, "groups": 2}, {"rows": 1, "n": 64, "k": 544, "groups": 2},
                 {"rows": 19, "n": 32, "k": 96, "groups": 3}, {"rows": 70, "n": 160, "k": 64, "groups": 1},
                 {"rows": 4, "n": 128, "k": 256, "groups": 2} | V4,
                 {"rows": 260, "n": 32, "k": 96, "groups": 2})
GROUPED = tuple({"rows": rows, "n": 1024, "k": 4096, "groups": 8} for rows in ROWS)


def _block(shape: Shape) -> tuple[int, int]:
    return shape.get("block_n", 32), shape.get("block_k", 32)


def _weight(shape: Shape, maker: Maker) -> tuple[Tensor, Tensor]:
    """Codes of every size and scales over six binades, around what a weight of this width has."""
    n, k = shape.get("groups", 1) * shape["n"], shape["k"]
    rows, cols = (-(-size // block) for size, block in zip((n, k), _block(shape), strict=True))
    codes = maker.normal(n, k, scale=100.0).clamp(-448, 448).to(torch.float8_e4m3fn)
    middle = 127 - 7 - (k.bit_length() // 2)
    return codes, maker.integers(middle + 3, rows, cols, low=middle - 3, dtype=torch.uint8)


def _fp8(shape: Shape, maker: Maker) -> tuple:
    block, x = _block(shape), maker.normal(shape["rows"], shape["k"])
    x[:, ::9] *= 64.0  # groups without and with a large value
    if block[1] > block[0]:  # the release's rounding, its scales then shared
        x = ops.find("linear.quantize").reference(x, f"fp8_{block[0]}", torch.bfloat16)
    fmt, scales = f"fp8_{block[1]}", None
    if shape.get("coded"):
        x, scales = ops.find("linear.encode").reference(x, fmt)
    else:
        x = ops.find("linear.quantize").reference(x, fmt, torch.bfloat16)
    held = torch.bfloat16
    return x, scales, *_weight(shape, maker), block, torch.bfloat16, held, shape.get("steady")


def _project(shape: Shape, maker: Maker) -> tuple:
    groups = shape["groups"]
    o = maker.normal(shape["rows"], 2 * groups, shape["k"] // 2)
    return o, *_weight(shape, maker), _block(shape), groups, torch.bfloat16, torch.bfloat16


def _weights(shape: Shape) -> int:
    return shape.get("groups", 1) * shape["n"] * shape["k"]


def _fp8_bytes(shape: Shape) -> int:
    wide = shape["k"] * (1 if shape.get("coded") else 2)
    return _weights(shape) + shape["rows"] * (wide + 2 * shape["n"])


def _project_bytes(shape: Shape) -> int:
    return _weights(shape) + 2 * shape["rows"] * shape["groups"] * (shape["k"] + shape["n"])


def _flop(shape: Shape) -> int:
    return 2 * shape["rows"] * _weights(shape)


CASES = [
    Cases("gemm.fp8", _fp8, "G", EDGES, FROZEN, TUNED, nbytes=_fp8_bytes, flop=_flop, peak="fp8"),
    Cases("gemm.project", _project, "G", GROUPED_EDGES, GROUPED, nbytes=_project_bytes, flop=_flop,
          peak="bf16"),
]
