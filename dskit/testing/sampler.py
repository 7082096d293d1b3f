"""Cases of the op in engine/sampler.py.

Shapes: rows, vocab; top_k; top_p and min_p in thousandths; flat 1: all logits equal; grain g > 0: logits in
    steps of 1 / g, so that many are equal; masked: so many thousandths are minus infinity.  The temperature
    goes with the row: 1, 0.7, 0 (greedy), 2, and again.
Errors: none of its own.
Source: kernels.md 1.9 and 1.10.
"""

from __future__ import annotations

import torch

from dskit.testing import Cases, Maker, Shape

TEMPERATURES = (1.0, 0.7, 0.0, 2.0)


def _shape(rows: int, vocab: int, top_k: int = 0, top_p: int = 1000, min_p: int = 0, flat: int = 0,
           grain: int = 0, masked: int = 0) -> Shape:
    return {"rows": rows, "vocab": vocab, "top_k": top_k, "top_p": top_p, "min_p": min_p, "flat": flat,
            "grain": grain, "masked": masked}


EDGES = (
    _shape(0, 7), _shape(1, 1, top_k=1, top_p=900), _shape(3, 3), _shape(1, 129, top_p=1),
    _shape(2, 65, top_k=5, top_p=999, masked=300), _shape(1, 300, min_p=200, grain=2),
    _shape(1, 260, top_p=730, flat=1), _shape(1, 200, top_k=17, top_p=500, flat=1),
    _shape(1, 1100, top_k=50, top_p=950), _shape(1, 1100, top_p=950),
    _shape(1, 5000, top_k=40, top_p=990, min_p=50, grain=4, masked=100),
)
FROZEN = tuple(_shape(rows, 129_280, top_k=50, top_p=950) for rows in (1, 32, 128))
FROZEN += tuple(_shape(rows, 129_280, top_p=950) for rows in (1, 128)) + (_shape(128, 129_280),)


def _draw(shape: Shape, maker: Maker) -> tuple:
    rows, vocab = shape["rows"], shape["vocab"]
    logits = maker.normal(rows, vocab, dtype=torch.float32, scale=0 if shape["flat"] else 3)
    if shape["grain"]:
        logits = (logits * shape["grain"]).round() / shape["grain"]
    hidden = maker.uniform(rows, vocab) < shape["masked"] / 1000
    hidden[:, -1:] = False
    logits = logits.masked_fill(hidden, float("-inf"))

    def column(value: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=maker.device)

    temperature = torch.tensor(TEMPERATURES, dtype=torch.float64, device=maker.device)
    return (logits, temperature.repeat(rows // 4 + 1)[:rows], column(shape["top_k"], torch.int64),
            column(shape["top_p"] / 1000), column(shape["min_p"] / 1000),
            maker.uniform(rows, dtype=torch.float64))


CASES = [
    Cases("sampler.draw", _draw, "X", EDGES, FROZEN, nbytes=lambda s: 4 * s["rows"] * s["vocab"],
          flop=lambda s: 4 * s["rows"] * s["vocab"], rounds=True),
]
