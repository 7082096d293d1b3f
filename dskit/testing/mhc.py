"""Cases of the ops in layers/mhc.py.

Shapes: rows, streams, width, iters; with `held` the streams are bfloat16 values in float32, with `wide`
everything is float32, with `same` all streams are one tensor; without `behind` nothing is to be written,
without `shifted` a sublayer reads with its own weights.
Errors: none of its own.
Source: kernels.md 1.6; model.md 3.6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dskit.testing import Cases, Maker, Shape

EPS, HC_EPS = 1e-20, 1e-6
PLAIN = {"rows": 4, "streams": 4, "width": 40, "iters": 3, "behind": 1, "shifted": 1}
SIZES = ((0, 4, 64), (1, 4, 72), (17, 4, 40), (3, 2, 33), (5, 1, 40), (2, 3, 24), (18, 2, 140))
EDGES = (*(PLAIN | {"rows": rows, "streams": streams, "width": width} for rows, streams, width in SIZES),
         PLAIN | {"held": 1}, PLAIN | {"wide": 1}, PLAIN | {"same": 1})
BOUNDARY = (*EDGES, PLAIN | {"behind": 0, "same": 1}, PLAIN | {"shifted": 0},
            PLAIN | {"behind": 0, "shifted": 0})
SINKHORN = (*EDGES[:6], PLAIN | {"iters": 9}, PLAIN | {"iters": 1})
FROZEN = tuple({"rows": rows, "streams": 4, "width": 5120, "iters": 20, "behind": 1, "shifted": 1}
               for rows in (1, 32, 128, 512, 4096))


def _dtype(shape: Shape) -> torch.dtype:
    return torch.float32 if shape.get("wide") else torch.bfloat16


def _streams(shape: Shape, maker: Maker) -> Tensor:
    """X_TND with rms 1."""
    rows, streams, width = shape["rows"], shape["streams"], shape["width"]
    X = maker.normal(rows, 1 if shape.get("same") else streams, width, dtype=_dtype(shape))
    return (X.float() if shape.get("held") else X).expand(-1, streams, -1)


def _output(shape: Shape, maker: Maker) -> Tensor:
    return maker.normal(shape["rows"], shape["width"], dtype=_dtype(shape))


def _weights(shape: Shape, maker: Maker) -> tuple[Tensor, Tensor, Tensor]:
    """(p, q, C) in steps of 1/32: sums of bfloat16 under them are exact in float32, whatever their order.

    Otherwise some sum would round to the other side in X', and move the weights made from it.
    """
    rows, streams = shape["rows"], shape["streams"]
    sizes = (32, (rows, streams)), (64, (rows, streams)), (32, (rows, streams, streams))
    return tuple(maker.integers(high, *size).float() / 32 for high, size in sizes)


def _parameters(shape: Shape, maker: Maker) -> tuple[Tensor, Tensor, Tensor]:
    """(fn, base, scale), so that the logits are normal."""
    streams, width = shape["streams"], streams_width(shape)
    count = (2 + streams) * streams
    return (maker.normal(count, width, dtype=torch.float32, scale=width**-0.5),
            maker.normal(count, dtype=torch.float32), maker.uniform(3, low=0.5, high=1.5))


def streams_width(shape: Shape) -> int:
    """Channels of a row over all streams."""
    return shape["streams"] * shape["width"]


def _sinkhorn(shape: Shape, maker: Maker) -> tuple:
    streams = shape["streams"]
    B = maker.normal(shape["rows"], streams, streams, dtype=torch.float32, scale=2.0)
    return B, shape["iters"], HC_EPS


def _mixes(shape: Shape, maker: Maker) -> tuple:
    return _streams(shape, maker), *_parameters(shape, maker), EPS, HC_EPS, shape["iters"]


def _read(shape: Shape, maker: Maker) -> tuple:
    return _weights(shape, maker)[0], _streams(shape, maker), _dtype(shape)


def _write(shape: Shape, maker: Maker) -> tuple:
    return _output(shape, maker), _streams(shape, maker), *_weights(shape, maker)[1:], _dtype(shape)


def _boundary(shape: Shape, maker: Maker) -> tuple:
    y, X, (p, q, C) = _output(shape, maker), _streams(shape, maker), _weights(shape, maker)
    y, q, C = (y, q, C) if shape["behind"] else (None, None, None)
    gain = maker.normal(shape["width"], dtype=torch.float32, scale=0.2) + 1
    return (y, X, p if shape["shifted"] else None, q, C, *_parameters(shape, maker), gain, EPS, HC_EPS,
            shape["iters"], _dtype(shape))


def _bytes_of_mixes(s: Shape) -> int:
    return 4 * s["rows"] * s["streams"] ** 2


def _bytes(per_row: int, per_stream: int, parameters: bool = False):
    """Bytes of a pass: channels of a row counted by `per_row` beside and `per_stream` in the streams."""

    def count(s: Shape) -> int:
        fn = 4 * (2 + s["streams"]) * s["streams"] * streams_width(s) if parameters else 0
        return s["rows"] * s["width"] * (per_row + per_stream * s["streams"]) + fn

    return count


def _flop(writes: bool, product: bool, reads: bool):
    def count(s: Shape) -> int:
        N = s["streams"]
        each = writes * 2 * (N + 1) + product * 2 * ((2 + N) * N + 1) + reads * 2
        return s["rows"] * streams_width(s) * each

    return count


CASES = [
    Cases("mhc.sinkhorn", _sinkhorn, "M", SINKHORN, FROZEN, flop=lambda s: s["iters"] * _bytes_of_mixes(s),
          nbytes=lambda s: 2 * _bytes_of_mixes(s), grads=(0,)),
    Cases("mhc.mixes", _mixes, "MMM", EDGES, FROZEN, nbytes=_bytes(0, 2, True), peak="bf16",
          flop=_flop(False, True, False), grads=(0, 1, 2, 3)),
    Cases("mhc.read", _read, "E", EDGES, FROZEN, nbytes=_bytes(2, 2), flop=_flop(False, False, True),
          grads=(0, 1)),
    Cases("mhc.write", _write, "E", EDGES, FROZEN, nbytes=_bytes(2, 4), flop=_flop(True, False, False),
          grads=(0, 1, 2, 3)),
    Cases("mhc.boundary", _boundary, "GGMMM", BOUNDARY, FROZEN, nbytes=_bytes(4, 4, True), peak="bf16",
          flop=_flop(True, True, True), rounds=True, grads=(1, 5, 6, 7, 8)),
]
