"""The canary: notices when a step reads what its sequence has not written, before a reader would.

Idea: wrong blocks, a slot used twice or a stale window do not crash: they give slightly different text. So a
shadow of the caches holds, for every position of a block and every row of a window ring, the fingerprint of
the token history that was written there. Before a step is booked, what it read must be the history of its
own sequence, and what it wrote must have been its own. Freed slots and blocks are filled with NaN on the
device, so that real reads of them show in the logits. `check_books` compares every pool with its holders.

Steps are followed in the order in which they are committed, which is the order in which the device runs them.

Shapes: shadow of a block `[block_size]` uint64, of a ring one fingerprint per row.
State: one Canary per engine (`EngineConfig.canary`: "off", "log", "raise").
Errors: CanaryError, or a line in the log when only that is asked for.
Source: engine.md section 21.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from weakref import WeakKeyDictionary

import numpy as np

from dskit.engine.config import EngineConfig
from dskit.engine.pools import LEAST_BACKTRACK, Pool
from dskit.engine.scheduler import Scheduler
from dskit.engine.seq import Chunk, Copies, Sequence, StepPlan

logger = logging.getLogger("dskit.engine")
PRIME = 2**61 - 1


class CanaryError(RuntimeError):
    """Memory of the engine was not what its books say."""


class Canary:
    """Follows an engine's steps over shadows of its blocks and slots."""

    def __init__(self, cfg: EngineConfig, scheduler: Scheduler):
        self.cfg, self.scheduler = cfg, scheduler
        self.blocks = np.zeros((scheduler.blocks.total + 1, cfg.block_size), dtype=np.uint64)
        self.ring = cfg.sliding_window + LEAST_BACKTRACK  # rows; real rings have as many or more
        self.rings: dict[int, dict[int, int]] = {}  # slot -> row -> fingerprint
        self.histories: WeakKeyDictionary[Sequence, np.ndarray] = WeakKeyDictionary()  # behind each token
        self.freed_blocks: set[int] = set()  # since the last step was launched
        self.freed_slots: set[int] = set()
        scheduler.blocks.on_free = self.freed_blocks.add
        scheduler.slots.on_free = scheduler.tree.snapshots.on_free = self.freed_slots.add

    def poison(self, copies: Copies) -> None:
        """Let the step that these copies come before wipe what was freed and is not a copy's target."""
        copies.wipe_slots = sorted(self.freed_slots - copies.slots.keys())
        copies.wipe_blocks = sorted(self.freed_blocks - copies.blocks.keys())
        self.freed_slots.clear()
        self.freed_blocks.clear()

    def follow(self, plan: StepPlan) -> None:
        """Check what a step has read, and note what it has written; call it before the step is committed."""
        self._copy(plan.copies)
        forks = Counter(chunk.origin for chunk in plan.chunks)
        for chunk in plan.chunks:
            # a fork has no rows; a sequence that ended in an error never knew its last token
            if chunk.origin is None and chunk.stop <= len(chunk.tokens):
                self._read(chunk)
                self._write(chunk, 1 + forks[chunk])

    def check_books(self, plans: list[StepPlan]) -> None:
        """Every block and slot is free or held by those who say so; `plans` are the steps on their way."""
        s, tree = self.scheduler, self.scheduler.tree
        seqs = {*s.alive(), *(c.seq for plan in plans for c in plan.chunks)}
        holders = Counter(b for seq in seqs for b in seq.blocks) + Counter(dict.fromkeys(tree.of_block, 1))
        self._pool("block", s.blocks, holders)
        self._pool("slot", s.slots, Counter(seq.slot for seq in seqs if seq.slot))
        saving = Counter(slot for plan in plans for c in plan.chunks for _, slot in c.saves)
        self._pool("snapshot", tree.snapshots, saving + Counter(n.snapshot for n in tree.saved.values()))
        idle = {n.key for n in tree.nodes.values() if s.blocks.holders(n.block) == 1}
        self._require(idle == set(tree.idle), "the tree's idle nodes are not those that only it holds")
        for seq in seqs:
            room = min(len(seq.tokens), len(seq.blocks) * self.cfg.block_size)
            fits = not seq.slot or seq.num_computed <= room
            self._require(fits, f"{self._name(seq)} has computed more than its tokens or blocks")

    # ---- inside ------------------------------------------------------------------------------------------

    def _pool(self, what: str, pool: Pool, holders: Counter) -> None:
        self._require(0 not in holders, f"{what} 0 is reserved, but held")
        for number in {*holders, *pool.numbers}:
            self._require(
                pool.holders(number) == holders[number],
                f"{what} {number} has {pool.holders(number)} holders in the pool, {holders[number]} in fact",
            )
        self._require(len(holders) + pool.free_count == pool.total, f"a {what} is lost")

    def _copy(self, copies: Copies) -> None:
        self.rings |= {t: dict(self.rings.get(s, {})) for t, s in copies.slots.items()}
        if copies.blocks:
            self.blocks[list(copies.blocks)] = self.blocks[list(copies.blocks.values())]
        for slot in copies.wipe_slots:
            self.rings.pop(slot, None)
        self.blocks[copies.wipe_blocks] = 0

    def _read(self, chunk: Chunk) -> None:
        seq, size = chunk.seq, self.cfg.block_size
        history = self._history(chunk)
        blocks = seq.blocks[: -(-chunk.fresh // size)]
        held = self.blocks[blocks].reshape(-1)[: chunk.fresh]
        wrong = np.flatnonzero(held != history[: chunk.fresh])
        self._require(not len(wrong), f"{self._name(seq)} read other entries at positions {wrong[:4]}")
        replays = chunk.fresh > chunk.start
        first = chunk.start if replays else max(0, chunk.start - self.cfg.sliding_window + 1)
        ring = self.rings.get(seq.slot, {})
        stale = [p for p in range(first, chunk.start) if ring.get(p % self.ring) != history[p]]
        self._require(not stale, f"{self._name(seq)} read stale windows at positions {stale[:4]}")

    def _write(self, chunk: Chunk, most: int) -> None:
        seq, size, history = chunk.seq, self.cfg.block_size, self._history(chunk)
        for at in range(chunk.fresh // size, -(-chunk.stop // size)):
            block, first, stop = seq.blocks[at], max(chunk.fresh, at * size), min(chunk.stop, (at + 1) * size)
            own = self.scheduler.blocks.holders(block) <= most
            self._require(own, f"{self._name(seq)} wrote to block {block}, which others hold too")
            self.blocks[block, first - at * size : stop - at * size] = history[first:stop]
        for stop, slot in ((chunk.stop, seq.slot), *chunk.saves):
            rows = range(max(chunk.start, stop - self.ring), stop)
            self.rings.setdefault(slot, {}).update({p % self.ring: int(history[p]) for p in rows})

    def _history(self, chunk: Chunk) -> np.ndarray:
        """Fingerprints of a sequence's beginnings: of one token, of two, ... up to the chunk's last."""
        seq = chunk.seq
        known = self.histories.get(seq, np.zeros(0, dtype=np.uint64))
        sure = chunk.stop - len(chunk.drafts)  # what is only guessed is not kept
        self.histories[seq] = known = _extended(known, seq.tokens[len(known) : sure])
        return _extended(known, chunk.drafts)

    def _name(self, seq: Sequence) -> str:
        return f"request {seq.request.request_id} (slot {seq.slot})"

    def _require(self, fine: bool, message: str) -> None:
        if fine:
            return
        if self.cfg.canary == "raise":
            raise CanaryError(message)
        logger.error("canary: %s", message)


def _extended(known: np.ndarray, tokens: Iterable[int]) -> np.ndarray:
    """Fingerprints, and those of so many tokens more."""
    last, new = int(known[-1]) if len(known) else 1, []
    for token in tokens:
        last = (last * 1000003 + token + 7) % PRIME
        new.append(last)
    return np.concatenate((known, np.array(new, dtype=np.uint64)))
