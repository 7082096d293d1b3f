"""Cases of the ops in layers/mla.py.

Shapes: rows; `heads` of `width` channels, of which the last `turned` are rotated; `window` and `chosen` rows
to read each, `seen` and `fits` of them real where that is fewer, out of caches of `size` rows; 1 or 0: `v4`
the other family's entries, `numbers` caches that hold bfloat16, `sinks` infinite ones.
Errors: none of its own.
Source: kernels.md 1.3; model.md 5.1.
"""

from __future__ import annotations

import torch

from dskit.layers.cache import Packing
from dskit.layers.rope import turns
from dskit.testing import Cases, Maker, Shape

SMALL = {"heads": 5, "width": 64, "turned": 20, "window": 9, "chosen": 40, "size": 50}
WINDOW = {"heads": 3, "width": 32, "turned": 10, "window": 40, "size": 90}
V4 = {"v4": 1, "heads": 2, "width": 160, "turned": 32, "window": 9, "chosen": 20, "size": 50}
REAL = {"heads": 64, "width": 512, "turned": 64, "window": 128, "size": 65536}
ROWS = (1, 32, 128, 256, 4096)
EDGES = (*({"rows": rows} | SMALL for rows in (0, 1, 2)),
         *({"rows": 1, "seen": seen, "fits": fits} | SMALL for seen, fits in ((0, 0), (1, 0), (1, 1))),
         {"rows": 1, "fits": 33, "sinks": 1} | SMALL, {"rows": 1, "numbers": 1} | SMALL,
         {"rows": 2, "seen": 32} | WINDOW, {"rows": 1, "seen": 33} | WINDOW, {"rows": 1} | V4,
         {"rows": 1} | V4 | {"chosen": 0},
         {"rows": 1, "heads": 70, "width": 512, "turned": 64, "window": 3, "chosen": 16, "size": 40})
LAID = {"numbers": 1, "heads": 3, "width": 32, "turned": 10, "window": 9, "chosen": 70, "size": 90}
EDGES += (*({"rows": 5, "seen": s, "fits": f} | LAID for s, f in ((9, 70), (0, 65), (9, 0), (0, 0))),
          {"rows": 5, "sinks": 1} | LAID | {"chosen": 0, "window": 70},
          {"rows": 3} | LAID | {"heads": 70, "width": 160, "chosen": 16})
FROZEN = tuple({"rows": rows} | REAL | kind for kind in ({"chosen": 512}, {}, {"chosen": 512, "v4": 1})
               for rows in ROWS) + ({"rows": 4096, "chosen": 512, "numbers": 1} | REAL,)


def packings(shape: Shape) -> tuple[Packing, Packing]:
    """Of the window and of the entries."""
    width = shape["width"]
    if shape.get("v4"):
        both = Packing(width, "fp8_64", shape["turned"], torch.bfloat16)
        return both, both
    return Packing(width, "fp8_32", 0, torch.bfloat16), Packing(width, "fp4_16", 0, torch.bfloat16)


def _cache(shape: Shape, maker: Maker, packing: Packing) -> torch.Tensor:
    """Normal rows of different sizes behind the reserved one, packed in pieces that a CPU holds."""
    rows = maker.normal(min(shape["size"], 4096), shape["width"]) * maker.uniform(1, 1, low=0.5, high=2.0)
    rows[0] = 0
    held = packing.round(rows) if shape.get("numbers") else packing.pack(rows)
    return torch.cat([held] * (shape["size"] // len(held)))


def _index(shape: Shape, maker: Maker, width: int, real: int) -> torch.Tensor:
    """Rows to read, -1 behind the real ones and now and then between."""
    index = maker.integers(shape["size"], shape["rows"], width, low=1)
    index[:, 5:-1:7] = -1
    index[:, real:] = -1
    return index


def _attend(shape: Shape, maker: Maker) -> tuple:
    rows, heads, width, W, K = (shape.get(name, 0) for name in ("rows", "heads", "width", "window", "chosen"))
    formats = packings(shape)
    q = maker.normal(rows, heads, width) * maker.uniform(rows, heads, 1, low=0.2, high=1.5).bfloat16()
    position = maker.integers(1 << 20, rows)
    frequency = 10000.0 ** -(torch.arange(shape["turned"] // 2, device=q.device) / (shape["turned"] // 2))
    sink = maker.normal(heads, dtype=torch.float32)
    if shape.get("sinks"):
        sink[0], sink[1] = float("inf"), float("-inf")
    window, read = _cache(shape, maker, formats[0]), _index(shape, maker, W, shape.get("seen", W))
    entries = _cache(shape, maker, formats[1]) if K else None
    chosen = _index(shape, maker, K, shape.get("fits", K)) if K else None
    return (q, turns(position, frequency), window, read.flip(1), entries, chosen, sink, torch.bfloat16,
            formats)  # a young window has its -1 first


def _bytes(shape: Shape) -> int:
    """Queries and outputs, rows that are read with their indices, turns."""
    window, entry = (2 * p.width if shape.get("numbers") else p.nbytes for p in packings(shape))
    read = shape["window"] * (window + 8) + shape.get("chosen", 0) * (entry + 8)
    return shape["rows"] * (4 * shape["heads"] * shape["width"] + read + 4 * shape["turned"])


def _flop(shape: Shape) -> int:
    return 4 * shape["rows"] * shape["heads"] * shape["width"] * (shape["window"] + shape.get("chosen", 0))


CASES = [Cases("mla.attend_cached", _attend, "A", EDGES, FROZEN, nbytes=_bytes, flop=_flop, peak="bf16")]
