"""Cases of the ops in layers/dspark.py.

Shapes: rows, vocab, rank (markov; wide 1: float32 weights); requests, drafts, width, rank (confidence);
    requests, drafts, vocab (accept).  spread: by how many thousandths of the target's the draft's logits are
    off (0: they are equal, and all drafts hold); apart 1: the target forbids what was drafted, and none does;
    ragged 1: not all drafts are verified; masked: so many thousandths are minus infinity.  The temperature
    goes with the request: 1, 0 (greedy), 0.7, and again.
Errors: none of its own.
Source: kernels.md 1.9 and 1.10; dspark.md 3.3.
"""

from __future__ import annotations

import torch

from dskit.testing import Cases, Maker, Shape

TEMPERATURES = (1.0, 0.0, 0.7)
VOCAB, RANK, WIDTH, DRAFTS = 129_280, 256, 5120, 5
ROWS = (1, 32, 128)


def _markov_shape(rows: int, vocab: int, rank: int, wide: int = 0) -> Shape:
    return {"rows": rows, "vocab": vocab, "rank": rank, "wide": wide}


def _markov(shape: Shape, maker: Maker) -> tuple:
    rows, vocab, rank = shape["rows"], shape["vocab"], shape["rank"]
    dtype = torch.float32 if shape["wide"] else torch.bfloat16
    base = maker.normal(rows, 2, vocab, dtype=torch.float32, scale=3)[:, 1]  # one position of a block
    head = maker.normal(vocab, rank, dtype=dtype, scale=rank**-0.5)
    return base, maker.normal(rows, rank, dtype=dtype), head


def _confidence_shape(requests: int, drafts: int, width: int, rank: int) -> Shape:
    return {"requests": requests, "drafts": drafts, "width": width, "rank": rank}


def _confidence(shape: Shape, maker: Maker) -> tuple:
    rows, width, rank = (shape["requests"], shape["drafts"]), shape["width"], shape["rank"]
    proj = maker.normal(1, width + rank, dtype=torch.float32, scale=width**-0.5)
    return maker.normal(*rows, width), maker.normal(*rows, rank), proj


def _accept_shape(requests: int, drafts: int, vocab: int, spread: int = 500, apart: int = 0, ragged: int = 0,
                  masked: int = 0) -> Shape:
    return {"requests": requests, "drafts": drafts, "vocab": vocab, "spread": spread, "apart": apart,
            "ragged": ragged, "masked": masked}


def _accept(shape: Shape, maker: Maker) -> tuple:
    requests, drafts, vocab = shape["requests"], shape["drafts"], shape["vocab"]
    target = maker.normal(requests, drafts + 1, vocab, dtype=torch.float32, scale=2)
    off = maker.normal(requests, drafts, vocab, dtype=torch.float32, scale=shape["spread"] / 500)
    hidden = maker.uniform(requests, drafts, vocab) < shape["masked"] / 1000
    hidden[..., -1:] = False
    draft = (target[:, :-1] + off).masked_fill(hidden, float("-inf"))
    temperature = torch.tensor(TEMPERATURES, dtype=torch.float64, device=maker.device)
    temperature = temperature.repeat(requests // len(TEMPERATURES) + 1)[:requests]
    gumbel = -(-maker.uniform(requests, drafts, vocab, low=1e-6).log()).log()
    token = (draft / temperature.float().clamp_min(1e-3)[:, None, None] + gumbel).argmax(-1)
    if shape["apart"]:
        target[:, :-1].scatter_(-1, token[..., None], float("-inf"))
    length = torch.full((requests,), drafts, device=maker.device)
    if shape["ragged"]:
        length = maker.integers(drafts + 1, requests)
    first = torch.arange(requests, device=maker.device).flip(0) * (drafts + 1)
    packed = target.flip(0).flatten(0, 1)  # the requests' rows in another order than the requests
    return packed, draft, token, first, length, temperature, maker.uniform(requests, drafts + 1,
                                                                           dtype=torch.float64)


CASES = [
    Cases("dspark.markov", _markov, "G",
          tuple(_markov_shape(*sizes) for sizes in ((0, 40, 8), (1, 1, 8), (3, 257, 8), (17, 130, 70),
                                                    (33, 60, 16, 1), (130, 33, 16))),
          tuple(_markov_shape(rows, VOCAB, RANK) for rows in ROWS), peak="bf16",
          nbytes=lambda s: 2 * s["rank"] * (s["vocab"] + s["rows"]) + 8 * s["rows"] * s["vocab"],
          flop=lambda s: 2 * s["rank"] * s["rows"] * s["vocab"], grads=(0, 1, 2)),
    Cases("dspark.confidence", _confidence, "G",
          tuple(_confidence_shape(*sizes) for sizes in ((0, 5, 40, 8), (1, 1, 33, 7), (2, 5, 96, 16),
                                                        (1, 3, 2050, 8))),
          tuple(_confidence_shape(rows, DRAFTS, WIDTH, RANK) for rows in ROWS),
          nbytes=lambda s: (2 * s["requests"] * s["drafts"] + 4) * (s["width"] + s["rank"]),
          flop=lambda s: 2 * s["requests"] * s["drafts"] * (s["width"] + s["rank"]), grads=(0, 1, 2)),
    Cases("dspark.accept", _accept, "XX",
          (_accept_shape(0, 2, 7), _accept_shape(1, 1, 1), _accept_shape(2, 3, 2), _accept_shape(3, 5, 33, 0),
           _accept_shape(3, 2, 40, apart=1), _accept_shape(4, 3, 9, ragged=1), _accept_shape(3, 4, 65, 900),
           _accept_shape(2, 2, 50, 300, masked=400), _accept_shape(2, 2, 9001, 700)),
          tuple(_accept_shape(rows, DRAFTS, VOCAB) for rows in ROWS), rounds=True,
          nbytes=lambda s: 4 * s["requests"] * (2 * s["drafts"] + 1) * s["vocab"],
          flop=lambda s: 4 * s["requests"] * (2 * s["drafts"] + 1) * s["vocab"]),
]
