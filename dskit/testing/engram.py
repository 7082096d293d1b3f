"""Cases of the ops in layers/engram.py.

Idea
    The largest table holds more rows than offsets of 32 bits reach, a few of them drawn and repeated: what is
    looked up is random, what stands there need not be.

Shapes
    rows (tokens), width D, streams N; columns C of a lookup, table rows, row width Y, longest n-gram Q.

Errors
    None of its own.

Source
    kernels.md 1.7; the released widths are 4 streams of 5120, 3 x 8 hash columns, rows of 256.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dskit.testing import Cases, Maker, Shape

ROWS = (1, 32, 128, 512, 4096)
EPS = 1e-20
DRAWN = 1 << 15  # rows of a large table that differ


def _hash(shape: Shape, maker: Maker) -> tuple:
    T, Q, C = shape["rows"], shape["ngram"], shape["columns"]
    folded = 99_092  # of the release: products with multipliers stay below 2^63
    multiplier = 2 * maker.integers((2**63 - 1) // folded // 2, Q) + 1
    prime = maker.integers(shape["prime"], Q - 1, C, low=shape["prime"] // 2 + 1)
    offset = prime.flatten().cumsum(0).view_as(prime) - prime
    return maker.integers(folded, T, Q), multiplier, prime, offset


def _table(rows: int, width: int, maker: Maker) -> tuple[Tensor, Tensor]:
    """(codes, scales) of a table, both a repetition of its first rows."""
    drawn = min(rows, DRAWN)
    codes = maker.normal(drawn, width, dtype=torch.float8_e4m3fn, scale=20).view(torch.uint8)
    scales = maker.integers(130, drawn, width // 32, low=110, dtype=torch.uint8)
    codes, scales = (part.repeat(rows // drawn, 1) for part in (codes, scales))
    return codes.view(torch.float8_e4m3fn), scales


def _gather(shape: Shape, maker: Maker) -> tuple:
    codes, scales = _table(shape["table"], shape["width"], maker)
    rows = maker.integers(len(codes), shape["rows"], shape["columns"])
    return codes, scales, rows, torch.float32 if shape.get("exact") else torch.bfloat16


def _gather_runs(shape: Shape, maker: Maker) -> tuple:
    codes, scales, rows, dtype = _gather(shape, maker)
    return codes.chunk(shape["runs"]), scales.chunk(shape["runs"]), rows, dtype


def _gate(shape: Shape, maker: Maker) -> tuple:
    T, N, D = shape["rows"], shape["streams"], shape["width"]
    dtype = torch.float32 if shape.get("exact") else torch.bfloat16
    X, kv = maker.normal(T, N, D, dtype=dtype), maker.normal(T, N + 1, D, dtype=dtype)
    kv[:, :-1] += X * (0.2 * maker.integers(2, T, N, 1) - 0.1)  # fits of both signs: near 0 the root is steep
    gains = (maker.normal(N, D, dtype=torch.float32, scale=0.2) + 1 for _ in range(2))
    image = maker.integers(2, T) == 1 if shape.get("image") else None
    if shape.get("zero"):
        X[::2] = 0
    return X, kv[:, :-1], kv[:, -1], *gains, EPS, image


HASH_EDGES = (
    {"rows": 0, "ngram": 4, "columns": 2, "prime": 97}, {"rows": 1, "ngram": 2, "columns": 1, "prime": 97},
    {"rows": 17, "ngram": 4, "columns": 3, "prime": 2**31},
)
GATHER_EDGES = (
    {"rows": 0, "columns": 3, "table": 50, "width": 64}, {"rows": 1, "columns": 3, "table": 50, "width": 32},
    {"rows": 5, "columns": 7, "table": 90, "width": 96},
    {"rows": 3, "columns": 2, "table": 9, "width": 256, "exact": 1},
)
GATHER_FROZEN = tuple({"rows": T, "columns": 24, "table": (9 if T == 4096 else 1) << 20, "width": 256}
                      for T in ROWS)
RUNS_EDGES = (
    {"rows": 0, "columns": 3, "table": 50, "width": 64, "runs": 2},
    {"rows": 1, "columns": 3, "table": 50, "width": 32, "runs": 1},
    {"rows": 9, "columns": 7, "table": 96, "width": 96, "runs": 3},
    {"rows": 30, "columns": 2, "table": 8, "width": 256, "runs": 8, "exact": 1},
)
GATE_EDGES = (
    {"rows": 0, "streams": 4, "width": 64}, {"rows": 1, "streams": 1, "width": 40},
    {"rows": 5, "streams": 4, "width": 96, "image": 1}, {"rows": 3, "streams": 3, "width": 33, "exact": 1},
    {"rows": 2, "streams": 2, "width": 1100, "zero": 1, "exact": 1},
)

CASES = [
    Cases("engram.hash", _hash, "X", HASH_EDGES,
          tuple({"rows": T, "ngram": 4, "columns": 8, "prime": 17_000_000} for T in ROWS),
          nbytes=lambda s: 8 * s["rows"] * (s["ngram"] + (s["ngram"] - 1) * s["columns"]),
          flop=lambda s: 4 * s["rows"] * (s["ngram"] - 1) * s["columns"]),
    Cases("engram.gather", _gather, "X", GATHER_EDGES, GATHER_FROZEN, rounds=True,
          nbytes=lambda s: s["rows"] * s["columns"] * (8 + 3 * s["width"] + s["width"] // 32),
          flop=lambda s: s["rows"] * s["columns"] * s["width"]),
    Cases("engram.gather_runs", _gather_runs, "X", RUNS_EDGES,
          tuple(shape | {"runs": 2} for shape in GATHER_FROZEN), rounds=True,
          nbytes=lambda s: s["rows"] * s["columns"] * (8 + 3 * s["width"] + s["width"] // 32),
          flop=lambda s: s["rows"] * s["columns"] * s["width"]),
    Cases("engram.gate", _gate, "E", GATE_EDGES,
          tuple({"rows": T, "streams": 4, "width": 5120} for T in ROWS), grads=(0, 1, 2, 3, 4),
          nbytes=lambda s: 2 * s["width"] * (s["rows"] * (3 * s["streams"] + 1) + 4 * s["streams"]),
          flop=lambda s: 9 * s["rows"] * s["streams"] * s["width"]),
]
