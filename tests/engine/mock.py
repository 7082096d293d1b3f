"""A runner without a model: logits are a hash of the whole history, and the caches check every read and
write.

It keeps one tag per cached position, under (block, offset), written with the rows that a step computes. A row
may only be computed when the tags of all positions before it are those of its own sequence: wrong blocks, a
block given to two sequences, a slot shared or a row left out are assertion errors, not slightly different
numbers.
"""

import torch

from dskit.engine.config import EngineConfig
from dskit.engine.loop import Engine
from dskit.engine.pools import Blocks, Slots

VOCAB, EOS = 64, 1


def settings(**changes) -> EngineConfig:
    """A small engine: blocks of 4, a pool of 24 of them."""
    base = dict(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, block_size=4, num_blocks=24)
    return EngineConfig(**(base | changes))


def engine(runner=None, **changes) -> Engine:
    """An engine over the mock; letters stand for ids, so that text is easy to read."""
    cfg = settings(**changes)
    return Engine(
        runner or Runner(cfg.block_size),
        cfg,
        Blocks(cfg.num_blocks, cfg.block_size),
        Slots(cfg.max_num_seqs),
        vocab_size=VOCAB,
        eos_ids=[EOS],
        decode=lambda ids: "".join(chr(48 + i) for i in ids),
    )


class Runner:
    """Next-token scores from a polynomial hash of the tokens so far; `spoil` maps a step's number to an
    exception."""

    def __init__(self, block_size: int, spoil=None):
        self.block_size, self.spoil = block_size, spoil or {}
        self.tags, self.slots, self.steps = {}, {}, 0

    def run(self, work):
        self.steps += 1
        if self.steps in self.spoil:
            raise self.spoil[self.steps]
        assert len({w.seq_slot for w in work}) == len(work) and all(w.seq_slot > 0 for w in work)
        rows = [row for w in work for row in self._rows(w)]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def _rows(self, w):
        hashes = [0]
        for token in w.tokens[: w.stop]:
            hashes.append((hashes[-1] * 1000003 + token + 1) % (2**61 - 1))
        assert w.start == 0 or self.slots[w.seq_slot] == hashes[w.start]
        where = [(w.blocks[p // self.block_size], p % self.block_size) for p in range(w.stop)]
        assert all(self.tags[at] == h for at, h in zip(where[: w.start], hashes[1:], strict=False))
        self.tags |= dict(zip(where[w.start :], hashes[w.start + 1 :], strict=True))
        self.slots[w.seq_slot] = hashes[w.stop]
        first = {"last": w.stop - 1, "all": w.start, "none": w.stop}[w.want]
        return [scores(h) for h in hashes[first + 1 :]]


TABLE = torch.randn(997, VOCAB, generator=torch.Generator().manual_seed(0)) * 2


def scores(history: int) -> torch.Tensor:
    """Scores of all tokens, float32, from a hash of the history."""
    return TABLE[history % 997]
