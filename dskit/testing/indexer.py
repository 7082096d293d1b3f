"""Cases of the ops in layers/indexer.py.

Shapes: rows and width of a transform.
    rows of the batch, the requests, `each` with so many of its own, heads, entries; `seen` entries that the
    last row of the first request sees, fewer in each further request and in each row before; `spread` binades
    between the scales of groups, of keys on both sides of 1, and up to 10 of queries; `tile` 1: with
    row_tile; `wide` 1: float32; `among` blocks of 8 entries to which each row keeps, some of them missing;
    `run` 1: any rows of the pool instead of pages.
    Selection: k of rows x entries, or `count` blocks of `size`; grain g: scores in steps of 1 / g, so that
    many are equal; masked: so many thousandths are minus infinity; flat 1: all scores are equal.
Errors: none of its own.
Source: kernels.md 0.2, 1.5.
"""

from __future__ import annotations

import torch

from dskit.layers.cache import Packing
from dskit.testing import Cases, Maker, Shape

PACKING = Packing(128, "fp4_32", 0, torch.bfloat16)
SIZE = 8  # entries of a block
PAGE = 64  # neighbouring rows of the pool
POOL = 1 << 16  # keys that are drawn; a larger pool repeats them


# ---- scores ------------------------------------------------------------------------------------------------

def _case(rows: int, each: int, heads: int, entries: int, seen: int | None = None, spread: int = 2,
          tile: int = 0, wide: int = 0, among: int = 0) -> Shape:
    return {"rows": rows, "each": each, "heads": heads, "entries": entries,
            "seen": entries if seen is None else seen, "spread": spread, "tile": tile, "wide": wide,
            "among": among}


SCORES = (_case(1, 0, 32, 9), _case(1, 1, 32, 0), _case(1, 1, 32, 1, wide=1), _case(2, 1, 32, 390),
          _case(1, 1, 32, 300, seen=128), _case(1, 1, 16, 200, seen=0), _case(2, 3, 32, 65, wide=1),
          _case(1, 5, 16, 129, seen=3, wide=1), _case(1, 2, 64, 66, spread=60),
          _case(1, 2, 32, 140, tile=16), _case(1, 2, 32, 300, seen=260, among=20),
          _case(2, 1, 32, 130) | {"run": 1})
RELEASED = (*(_case(rows, 1, 32, 65536) for rows in (1, 32, 128)), _case(128, 1, 32, 131_072),
            _case(32, 6, 32, 65536), _case(1, 512, 32, 65536), _case(32, 1, 64, 65536),
            *(_case(rows, 1, 32, 65536, among=2048) for rows in (1, 32, 128)),
            _case(1, 512, 32, 65536, among=2048))


def _scores(shape: Shape, maker: Maker) -> tuple:
    """Rounded queries and random bytes whose pool rows lie in pages, in any order."""
    B, Q, X, S = (shape[name] for name in ("rows", "each", "heads", "entries"))
    spread = shape["spread"]
    size = 2.0 ** maker.integers(min(spread, 10) + 1, B, Q, X, 4, 1).float()
    q = PACKING.round((maker.normal(B, Q, X, 4, 32, dtype=torch.float32) * size).flatten(-2).bfloat16())
    weight = maker.normal(B, Q, X, dtype=torch.float32 if shape["wide"] else torch.bfloat16)
    pages = -(-S // PAGE)
    drawn = maker.integers(256, min(POOL, (B * pages + 1) * PAGE), PACKING.nbytes, dtype=torch.uint8)
    drawn[:, 64:] = 127 - spread + drawn[:, 64:] % (2 * spread + 1)
    pool = drawn.repeat(-(-(B * pages + 1) * PAGE // len(drawn)), 1)
    page = maker.distinct(B * pages, B * pages).unflatten(0, (B, pages)) + 1
    table = (page[..., None] * PAGE + torch.arange(PAGE, device=page.device)).flatten(1)[:, :S].contiguous()
    if (run := shape.get("run", PAGE)) == 1:
        table = maker.distinct(len(pool), B * S).view(B, S)
    back = (7 * torch.arange(B)[:, None] + torch.arange(Q).flip(0)).to(maker.device)
    return (q, weight, pool, table, (shape["seen"] - back).clamp(min=0), PACKING, torch.bfloat16,
            16 if shape["tile"] else None, _among(shape, maker) if shape["among"] else None, SIZE, run)


def _among(shape: Shape, maker: Maker) -> torch.Tensor:
    """Different blocks of each row, ascending, every ninth missing."""
    B, Q, C = shape["rows"], shape["each"], shape["among"]
    room = -(-shape["entries"] // SIZE) // C  # blocks from which one is taken
    block = maker.integers(room, B, Q, C) + room * torch.arange(C, device=maker.device)
    block[..., 8::9] = -1
    return block


def _scored(shape: Shape) -> int:
    """Scores of a row."""
    return shape["among"] * SIZE or shape["entries"]


def _score_bytes(shape: Shape) -> int:
    """Keys once, those of blocks once a row; queries and weights, scores written."""
    B, rows, held = shape["rows"], shape["rows"] * shape["each"], 4 if shape["wide"] else 2
    return ((rows if shape["among"] else B) * _scored(shape) * PACKING.nbytes
            + rows * (shape["heads"] * (2 * PACKING.width + held) + held * _scored(shape)))


# ---- selection ---------------------------------------------------------------------------------------------

def _pick(rows: int, entries: int, k: int, masked: int = 0, grain: int = 0, flat: int = 0, wide: int = 0,
          size: int = 0) -> Shape:
    return {"rows": rows, "entries": entries, "k": k, "masked": masked, "grain": grain, "flat": flat,
            "wide": wide} | ({"size": size} if size else {})


TOPS = (_pick(0, 5, 2), _pick(1, 0, 3), _pick(2, 1, 1), _pick(2, 7, 9), _pick(3, 60, 16), _pick(2, 64, 64),
        _pick(2, 65, 16, masked=900), _pick(2, 300, 17, wide=1), _pick(1, 301, 20, flat=1),
        _pick(2, 1000, 33, grain=1), _pick(2, 1000, 33, grain=1, wide=1), _pick(2, 257, 40, masked=1000),
        _pick(1, 700, 50, masked=960, grain=2))
TOPS_RELEASED = (*(_pick(rows, 65536, 512) for rows in (1, 32, 128, 4096)), _pick(128, 65536, 512, grain=4),
                 *(_pick(rows, 131_072, 512) for rows in (32, 128)), _pick(128, 16384, 512),
                 _pick(128, 65536, 512, masked=1000), _pick(1, 1_048_576, 512))
BLOCKS = (_pick(0, 5, 2, size=8), _pick(2, 1, 1, size=8), _pick(2, 61, 3, size=8), _pick(3, 203, 9, size=5),
          _pick(2, 700, 11, size=4, grain=1), _pick(2, 640, 20, size=8, masked=1000, wide=1),
          _pick(1, 100, 40, size=8, flat=1))
BLOCKS_RELEASED = tuple(_pick(rows, entries, 2048, size=8) for rows, entries in
                        ((1, 65536), (32, 131_072), (128, 65536), (128, 131_072), (1, 1_048_576)))


def _values(shape: Shape, maker: Maker) -> torch.Tensor:
    rows, entries = shape["rows"], shape["entries"]
    score = maker.normal(1, rows, entries, scale=0 if shape["flat"] else 3,
                         dtype=torch.float32 if shape["wide"] else torch.bfloat16)
    if shape["grain"]:
        score = (score * shape["grain"]).round() / shape["grain"]
    if shape["masked"]:
        score = score.masked_fill(maker.uniform(1, rows, entries) < shape["masked"] / 1000, float("-inf"))
    return score


def _topk(shape: Shape, maker: Maker) -> tuple:
    return _values(shape, maker), shape["k"]


def _blocks(shape: Shape, maker: Maker) -> tuple:
    """Rows that see from nothing to everything, minus infinity beyond."""
    rows, entries = shape["rows"], shape["entries"]
    visible = (torch.arange(1, rows + 1).flip(0)[None] * entries // max(rows, 1)).to(maker.device)
    visible[:, 1:2] = 0
    score = _values(shape, maker)
    hidden = torch.arange(entries, device=maker.device) >= visible[..., None]
    return score.masked_fill(hidden, float("-inf")), visible, shape["size"], shape["k"]


def _read(shape: Shape) -> int:
    return shape["rows"] * shape["entries"] * (4 if shape["wide"] else 2)


def _spread(shape: Shape, maker: Maker) -> tuple:
    return (maker.normal(shape["rows"], shape["width"]),)


CASES = [
    Cases("indexer.hadamard", _spread, "G",
          tuple({"rows": rows, "width": width} for rows, width in ((0, 32), (1, 16), (19, 64), (70, 128))),
          tuple({"rows": 64 * tokens, "width": 128} for tokens in (1, 32, 128, 4096)), peak="bf16",
          nbytes=lambda s: 4 * s["rows"] * s["width"], flop=lambda s: 2 * s["rows"] * s["width"] ** 2),
    Cases("indexer.scores_cached", _scores, "G", SCORES, RELEASED, nbytes=_score_bytes,
          flop=lambda s: 256 * s["rows"] * s["each"] * s["heads"] * _scored(s), peak="fp8"),
    Cases("indexer.topk", _topk, "X", TOPS, TOPS_RELEASED, nbytes=lambda s: _read(s) + 8 * s["rows"] * s["k"],
          flop=lambda s: s["rows"] * s["entries"], rounds=True),
    Cases("indexer.blocks", _blocks, "X", BLOCKS, BLOCKS_RELEASED,
          nbytes=lambda s: _read(s) + 8 * s["rows"] * s["k"], flop=lambda s: s["rows"] * s["entries"],
          rounds=True),
]
