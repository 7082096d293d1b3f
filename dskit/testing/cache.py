"""Cases of the ops in layers/cache.py.

Shapes: rows, `heads` to a row (1 where there are none), width; `bits` and `group` of the codes, `tail`
channels left in bfloat16, `turned` channels that are rotated; 1 or 0: `norm` there is a gain, `keep` the
normed vector too, `packed` bytes or numbers; `count` rows to read, of a cache of `rows`, `wide` as float32.
Errors: none of its own.
Source: kernels.md 0.2, 1.1.
"""

from __future__ import annotations

import torch

from dskit.layers.cache import Packing
from dskit.testing import Cases, Maker, Shape

KINDS = {"window": {"width": 512, "bits": 8, "group": 32, "turned": 64, "norm": 1},
         "entry": {"width": 512, "bits": 4, "group": 16, "turned": 64, "norm": 1, "keep": 1},
         "key": {"width": 128, "bits": 4, "group": 32, "turned": 64, "norm": 1},
         "query": {"width": 128, "bits": 4, "group": 32, "turned": 64, "heads": 32},
         "v4": {"width": 512, "bits": 8, "group": 64, "turned": 64, "norm": 1, "tail": 64}}
SMALL = ({"width": 32, "bits": 8, "group": 32, "turned": 6, "norm": 1},
         {"width": 96, "bits": 4, "group": 16, "turned": 20, "norm": 1, "keep": 1},
         {"width": 40, "bits": 4, "group": 32, "turned": 14},
         {"width": 34, "bits": 8, "group": 32, "norm": 1},
         {"width": 96, "bits": 8, "group": 64, "turned": 20, "norm": 1, "tail": 20},
         {"width": 32, "bits": 4, "group": 32, "turned": 14, "heads": 3})
ROWS = (1, 32, 128, 512, 4096)


def _shapes(*parts: tuple[tuple[int, ...], Shape]) -> tuple[Shape, ...]:
    return tuple({"rows": rows} | kind for counts, kind in parts for rows in counts)


WRITES = _shapes(((0, 1, 17), SMALL[0]), *(((5,), kind) for kind in SMALL[1:-1]), ((3,), KINDS["window"]),
                 ((2,), KINDS["entry"]))
READIES = _shapes(*(((5,), kind | {"packed": packed}) for kind in SMALL for packed in (0, 1)),
                  ((0, 17), SMALL[1] | {"packed": 1}))
READS = tuple({"rows": 9, "count": count, "wide": i % 2} | kind
              for i, (count, kind) in enumerate(zip((0, 1, 33, 5, 40, 3), SMALL, strict=True)))


def _packing(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> Packing:
    return Packing(shape["width"], f"fp{shape['bits']}_{shape['group']}", shape.get("tail", 0), dtype)


def _vectors(shape: Shape, maker: Maker) -> tuple:
    """(v, gain, eps, turn) with zeros and a row of them."""
    rows, width, heads = shape["rows"], shape["width"], shape.get("heads", 1)
    v = maker.normal(rows, *([heads] if heads > 1 else []), width)
    v[..., 1::7], v[2:3] = 0, 0
    gain = maker.normal(width, dtype=torch.float32, scale=0.2) + 1 if shape.get("norm") else None
    return v, gain, 1e-20, _turn(shape, maker) if shape.get("turned") else None


def _turn(shape: Shape, maker: Maker) -> torch.Tensor:
    """Any turns, but quarters for many rows of e4m3 and bfloat16.

    Among so many the norm rounds some channel the other way, one step of it, and where the two of a pair all
    but cancel, that is many steps of what is left.
    """
    rows, pairs = shape["rows"], shape["turned"] // 2
    if shape["bits"] == 8 and rows >= 4096:
        quarter = maker.integers(4, rows, pairs)
        circle = torch.tensor([1, 1j, -1, -1j], dtype=torch.complex64, device=quarter.device)
        return circle[quarter]
    angle = maker.uniform(rows, pairs, high=6.283)
    return torch.polar(torch.ones_like(angle), angle)


def _ready(shape: Shape, maker: Maker) -> tuple:
    return *_vectors(shape, maker), _packing(shape), bool(shape.get("packed", 1)), bool(shape.get("keep"))


def _write(shape: Shape, maker: Maker) -> tuple:
    """Rows to scattered slots of a cache with other bytes in it; every fifth goes nowhere."""
    rows, packing = shape["rows"], _packing(shape)
    held = maker.integers(256, 2 * rows + 3, packing.nbytes, dtype=torch.uint8)
    slots = 1 + maker.distinct(2 * rows + 2, rows)  # row 0 is reserved
    slots[4::5] = -1
    return held, *_vectors(shape, maker), slots, packing, bool(shape.get("keep"))


def _read(shape: Shape, maker: Maker) -> tuple:
    """Rows of a cache whose row 0 is zero, as the reserved one is; some are -1."""
    packing = _packing(shape)
    size = shape["rows"], packing.nbytes
    held = maker.integers(0x70, *size, dtype=torch.uint8) + 0x80 * maker.integers(2, *size, dtype=torch.uint8)
    held[0] = 0  # no byte is 0x7F or 0xFF: no NaN
    rows = maker.integers(shape["rows"], shape["count"])
    rows[1::6] = -1
    return held, rows, packing, torch.float32 if shape.get("wide") else torch.bfloat16


def _vectors_of(shape: Shape) -> int:
    return shape["rows"] * shape.get("heads", 1)


def _made_bytes(shape: Shape) -> int:
    """Values read, rows written, the normed vector where it is kept, turns and slots."""
    held = _packing(shape).nbytes if shape.get("packed", 1) else 2 * shape["width"]
    values = 2 * shape["width"] * (2 if shape.get("keep") else 1)
    return _vectors_of(shape) * (values + held) + shape["rows"] * (4 * shape.get("turned", 0) + 8)


CASES = [
    Cases("cache.ready", _ready, "QE", READIES,
          _shapes((ROWS, KINDS["query"] | {"packed": 0}), (ROWS, KINDS["query"]), (ROWS, KINDS["window"])),
          nbytes=_made_bytes, flop=lambda s: 12 * _vectors_of(s) * s["width"], rounds=True),
    Cases("cache.write_", _write, "QE", WRITES,
          _shapes(*(((*ROWS, 32768), KINDS[kind]) for kind in ("window", "entry", "key", "v4"))),
          nbytes=_made_bytes, flop=lambda s: 14 * _vectors_of(s) * s["width"], rounds=True),
    Cases("cache.read", _read, "X", READS,
          tuple({"rows": 65536, "count": count} | KINDS[kind] for kind in ("window", "entry", "key", "v4")
                for count in (*ROWS, 81920)),
          nbytes=lambda s: s["count"] * (_packing(s).nbytes + 2 * s["width"] + 8),
          flop=lambda s: 2 * s["count"] * s["width"], rounds=True),
]
