"""Decides what the next step computes, and keeps the books of blocks and slots.

Idea: requests wait in a queue. A step is either prefill (chunks of prompts from the front of the queue, up to
`max_num_batched_tokens` rows) or decode (one row of every running sequence). A prompt is admitted only when
blocks for all of it are free, and enough besides for what the running sequences will probably still produce.
When decode finds no block all the same, the sequence with the longest output gives up its own and is computed
again later: positions, seed and tokens are kept, so its output does not change.

Shapes: plain Python data; no tensor is read here.
State: `waiting` (front first; at most the first one has part of its prompt in the caches), `running`, and the
index sides of the two pools. `plan` and `commit` take turns; between a commit and the next plan `add` and
`finish` (an abort, from whatever state) may be called.
Errors: none; a request that can't be served never gets here (loop.Engine.submit checks it).
Source: engine.md section 4; the estimate of future output is SGLang's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container

from dskit.engine.config import EngineConfig
from dskit.engine.seq import Chunk, Sampled, Sequence, Status, StepPlan, StepResult, TokenEvent

FIRST_RATIO, LAST_RATIO, DECAY_STEPS = 0.7, 0.7 * 0.14, 600
LONGEST_GUESS = 4096  # tokens: nobody is assumed to produce more than this from here on
USAGE_LIMIT = 0.9  # share of the blocks in use above which no new prompt is started


class Scheduler:
    """Queues and plans; `blocks` and `slots` are pools.Blocks and pools.Slots."""

    def __init__(self, cfg: EngineConfig, blocks, slots, eos_ids: Container[int] = ()):
        self.cfg, self.blocks, self.slots, self.eos_ids = cfg, blocks, slots, eos_ids
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.ratio = FIRST_RATIO  # share of max_tokens that running sequences are expected to use
        self.decodes = 0  # decode steps since the last prefill step
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        """True while some sequence is not finished."""
        return bool(self.waiting or self.running)

    def alive(self) -> list[Sequence]:
        """Every sequence that is not finished."""
        return [*self.waiting, *self.running]

    def add(self, seq: Sequence) -> None:
        """Put a new sequence at the end of the queue."""
        self.waiting.append(seq)

    def plan(self) -> StepPlan | None:
        """What to compute now, with blocks and slots already given out; None when there is nothing to do."""
        due = self.decodes % self.cfg.prefill_interval == 0 or not self.running
        chunks = self._plan_prefill() if due else []
        if not chunks:
            if rows := self._plan_decode():
                self.decodes += 1
                self.ratio = max(LAST_RATIO, self.ratio - (FIRST_RATIO - LAST_RATIO) / DECAY_STEPS)
                return StepPlan("decode", rows)
            chunks = (
                self._plan_prefill()
            )  # decode may just have given all its blocks up to a half-done prompt
        if not chunks:
            return None
        self.decodes = 0
        return StepPlan("prefill", chunks)

    # ---- prefill -----------------------------------------------------------------------------------------

    def _plan_prefill(self) -> list[Chunk]:
        """Chunks from the front of the queue; a sequence whose prompt ends here moves to `running`."""
        chunks, budget = [], self.cfg.max_num_batched_tokens
        while self.waiting and budget:
            seq = self.waiting[0]
            rows = self._chunk_rows(len(seq.tokens) - seq.num_computed, budget, alone=not chunks)
            if not rows or not (seq.slot or self._admit(seq)):
                break
            stop = seq.num_computed + rows
            last = stop == len(seq.tokens)
            want = "all" if seq.request.scoring else "last" if last else "none"
            chunks.append(Chunk(seq, seq.num_computed, stop, want))
            budget -= rows
            if not last:
                break
            self.waiting.popleft()
            self.running.append(seq)
            seq.status = Status.RUNNING
        return chunks

    def _chunk_rows(self, rows: int, budget: int, alone: bool) -> int:
        """All rows if they fit, else whole blocks; less than a block only if the step is empty so far."""
        if rows <= budget:
            return rows
        return budget // self.cfg.block_size * self.cfg.block_size or (budget if alone else 0)

    def _admit(self, seq: Sequence) -> bool:
        """Give a sequence its slot and all blocks of its prompt, if enough is left for the running."""
        need = self._blocks_for(len(seq.tokens))
        if self.running:
            used = self.blocks.total - self.blocks.free_count
            reserved = sum(self._future_blocks(one) for one in self.running)
            if used > USAGE_LIMIT * self.blocks.total or need + reserved > self.blocks.free_count:
                return False
        if need > self.blocks.free_count or (slot := self.slots.alloc()) is None:
            return False
        seq.slot, seq.blocks = slot, self.blocks.alloc(need)
        return True

    def _blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many positions."""
        return math.ceil(tokens / self.cfg.block_size)

    def _future_blocks(self, seq: Sequence) -> int:
        """Blocks that a running sequence will probably still ask for."""
        left = 0 if seq.request.scoring else min(seq.params.max_tokens - seq.generated, LONGEST_GUESS)
        ratio = 1.0 if seq.params.ignore_eos else self.ratio
        return max(0, self._blocks_for(len(seq.tokens) + math.ceil(ratio * left)) - len(seq.blocks))

    # ---- decode ------------------------------------------------------------------------------------------

    def _plan_decode(self) -> list[Chunk]:
        """One row for every running sequence; the shortest outputs get their blocks first."""
        short = [s for s in self.running if len(s.blocks) * self.cfg.block_size < len(s.tokens)]
        for seq in sorted(short, key=_output_length):
            while seq.status is Status.RUNNING and not self._grow(seq):
                self._preempt(max(self.running, key=_output_length))
        return [Chunk(seq, len(seq.tokens) - 1, len(seq.tokens), "last") for seq in self.running]

    def _grow(self, seq: Sequence) -> bool:
        """Give the sequence one more block; False when none is free."""
        ids = self.blocks.alloc(1)
        seq.blocks += ids or []
        return bool(ids)

    def _preempt(self, seq: Sequence) -> None:
        """Take back everything and queue the sequence in front, behind one whose prompt is half done."""
        budget = sum(min(s.params.max_tokens, LONGEST_GUESS) for s in self.running)
        decoded = sum(s.generated for s in self.running)
        self.ratio = min(1.0, (decoded + 20 * len(self.running)) / (budget + 1))
        self.running.remove(seq)
        self._release(seq)
        seq.status, seq.num_computed = Status.WAITING, 0
        seq.preemptions += 1
        self.preemptions += 1
        self.waiting.insert(1 if self.waiting and self.waiting[0].slot else 0, seq)

    # ---- commit ------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Book the results of a step: counters, new tokens, stop conditions; returns the events."""
        events = []
        outputs = result.outputs if result.error is None else [None] * len(plan.chunks)
        for chunk, output in zip(plan.chunks, outputs, strict=True):
            if chunk.seq.status is Status.FINISHED:  # ended after the plan was made
                continue
            seq, error = chunk.seq, result.error or getattr(output, "error", None)
            if error:
                events.append(self.finish(seq, "error", error))
                continue
            seq.num_computed = chunk.stop
            if chunk.want == "all":
                seq.logits.append(output)
                events += [self.finish(seq, "stop")] if seq.num_computed == len(seq.tokens) else []
            elif chunk.want == "last":
                events.append(self._append(seq, output))
        return events

    def _append(self, seq: Sequence, one: Sampled) -> TokenEvent:
        """Add a sampled token, see whether it ends the sequence, and make its event."""
        seq.append(one)
        p = seq.params
        if one.token_id in p.stop_token_ids or (one.token_id in self.eos_ids and not p.ignore_eos):
            return self.finish(seq, "stop", sampled=one)
        text, stopped = seq.text.push(one.token_id)
        if stopped:
            return self.finish(seq, "stop", sampled=one, text=text)
        if seq.generated >= p.max_tokens or len(seq.tokens) >= self.cfg.max_model_len:
            return self.finish(seq, "length", sampled=one, text=text)
        return TokenEvent(seq.request.request_id, one.token_id, text, one.logprob, one.top)

    # ---- ends --------------------------------------------------------------------------------------------

    def finish(
        self,
        seq: Sequence,
        reason: str,
        error: str | None = None,
        *,
        sampled: Sampled | None = None,
        text: str = "",
    ) -> TokenEvent:
        """End a sequence from whatever state it is in: off its queue, all freed, with its last event."""
        queue = self.waiting if seq.status is Status.WAITING else self.running
        queue.remove(seq)
        self._release(seq)
        seq.status, seq.finish_reason, seq.error = Status.FINISHED, reason, error
        one = sampled or Sampled(None)
        text += "" if error else seq.text.finish()
        return TokenEvent(seq.request.request_id, one.token_id, text, one.logprob, one.top, reason, error)

    def _release(self, seq: Sequence) -> None:
        """Give blocks and slot back, last block first."""
        if seq.slot:
            self.blocks.free(seq.blocks[::-1])
            self.slots.free(seq.slot)
        seq.blocks, seq.slot = [], 0


def _output_length(seq: Sequence) -> tuple[int, int]:
    """Order of preemption: longest output first, the youngest among equals."""
    return seq.generated, seq.seq_id
