"""A runner without a model: logits are a hash of the whole history, and the caches check every read and
write.

It keeps one tag per cached position, under (block, offset), and one per row of a slot's window ring, written
with the rows that a step computes. A row may only be computed when the tags of all positions before it, and
of those inside its window, are those of its own history: wrong blocks, a block given to two sequences, a slot
shared, a stale window or a row left out are assertion errors, not slightly different numbers.
"""

import torch

from dskit.engine.config import EngineConfig
from dskit.engine.loop import Engine
from dskit.engine.pools import Blocks, Slots

VOCAB, EOS = 64, 1
WINDOW, RING = 6, 12


def settings(**changes) -> EngineConfig:
    """A small engine: blocks of 4, a pool of 24 of them, windows of 6."""
    base = dict(
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        block_size=4,
        num_blocks=24,
        keep_tokens=WINDOW + 12,
        replay_tokens=WINDOW,
        num_snapshots=6,
        sliding_window=WINDOW,
        canary="raise",
    )
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

    device = torch.device("cpu")

    def __init__(self, block_size: int, spoil=None):
        self.block_size, self.spoil = block_size, spoil or {}
        self.tags: dict[tuple[int, int], int] = {}
        self.rings: dict[int, dict[int, int]] = {}
        self.newest: dict[int, int] = {}
        self.steps = self.computed = 0

    asynchronous = False

    def publish(self, slots, ids):
        self.newest |= dict(zip(slots, ids.tolist(), strict=True))

    def run(self, work, copies):
        self.steps += 1
        if self.steps in self.spoil:
            raise self.spoil[self.steps]
        assert len({w.seq_slot for w in work}) == len(work) and all(w.seq_slot > 0 for w in work)
        self._copy(copies)
        rows = [row for w in work for row in self._rows(w)]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def _copy(self, copies):
        self.rings |= {t: dict(self.rings.get(s, {})) for t, s in copies.slots.items()}
        offsets = range(self.block_size)
        self.tags |= {(t, o): self.tags.get((s, o)) for t, s in copies.blocks.items() for o in offsets}
        for slot in copies.wipe_slots:
            self.rings.pop(slot, None)
        self.tags |= {(b, o): None for b in copies.wipe_blocks for o in offsets}

    def _rows(self, w):
        tokens = w.tokens[: w.stop - w.unknown] + ([self.newest.pop(w.seq_slot)] if w.unknown else [])
        hashes = [0]
        for token in tokens:
            hashes.append((hashes[-1] * 1000003 + token + 1) % (2**61 - 1))
        where = [(w.blocks[p // self.block_size], p % self.block_size) for p in range(w.stop)]
        assert all(self.tags[at] == h for at, h in zip(where[: w.fresh], hashes[1:], strict=False))
        ring = self.rings.setdefault(w.seq_slot, {})
        first = max(0, w.start - WINDOW + 1) if w.fresh == w.start else w.start
        assert all(ring[p % RING] == hashes[p + 1] for p in range(first, w.start)), "a stale window"
        self.tags |= dict(zip(where[w.fresh :], hashes[w.fresh + 1 :], strict=True))
        new = {p: hashes[p + 1] for p in range(w.start, w.stop)}
        ring.update({p % RING: h for p, h in new.items()})
        for position, slot in w.saves:
            rows = {p % RING: h for p, h in new.items() if position - WINDOW < p < position}
            self.rings.setdefault(slot, {}).update(rows)
        self.computed += w.stop - w.start
        first = {"last": w.stop - 1, "all": w.start, "none": w.stop}[w.want]
        return [scores(h) for h in hashes[first + 1 :]]


TABLE = torch.randn(997, VOCAB, generator=torch.Generator().manual_seed(0)) * 2


def scores(history: int) -> torch.Tensor:
    """Scores of all tokens, float32, from a hash of the history."""
    return TABLE[history % 997]
