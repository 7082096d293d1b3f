"""Decides what the next step computes, and keeps the books of blocks and slots.

Idea: requests wait in a queue. A step is either prefill (chunks of prompts from the front of the queue, up to
`max_num_batched_tokens` rows) or decode (one row of every running sequence). A prompt is admitted only when
blocks for all of it are free, and enough besides for what the running sequences will probably still produce.
When decode finds no block all the same, the sequence with the longest output gives up its own and is computed
again later: positions, seed and tokens are kept, so its output does not change.

A prompt that begins like an earlier one starts behind what the prefix tree (tree.py) knows of it. The windows
at that point come from a snapshot (`exact_prefix`), or the first chunk also recomputes the rows before it.
Snapshots are taken at the last block border of a prompt, where two prompts were seen to part, and at the last
border that an answer has crossed. A state slot stands still between two steps and reaches a little beyond the
window, so a border within SLACK rows of the end of a chunk is copied afterwards; for an earlier one the
chunk's rows are written to both slots as they pass (`Chunk.saves`). Requests with one and the same prompt
(n > 1) are forked when its last row is planned: they share its blocks and copy the last, partial one.

A step can be planned while another is on its way (`ahead`): each of its decode rows is then one further, and
its token not known yet. What ends meanwhile keeps its memory until no step with its rows is on its way.

With a draft a decode step has more rows of a sequence: those of guesses that a confidence-blind ("static") or
confidence-scheduled choice (spec.py) lets in, as far as blocks are free for them. Only guesses that held
count as computed; the rows behind them are overwritten before anything reads them. How many rows a step has
depends on how many guesses held, so it is planned once the one before is booked.

Shapes: plain Python data; no tensor is read here.
State: `waiting` (by priority, then front first; at most the first one has part of its prompt in the caches),
`running`, the tree, and the index sides of the two pools. Plans are committed in their order; `add` and
`finish` (an abort, from whatever state) may be called at any time between two calls.
Errors: none; a request that can't be served never gets here (loop.Engine.submit checks it).
Source: engine.md sections 4, 7 and 8; the estimate of future output is SGLang's.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from dskit.engine.config import EngineConfig
from dskit.engine.pools import LEAST_BACKTRACK as SLACK
from dskit.engine.pools import Blocks, Slots
from dskit.engine.seq import (
    Chunk,
    Copies,
    Round,
    RoundRecord,
    Sampled,
    Sequence,
    Status,
    StepPlan,
    StepResult,
    TokenEvent,
)
from dskit.engine.spec import Outlook, allocate, capacity, pays, plainly_all, survivals
from dskit.engine.tree import Node, PrefixTree

FIRST_RATIO, LAST_RATIO, DECAY_STEPS = 0.7, 0.7 * 0.14, 600
LONGEST_GUESS = 4096  # tokens: nobody is assumed to produce more than this from here on
PROBE = 32  # steps without a draft until it is tried again
REST = 8  # steps at most that verify every guess without a thought, since that was plainly the best
USAGE_LIMIT = 0.9  # share of the blocks in use above which no new prompt is started


class Scheduler:
    """Queues and plans; `blocks` and `slots` are the pools of the running sequences."""

    def __init__(self, cfg: EngineConfig, blocks: Blocks, slots: Slots, eos_ids: Iterable[int] = ()):
        self.cfg, self.blocks, self.slots, self.eos_ids = cfg, blocks, slots, frozenset(eos_ids)
        self.tree = PrefixTree(blocks, Slots(cfg.num_snapshots or 0, first=slots.total + 1))
        self.copies = Copies()  # to be made before the next step
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.ratio = FIRST_RATIO  # share of max_tokens that running sequences are expected to use
        self.decodes = 0  # decode steps since the last prefill step
        self.outlook = Outlook()
        self.judged: dict[Sequence, tuple[list[float], int, int]] = {}  # survivals, judged, held
        self.silent = 0  # decode steps since a draft was worth its time
        self.sure = -1  # thoughts in a row, but for the first, that all guesses plainly pay
        self.rest = 0  # steps until the next thought
        self.fates = [0, 0]  # guesses judged and held in the step before
        self.preemptions = 0
        self.rounds: deque[RoundRecord] = deque(maxlen=1 << 16)  # the newest ones

    @property
    def free_blocks(self) -> int:
        """Blocks that a sequence can get: free ones, and those that only the tree holds."""
        return self.blocks.free_count + len(self.tree.idle)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens in the queue; called from any thread."""
        return sum(seq.prompt_len for seq in tuple(self.waiting))

    @property
    def has_work(self) -> bool:
        """True while some sequence is not finished."""
        return bool(self.waiting or self.running)

    @property
    def scheduling(self) -> bool:
        """Whether verified rows are chosen by what they cost."""
        return self.cfg.speculate == "scheduled" and self.cfg.step_cost is not None

    def alive(self) -> list[Sequence]:
        """Every sequence that is not finished."""
        return [*self.waiting, *self.running]

    def add(self, seq: Sequence) -> None:
        """Put a sequence into the queue, behind those of its priority (a preempted one: before them)."""
        p = seq.params
        seq.limit = min(seq.prompt_len + p.max_tokens, self.cfg.max_model_len)
        seq.ends = frozenset(p.stop_token_ids) | (frozenset() if p.ignore_eos else self.eos_ids)
        fixed = 1 if self.waiting and self.waiting[0].slot else 0  # half done: it stays where it is
        rank = seq.request.priority - (0.5 if seq.preemptions else 0)
        at = len(self.waiting)
        while at > fixed and self.waiting[at - 1].request.priority > rank:
            at -= 1
        self.waiting.insert(at, seq)

    def expired(self, now: float) -> list[tuple[Sequence, str]]:
        """Sequences that have waited or run for too long, with what to say about it."""
        found = []
        for seq in self.alive():
            age, own, queue = now - seq.arrived, seq.request.timeout, self.cfg.queue_timeout
            if own is not None and age > own:
                found.append((seq, f"the request was not finished within its timeout of {own:g} s"))
            elif age > queue and not seq.slot and not seq.preemptions:
                found.append((seq, f"no room was free within {queue:g} s (queue_timeout); try again later"))
        return found

    def plan(self, ahead: bool = False) -> StepPlan | None:
        """What to compute now, with blocks and slots already given out; None when there is nothing to do.

        `ahead`: a step is on its way. None then means that its results have to be booked before.
        """
        due = self.decodes % self.cfg.prefill_interval == 0 or not self.running
        if ahead and due and self.wants_prefill:
            return None
        plan = self.plan_as("prefill") if due and not ahead else None
        plan = plan or self.plan_as("decode", ahead)
        if plan or ahead:
            return plan
        return self.plan_as("prefill")  # decode may have given all its blocks up to a half-done prompt

    @property
    def wants_prefill(self) -> bool:
        """True when the prompt in front could be computed now."""
        return bool(self.waiting) and self._has_room(self.waiting[0])

    def plan_as(self, kind: str, ahead: bool = False) -> StepPlan | None:
        """The next step, of a kind that is decided; None when there are no rows for it."""
        if ahead and (self.cfg.drafts or kind == "prefill"):
            return None
        chunks = self._plan_prefill() if kind == "prefill" else self._plan_decode(ahead)
        if not chunks:
            return None
        if kind == "prefill":
            self.decodes = 0
        else:
            self.decodes += 1
            self.ratio = max(LAST_RATIO, self.ratio - (FIRST_RATIO - LAST_RATIO) / DECAY_STEPS)
        for chunk in chunks:
            chunk.seq.inflight += 1
        copies, self.copies = self.copies, Copies()
        return StepPlan(kind, chunks, copies)

    # ---- prefill -----------------------------------------------------------------------------------------

    def _plan_prefill(self) -> list[Chunk]:
        """Chunks from the front of the queue; a sequence whose prompt ends here moves to `running`."""
        chunks, budget = [], self.cfg.max_num_batched_tokens
        if not self.running:
            self.silent *= PROBE  # these texts may be easier to guess than those before them: try soon
        while self.waiting and budget:
            seq = self.waiting[0]
            if not (seq.slot or self._admit(seq)):
                break
            left = len(seq.tokens) - seq.num_computed
            rows = self._chunk_rows(left, budget - seq.replay, alone=not chunks)
            if not rows:
                break
            chunk = self._chunk(seq, seq.num_computed + rows)
            chunks.append(chunk)
            budget -= chunk.stop - chunk.start
            if rows < left:
                break
            self.waiting.popleft()
            self._run(seq)
            chunks += self._forks(chunk) if chunk.want == "last" else []
        return chunks

    def _run(self, seq: Sequence) -> None:
        self.running.append(seq)
        seq.status = Status.RUNNING

    def _forks(self, origin: Chunk) -> list[Chunk]:
        """The waiting requests with the prompt that ends here, as far as there is room: they need no rows."""
        parent, stop, found = origin.seq, origin.stop, []
        if stop > parent.prompt_len:  # computed again after a preemption
            return []
        whole, rest = divmod(stop, self.cfg.block_size)
        key = parent.request.prompt_key
        for seq in [s for s in self.waiting if s.request.prompt_key == key]:
            if seq.slot or seq.preemptions or seq.request.scoring or not self._fits(bool(rest)):
                continue
            self.waiting.remove(seq)
            self._run(seq)
            seq.slot, seq.blocks, seq.epoch = self.slots.alloc(), parent.blocks[:whole], parent.epoch
            self.blocks.share(seq.blocks)
            seq.blocks += self._take(1) if rest else []
            seq.cached_tokens = stop
            source = parent.slot, parent.blocks[whole] if rest else 0
            found.append(Chunk(seq, stop, stop, "last", stop, origin=origin, source=source,
                               guess=origin.guess))
        return found

    def _chunk_rows(self, rows: int, budget: int, alone: bool) -> int:
        """All rows if they fit, else whole blocks; less than a block only if the step is empty so far."""
        if rows <= budget:
            return rows
        whole = max(budget, 0) // self.cfg.block_size * self.cfg.block_size
        return whole or (budget if alone else 0)

    def _chunk(self, seq: Sequence, stop: int) -> Chunk:
        """The next rows of a prompt, the replayed ones before them, and the snapshots within."""
        start, seq.replay = seq.num_computed - seq.replay, 0
        want = "all" if seq.request.scoring else "last" if stop == len(seq.tokens) else "none"
        chunk = Chunk(seq, start, stop, want, seq.num_computed, saves=[], guess=not self.silent)
        for mark in seq.marks:
            if start < mark < stop - SLACK and (slot := self.tree.room()) is not None:
                chunk.saves.append((mark, slot))
                if mark - self.cfg.sliding_window < start:  # its window begins before these rows
                    self.copies.slot(seq.slot, slot)
        return chunk

    def _has_room(self, seq: Sequence) -> bool:
        """True when a waiting sequence could be computed now."""
        if seq.slot or not self.slots.free_count:
            return bool(seq.slot)
        path = self._match(seq)
        return self._fits(self._blocks_for(len(seq.tokens)) - len(path), path)

    def _fits(self, need: int, path: Seq[Node] = ()) -> bool:
        """True when a slot and so many blocks beyond a path are there, and enough is left for the running."""
        free = self.free_blocks - sum(node.key in self.tree.idle for node in path)
        if need > free or not self.slots.free_count:
            return False
        if not self.running:
            return True
        reserved = sum(self._future_blocks(one) for one in self.running)
        return free >= (1 - USAGE_LIMIT) * self.blocks.total and need + reserved <= free

    def _admit(self, seq: Sequence) -> bool:
        """Give a sequence its slot and all blocks of its prompt, if there is room."""
        path = self._match(seq) if self.slots.free_count else []
        need = self._blocks_for(len(seq.tokens)) - len(path)
        if not self._fits(need, path):
            return False
        self.tree.hold(path)
        seq.slot, seq.path, seq.epoch = self.slots.alloc(), path, self.tree.epoch
        seq.blocks = [node.block for node in path] + self._take(need)
        seq.num_computed = len(path) * self.cfg.block_size
        seq.border = seq.num_computed + self.cfg.block_size
        if not seq.preemptions:
            seq.cached_tokens = seq.num_computed
        if path and self.cfg.exact_prefix:
            self.copies.slot(path[-1].snapshot, seq.slot)
        elif path:
            seq.replay = min(seq.num_computed, self.cfg.replay_tokens)
        return True

    def _match(self, seq: Sequence) -> list[Node]:
        """The nodes that a sequence can start behind; notes where its prompt should leave snapshots."""
        cfg, length = self.cfg, len(seq.tokens)
        if seq.request.scoring or not cfg.enable_prefix_caching:
            return []
        path = self.tree.find(seq, length - 1)  # one row has to be computed
        if not cfg.exact_prefix:
            return path if len(path) * cfg.block_size > cfg.replay_tokens else []
        last = length - 1
        if cfg.replay != "off":  # decoder windows are those of this prompt's own last rows
            last = max(0, seq.prompt_len - cfg.keep_tokens)
        borders = {len(path), last // cfg.block_size, length // cfg.block_size}
        del path[last // cfg.block_size :]
        while path and not path[-1].snapshot:
            path.pop()
        seq.marks = [border * cfg.block_size for border in sorted(borders) if border > len(path)]
        return path

    def _take(self, count: int) -> list[int] | None:
        """So many blocks, taken from the tree if none are free."""
        self.tree.evict(count - self.blocks.free_count)
        return self.blocks.alloc(count)

    def _blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many positions."""
        return math.ceil(tokens / self.cfg.block_size)

    def _future_blocks(self, seq: Sequence) -> int:
        """Blocks that a running sequence will probably still ask for."""
        left = 0 if seq.request.scoring else min(seq.limit - len(seq.tokens), LONGEST_GUESS)
        ratio = 1.0 if seq.params.ignore_eos else self.ratio
        return max(0, self._blocks_for(len(seq.tokens) + math.ceil(ratio * left)) - len(seq.blocks))

    # ---- decode ------------------------------------------------------------------------------------------

    def _plan_decode(self, ahead: bool) -> list[Chunk] | None:
        """One row for every running sequence and its drafts; the shortest outputs get their blocks first.

        None when a step is on its way and a block could only be had by a preemption.
        """
        size, rows, short = self.cfg.block_size, [], []
        for seq in self.running:
            length = len(seq.tokens) + seq.inflight
            if seq.inflight and length >= seq.limit:
                continue  # its last token is on its way
            rows.append(Chunk(seq, length - 1, length, "last", length - 1, (), seq.inflight > 0))
            if len(seq.blocks) * size < length:
                short.append(seq)
        for seq in sorted(short, key=_output_length):
            while seq.status is Status.RUNNING and not self._grow(seq):
                if ahead:
                    return None
                self._preempt(max(self.running, key=_output_length))
        rows = [chunk for chunk in rows if chunk.seq.status is Status.RUNNING] if short else rows
        if self.cfg.drafts:
            self._let_drafts_in(rows)
            rows.sort(key=lambda chunk: len(chunk.drafts))  # equally many rows are attended to at once
        return rows

    def _let_drafts_in(self, rows: list[Chunk]) -> None:
        """Give chunks the drafts that are worth a row, as far as limits and free blocks allow."""
        proposals = [chunk.seq.proposal for chunk in rows]
        lengths = [len(p.tokens) if p else 0 for p in proposals]
        if rows and self.scheduling and not self.rest:
            lengths = self._schedule(rows)
        for chunk, proposal, length in zip(rows, proposals, lengths, strict=True):
            if not length:
                continue
            seq = chunk.seq
            length = min(length, seq.limit - len(seq.tokens) - 1)  # the last token is never a draft
            while len(seq.blocks) * self.cfg.block_size < chunk.stop + length and self._grow(seq):
                pass
            length = min(length, len(seq.blocks) * self.cfg.block_size - chunk.stop)
            if length > 0:
                chunk.drafts, chunk.stop = proposal.tokens[:length], chunk.stop + length

    def _schedule(self, rows: list[Chunk]) -> list[int]:
        """How many drafts of each are worth a row."""
        seqs, bias = [chunk.seq for chunk in rows], self.outlook.bias
        for seq in seqs:
            seq.alive = survivals(seq.proposal.confidence, self.cfg.draft_temperatures, bias + seq.bias
                                  ) if seq.proposal else []
        live = [seq.alive for seq in seqs]
        seen = live
        if self.cfg.accept != "coupled":  # coupled texts do not depend on lengths
            seen = [hopes if a else [] for hopes, a in zip(self._hopes(seqs), live, strict=True)]
        return allocate(live, capacity(seen, self.cfg.step_cost))

    def foresee(self, plan: StepPlan) -> None:
        """Learn from the last rounds, and say whether the draft is to guess again behind this step, which the
        device has begun by now.

        While it does not pay to guess, it is tried every PROBE steps. While it plainly pays to verify every
        guess, few steps are thought about, since that takes time too, until hardly a guess holds.
        """
        if plan.kind == "prefill" or not (plan.chunks and self.scheduling):
            return
        if self.judged:
            self._learn()
        (judged, held), self.fates = self.fates, [0, 0]
        if 4 * held < judged:
            self.sure = -1
        if self.rest:
            self.rest = self.rest - 1 if self.sure > 0 else 0
            return
        hopes, cost = self._hopes([chunk.seq for chunk in plan.chunks]), self.cfg.step_cost
        worth = pays(hopes, cost)
        self.silent = 0 if worth or self.silent >= PROBE else self.silent + 1
        self.sure = self.sure + 1 if worth and plainly_all(hopes, cost) else 0
        self.rest = min(self.sure, REST)
        for chunk in plan.chunks:
            chunk.guess = not self.silent

    def _learn(self) -> None:
        """Let what became of guesses correct what is expected of the next ones."""
        told = self.outlook.learn(self.judged.values())
        for seq, (hopes, more) in zip(self.judged, told, strict=True):
            seq.hopes, seq.bias = hopes, seq.bias + more
        self.judged.clear()

    def _hopes(self, seqs: list[Sequence]) -> list[list[float]]:
        """Survivals of the guesses that the draft may make next."""
        return self.outlook.expect([seq.hopes for seq in seqs], max(len(seq.alive) for seq in seqs))

    def _grow(self, seq: Sequence) -> bool:
        """Give the sequence one more block; False when none is free."""
        ids = self._take(1)
        seq.blocks += ids or []
        return bool(ids)

    def _preempt(self, seq: Sequence) -> None:
        """Take back everything and queue the sequence again."""
        budget = sum(min(s.params.max_tokens, LONGEST_GUESS) for s in self.running)
        decoded = sum(s.generated for s in self.running)
        self.ratio = min(1.0, (decoded + 20 * len(self.running)) / (budget + 1))
        self.running.remove(seq)
        self._release(seq)
        seq.status, seq.num_computed, seq.proposal = Status.WAITING, 0, None
        seq.preemptions += 1
        self.preemptions += 1
        self.add(seq)

    # ---- commit ------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Book the results of a step: counters, new tokens, stop conditions; returns the events."""
        events, now = [], time.perf_counter()
        finished = Status.FINISHED  # looking it up takes longer than the comparison
        outputs = result.outputs if result.error is None else [None] * len(plan.chunks)
        for chunk, output in zip(plan.chunks, outputs, strict=True):
            seq, error = chunk.seq, result.error or getattr(output, "error", None)
            seq.inflight -= 1
            if error or seq.status is finished:
                events += self._discard(chunk, error)
                continue
            if isinstance(output, Round):
                events += self._advance(chunk, output, now)
                continue
            seq.num_computed = chunk.stop
            if chunk.stop >= seq.border:
                self._publish(chunk)
            if chunk.want == "last":
                events.append(self._append(seq, output, now))
                if chunk.origin is not None and seq.status is Status.RUNNING:
                    self._copy_origin(chunk)
            elif chunk.want == "all":
                seq.logits.append(output)
                events += [self.finish(seq, "stop")] if chunk.stop == len(seq.tokens) else []
        return events

    def _advance(self, chunk: Chunk, round: Round, now: float) -> list[TokenEvent]:
        """Book the tokens of a step with a draft, one after the other, until one of them is the last."""
        seq, events = chunk.seq, []
        for held, sampled in enumerate(round.sampled):
            seq.num_computed = chunk.stop - len(chunk.drafts) + held
            if seq.num_computed >= seq.border:
                self._publish(chunk)
            events.append(self._append(seq, sampled, now))
            if seq.status is not Status.RUNNING:
                break
        judged = held = 0
        if chunk.drafts:
            judged = len(chunk.drafts) if len(events) == len(round.sampled) else len(events)
            held = min(len(events), len(round.sampled) - 1)
            seq.rounds, seq.drafted, seq.accepted = seq.rounds + 1, seq.drafted + judged, seq.accepted + held
            self.rounds.append(RoundRecord(seq.request_id, seq.proposal.confidence, judged, held))
            self.fates = [self.fates[0] + judged, self.fates[1] + held]
        if seq.alive:
            self.judged[seq] = seq.alive, judged, held
            seq.alive = []
        seq.proposal = round.proposal
        if chunk.origin is not None and seq.status is Status.RUNNING:
            self._copy_origin(chunk)
        return events

    def _discard(self, chunk: Chunk, error: str | None) -> list[TokenEvent]:
        """End a sequence whose step went wrong, or let go of one that ended after the plan was made."""
        seq = chunk.seq
        self._give_up_saves(chunk)
        if seq.status is not Status.FINISHED:
            return [self.finish(seq, "error", error)]
        if not seq.inflight:
            self._release(seq)
        return []

    def _give_up_saves(self, chunk: Chunk) -> None:
        for _, slot in chunk.saves:
            self.tree.snapshots.free(slot)

    def _copy_origin(self, chunk: Chunk) -> None:
        """Give a fork its own state and last block before it computes its first row."""
        slot, block = chunk.source
        self.copies.slot(slot, chunk.seq.slot)
        if block:
            self.copies.block(block, chunk.seq.blocks[-1])

    def _publish(self, chunk: Chunk) -> None:
        """Let others use the blocks that this chunk filled, and keep the snapshots at their borders."""
        seq, size = chunk.seq, self.cfg.block_size
        if not self.cfg.enable_prefix_caching or seq.epoch != self.tree.epoch:
            self._give_up_saves(chunk)
            return
        self.tree.publish(seq)
        seq.border = (len(seq.path) + 1) * size
        for mark, slot in chunk.saves:
            self.tree.keep(seq.path[mark // size - 1], slot)
        if not self.cfg.exact_prefix:
            return
        for mark in seq.marks:
            if chunk.start < mark <= chunk.stop <= mark + SLACK:
                self._snapshot(seq, seq.path[mark // size - 1])
        if chunk.stop > seq.prompt_len and chunk.stop <= len(seq.path) * size + SLACK:
            self.tree.forget(seq.trail)  # one is enough for an answer
            seq.trail = self._snapshot(seq, seq.path[-1])

    def _snapshot(self, seq: Sequence, node: Node) -> Node | None:
        """Keep the sequence's state with the node that it has just passed; None where it has one already."""
        if node.snapshot or (slot := self.tree.room()) is None:
            return None
        self.copies.slot(seq.slot, slot)
        self.tree.keep(node, slot)
        return node

    def _append(self, seq: Sequence, one: Sampled, now: float) -> TokenEvent:
        """Add a sampled token, see whether it ends the sequence, and make its event."""
        token = one.token_id
        seq.tokens.append(token)
        seq.last_token = now
        if not seq.first_token:
            seq.first_token = now
        if one.logprob is not None:
            seq.sampled.append(one)
        if token in seq.ends:
            return self.finish(seq, "stop", sampled=one)
        text, stopped = seq.text.push(token)
        if stopped:
            return self.finish(seq, "stop", sampled=one, text=text)
        if len(seq.tokens) >= seq.limit:
            return self.finish(seq, "length", sampled=one, text=text)
        return TokenEvent(seq.request_id, token, text, one.logprob, one.top)

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
        seq.status, seq.finish_reason, seq.error = Status.FINISHED, reason, error
        if not seq.inflight:  # else once no step with its rows is on its way
            self._release(seq)
        one = sampled or Sampled(None)
        text += "" if error else seq.text.finish()
        return TokenEvent(seq.request_id, one.token_id, text, one.logprob, one.top, reason, error)

    def _release(self, seq: Sequence) -> None:
        """Give blocks and slot back; whole blocks stay in the tree until they are needed."""
        if seq.slot:
            self.tree.release(seq.blocks)
            self.slots.free(seq.slot)
            if seq.error:  # whatever went wrong may be in its blocks
                self.tree.drop(seq.path)
        seq.blocks, seq.path, seq.slot = [], [], 0


def _output_length(seq: Sequence) -> tuple[int, int]:
    """Order of preemption: longest output first, the youngest among equals."""
    return seq.generated, seq.seq_id
