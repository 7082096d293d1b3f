"""Cases of the ops in layers/compress.py.

Shapes: rows, channels, features of a product; `ratio`: with what places in a group of so many add (0:
    without); groups, `members` of each, width; `roles` 2 where members are twice as wide.
Errors: none of its own.
Source: kernels.md 1.4.
"""

from __future__ import annotations

import torch

from dskit.testing import Cases, Maker, Shape

SIZES = ((0, 2, 32, 1), (1, 2, 40, 1), (17, 2, 32, 1), (5, 8, 24, 2), (3, 16, 33, 1))
EDGES = tuple(dict(zip(("groups", "members", "width", "roles"), size, strict=True)) for size in SIZES)
FROZEN = tuple({"groups": groups, "members": 2, "width": 512, "roles": 1}
               for groups in (1, 32, 128, 512, 4096))
V4 = tuple({"groups": groups, "members": members, "width": width, "roles": roles}
           for members, width, roles in ((8, 512, 2), (8, 128, 2), (128, 512, 1)) for groups in (1, 32, 1024))


def _pool(shape: Shape, maker: Maker) -> tuple:
    """Groups that lie anywhere; the first of several members is absent from the first group."""
    groups, members, width, roles = (shape[name] for name in ("groups", "members", "width", "roles"))
    rows = groups * members + 3
    read = maker.distinct(rows, groups * members).view(groups, members)
    read[:1, : members - 1 : 3] = -1
    return maker.normal(rows, 2, roles * width, dtype=torch.float32, scale=2.0), read, width, torch.bfloat16


PROJECT = ("rows", "channels", "features", "ratio")
PRODUCTS = tuple(dict(zip(PROJECT, size, strict=True)) for size in (
    (0, 64, 32, 2), (1, 40, 16, 0), (3, 96, 33, 4), (70, 300, 20, 2), (17, 128, 80, 128)))
PRODUCTS_FROZEN = tuple(dict(zip(PROJECT, (rows, *size), strict=True)) for size in
                        ((5120, 512, 0), (4096, 1024, 4), (4096, 256, 4), (4096, 512, 128))
                        for rows in (1, 32, 128, 4096))


def _project(shape: Shape, maker: Maker) -> tuple:
    rows, channels, features, ratio = (shape[name] for name in PROJECT)
    wkv, wgate = (maker.normal(features, channels, dtype=torch.float32, scale=channels**-0.5)
                  for _ in range(2))
    ape = maker.normal(ratio, features, dtype=torch.float32) if ratio else None
    return maker.normal(rows, channels), wkv, wgate, ape, maker.integers(1 << 20, rows)


CASES = [
    Cases("compress.project", _project, "G", PRODUCTS, PRODUCTS_FROZEN, peak="bf16",
          nbytes=lambda s: 8 * s["features"] * (s["channels"] + s["rows"]) + 2 * s["rows"] * s["channels"],
          flop=lambda s: 8 * s["rows"] * s["channels"] * s["features"]),
    Cases("compress.pool", _pool, "E", EDGES, FROZEN + V4,
          nbytes=lambda s: s["groups"] * (s["members"] * (8 * s["width"] + 8) + 2 * s["width"]),
          flop=lambda s: 6 * s["groups"] * s["members"] * s["width"], grads=(0,)),
]
