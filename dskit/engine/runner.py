"""The runner: lays a plan out as tensors, runs the model over the caches, returns logits.

A plan is a list of `Work`: which rows of which sequence, and where its caches are. The rows of all of them
are packed one after another; everything a layer needs to find its neighbours (ring rows, pool rows, visible
entries, n-grams, angles) is worked out here once per step and shared by all layers: `lay_out` does it in
numpy, one copy brings it to the device, and `arrive` adds what is large or known only there.

Bounded replay: decoder layers see windows only from `prompt_len - keep` on (`mask`), or run on those rows
only (`compact`); both give the same logits for the rows they keep. Behind a reused prefix without a snapshot,
the rows of its end are there a second time (`Work.fresh`): they read the global entries that are cached, see
windows from the first of them on, and write windows only.

State: the caches are owned here; a slot needs no reset, since a new sequence reads only what it wrote, or
what was copied for it before the step.
Errors: ValueError for replay settings that the model cannot serve.
Source: engine.md sections 3, 6.5, 8.1; model.md 3.15.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dskit import ops
from dskit.engine import pools
from dskit.engine.engram import Placement
from dskit.engine.exchange import Peers
from dskit.engine.graphs import Cuda, Graphs
from dskit.engine.host import send, send_all
from dskit.engine.seq import Copies
from dskit.layers.compress import GroupPlan
from dskit.layers.dspark import likeliest
from dskit.layers.indexer import Segment
from dskit.layers.rope import turns
from dskit.layers.swa import RingPlan
from dskit.model import Model, Step, directly

MANY_ROWS = 1024  # of a step, beyond which tables of windows are made on the device


@dataclass
class Work:
    """New rows [start, stop) of one sequence; `tokens` holds its ids up to stop at least.

    Rows before `fresh` (None: there are none) only rebuild windows. `saves`: (position, slot) pairs; that
    slot gets the windows and carries as they are before that position, as far as these rows write them.
    `unknown`: the id of the last row is not in `tokens` yet, it is the newest one that `publish` was given.
    """

    seq_slot: int
    blocks: list[int]
    tokens: list[int]
    start: int
    stop: int
    prompt_len: int
    want: str = "last"  # which rows' logits: last, all, none
    fresh: int | None = None
    saves: Sequence[tuple[int, int]] = ()
    unknown: bool = False


class Layout:
    """The rows of a list of Work in arrays: one number per work (starts ...), one per row (owner, pos)."""

    def __init__(self, starts: np.ndarray, stops: np.ndarray, slots: np.ndarray):
        self.starts, self.stops, self.slots = starts, stops, slots
        self.fresh, self.saves = starts, []
        self.counts = stops - starts
        self.offsets = np.concatenate(([0], self.counts.cumsum()))
        self.owner = np.repeat(np.arange(len(starts)), self.counts)
        self.pos = np.arange(self.offsets[-1]) - self.offsets[self.owner] + starts[self.owner]


@dataclass
class Pages:
    """A Segment as the host lays it out: `blocks` of each request, of whose entries the first ones count."""

    rows: slice
    shape: tuple[int, int]
    visible: Tensor
    blocks: Tensor
    entries: int

    def segment(self, per_block: int) -> Segment:
        """With the pool row of every entry."""
        within = torch.arange(per_block, device=self.blocks.device)
        table = (self.blocks[..., None] * per_block + within).flatten(1)[:, : self.entries]
        return Segment(self.rows, self.shape, self.visible, table.contiguous(), per_block)


@dataclass
class Look:
    """RingPlan.read as the host lays it out, with a number a row: `reach` positions up to `last`, none before
    `least`.

    In a line a position from `start` on stands at `new` + position, one before it at `old` + position; in
    rings of `ring` rows (0: a line) all stand at `old` + position % ring.
    """

    last: Tensor
    least: Tensor
    start: Tensor
    new: Tensor
    old: Tensor
    reach: int
    ring: int

    def table(self) -> Tensor:
        """Rows of the line, [R, reach], -1 for none."""
        want = self.last[:, None] + torch.arange(1 - self.reach, 1, device=self.last.device)
        if self.ring:
            read = self.old[:, None] + want % self.ring
        else:
            read = want + torch.where(want >= self.start[:, None], self.new[:, None], self.old[:, None])
        return torch.where(want < self.least[:, None], -1, read)


def ring_plan(at: Layout, ring: int, reach: int, owner: np.ndarray, last: np.ndarray, least: np.ndarray,
              saves: Saves = ()) -> RingPlan:
    """Where `reach` positions up to last[R] of sequence owner[R] stand, none before least[R], as a Look, and
    where new rows go.

    Few enough new rows are written before they are read.  `saves`: (owner, position, slot); the rows that a
    later one at that position reads go to that slot too.
    """
    new = old = at.slots * ring
    if at.counts.max(initial=0) + reach - 1 <= ring and not saves:
        history, kept, slots = None, None, at.slots[at.owner] * ring + at.pos % ring
    else:
        first = np.maximum(at.starts - (reach - 1), 0)
        length = at.starts - first
        before = 1 + np.concatenate(([0], length.cumsum()))  # row 0 of the line is the reserved, empty row
        whose = np.repeat(np.arange(len(first)), length)
        old_pos = np.arange(len(whose)) - (before[:-1] - 1)[whose] + first[whose]
        history = np.concatenate(([0], at.slots[whose] * ring + old_pos % ring))
        new, old = before[-1] + at.offsets[:-1] - at.starts, before[:-1] - first
        kept = np.flatnonzero(at.pos >= at.stops[at.owner] - ring)
        slots = at.slots[at.owner[kept]] * ring + at.pos[kept] % ring
        for who, position, slot in saves:
            pos = np.arange(max(at.starts[who], position - reach + 1), position)
            kept = np.concatenate((kept, at.offsets[who] + pos - at.starts[who]))
            slots = np.concatenate((slots, slot * ring + pos % ring))
    look = Look(*map(_tensor, (last, least, at.starts[owner], new[owner], old[owner])), reach,
                ring if history is None else 0)
    return RingPlan(look, _tensor(history), _tensor(kept), _tensor(slots))


def _seen(plan: RingPlan) -> RingPlan:
    """A plan with its table."""
    return replace(plan, read=plan.read.table()) if isinstance(plan.read, Look) else plan


def _ids(work: list[Work], at: Layout, reach: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids of the rows and of `reach` positions before each work's first, where among them each row stands).

    -1 stands before a sequence begins, 0 for an id that is not known.
    """
    ids: list[int] = []
    for w, start, stop in zip(work, at.starts.tolist(), at.stops.tolist(), strict=True):
        ids += [-1] * (reach - start)
        ids += w.tokens[max(0, start - reach) : stop - w.unknown]
        ids += [0] * w.unknown
    return np.array(ids, dtype=np.int64), np.arange(len(at.pos)) + (at.owner + 1) * reach


def _spread(most: int) -> list[int]:
    """Powers of four, and the most: kernels take other tiles from some numbers on."""
    return [*(4**i for i in range(most.bit_length()) if 4**i < most), most]


def _runs(counts: np.ndarray) -> list[tuple[int, int]]:
    """(first, last + 1) of neighbours with equal counts; one run of nothing where there are none."""
    edges = [0, *(1 + np.flatnonzero(np.diff(counts))).tolist(), len(counts)]
    return list(itertools.pairwise(edges))


def _tensor(array: np.ndarray | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(np.ascontiguousarray(array))


Saves = list[tuple[int, int, int]]


class ModelRunner:
    """Runs one model over its own caches."""

    def __init__(self, model: Model, *, num_blocks: int, block_size: int, num_slots: int, replay: str = "off",
                 keep: int | None = None, cache_storage: str | None = None, drafts: bool = False,
                 engram: Placement | None = None, enforce_eager: bool = False,
                 peers: Peers | None = None):
        self.model, self.config, self.block_size = model, model.config, block_size
        self.num_blocks, self.num_slots = num_blocks, num_slots
        self.device = model.norm.weight.device
        self.asynchronous = self.device.type == "cuda"  # `run` only queues the work
        self.peers = peers  # those that share its experts, and take part in every step
        self.graphs = Graphs(self, Cuda()) if self.asynchronous and not enforce_eager else None
        self.newest = torch.zeros(num_slots + 1, dtype=torch.int64, device=self.device)  # token of each slot
        self.engram = None
        if self.config.engram_layer_ids:
            self.folding = torch.from_numpy(model.folding).to(self.device)
            self.engram = engram or Placement(self.config, self.device).serve(model)  # where its tables are
        self.replay, self.keep = replay, keep or self.config.sliding_window + 2 * pools.backtrack(self.config)
        if replay != "off":
            self._check_replay()
        self.memory = pools.allocate(self.config, model.numerics, num_blocks=num_blocks,
                                     block_size=block_size, num_slots=num_slots, device=self.device,
                                     drafts=drafts, cache_storage=cache_storage)
        self.rows_per_round = 1 + self.config.dspark_block_size if drafts else 1  # of a decoding sequence

    def _check_replay(self) -> None:
        need = self.config.sliding_window + pools.backtrack(self.config)
        if self.replay not in ("mask", "compact"):
            raise ValueError(f"replay is {self.replay!r}; choose off, mask or compact")
        if self.config.split >= self.config.num_hidden_layers:
            raise ValueError(f"replay is {self.replay!r}, but this model has no decoder layers (ratio 1); "
                             "use 'off'")
        if self.keep < need:
            raise ValueError(f"keep_tokens is {self.keep}; the window and the rows that may be rolled back "
                             f"need {need}")

    @torch.inference_mode()
    def run(self, work: list[Work], copies: Copies | None = None, kind: str | None = None) -> Tensor:
        """Logits, float32 [rows asked for, V], in row order; the caches then hold all new rows.

        `copies` of slots and blocks are made first. kind: "prefill" or "decode" (None: as the rows look).
        """
        if copies:
            self._copy(copies)
        if self.engram is not None:
            self.engram.waits.lookups += sum(w.stop - w.start for w in work)
        longest = self.rows_per_round
        decodes = all(w.start >= w.prompt_len and w.stop - w.start <= longest for w in work)
        decodes = decodes and kind != "prefill"  # of other ranks, where this one has no rows
        with ops.step(kind or ("decode" if decodes else "prefill")):
            logits = self.graphs.decode(work) if self.graphs and decodes else None
            if logits is None:
                step = self.step(work)
                step.run = self.graphs.prefill if self.graphs and not decodes else directly
                logits = self.model(step, self.memory)
            return logits

    def placeholder(self) -> Work:
        """A row that fills up a step: in the reserved slot and block."""
        return Work(0, [0], [self.config.pad_token_id or 0], 0, 1, 0)

    def warm_up(self, rows: int, requests: int, length: int) -> None:
        """Take steps of all kinds in the reserved slot and block, so that few kernels are left to compile.

        rows: most of a prompt; requests: most that decode; length: positions that the longest has by then.
        """
        def work(count: int, stop: int, prompt_len: int) -> Work:
            blocks, ids = [0] * -(-stop // self.block_size), [self.config.pad_token_id or 0] * stop
            return Work(0, blocks, ids, stop - count, stop, prompt_len)

        longest = self.rows_per_round
        for count in _spread(min(rows, length)):
            for stop in {count, length}:
                self.run([work(count, stop, stop)], kind="prefill")
        for count in _spread(requests):
            for stop in {longest, max(longest, length)}:
                for each in {1, longest}:
                    self.run([work(each, stop, 0)] * count, kind="decode")
            if longest > 1:
                self.propose([0] * count, [length - 1] * count, [0] * count)

    def propose(self, slots: list[int], starts: list[int], newest: list[int],
                pick: Callable[[Tensor], Tensor] = likeliest) -> tuple[Tensor, Tensor, Tensor]:
        """What the draft says follows the newest token of each slot, which stands at `starts`.

        Gives tokens [B, G], the logits [B, G, V] that `pick` drew them from, and logits [B, G] of the
        confidence in each. The caches stay as they are.
        """
        return self.draft(send(torch.tensor([slots, starts, newest], dtype=torch.int64), self.device), pick)

    @torch.inference_mode()
    def draft(self, rounds_3B: Tensor, pick: Callable[[Tensor], Tensor] = likeliest
              ) -> tuple[Tensor, Tensor, Tensor]:
        """`propose` where the device has slots, starts and newest tokens already."""
        greedy, shape = pick is likeliest, (rounds_3B.shape[1], self.rows_per_round - 1)
        with ops.step("decode"):
            found = self.graphs.draft(rounds_3B, greedy) if self.graphs else None
            if greedy and found:
                return found
            x, base = found or self.model.guess(self.block(rounds_3B), self.memory)
            return self.model.walk(x, base, rounds_3B[2], shape, pick)

    def block(self, rounds_3B: Tensor) -> Step:
        """Rows [newest token, noise ...] of slots whose newest token stands at a start.

        All see the window before them and the whole block.
        """
        config, ring = self.config, pools.window_ring(self.config)
        (slot, start, newest), (B, G) = rounds_3B[..., None], (rounds_3B.shape[1], config.dspark_block_size)
        before = start + torch.arange(-config.sliding_window, 0, device=self.device)
        history = torch.where(before < 0, 0, slot * ring + before % ring)
        line = torch.arange(before.numel() + B * G, device=self.device)  # the windows, then the blocks
        seen = torch.where(before < 0, -1, line[: before.numel()].view_as(before))
        read = torch.cat((seen, line[before.numel() :].view(B, G)), dim=1)
        read = read[:, None].expand(-1, G, -1).flatten(0, 1)
        nothing = line[:0]
        plan = RingPlan(read, history.flatten(), nothing, nothing)
        ids = torch.nn.functional.pad(newest, (0, G - 1), value=config.dspark_noise_token_id)
        pos = start + torch.arange(G, device=self.device)
        return self.arrive(Step(ids.flatten(), pos.flatten(), {}, (plan, None)), unknown=False)

    def publish(self, slots: list[int], ids: Tensor) -> None:
        """Note the newest token of each slot, for steps that are planned before it is known."""
        self.newest[send(torch.tensor(slots), self.device)] = ids

    def _copy(self, copies: Copies) -> None:
        slots, blocks = pools.slot_tables(self.memory), pools.block_tables(self.memory)
        pools.copy(slots, copies.slots, self.num_slots)
        pools.copy(blocks, copies.blocks, self.num_blocks)
        pools.wipe(slots, copies.wipe_slots, self.num_slots)
        pools.wipe(blocks, copies.wipe_blocks, self.num_blocks)

    def step(self, work: list[Work]) -> Step:
        """The Step of a list of work: everything that layers need to know about these rows."""
        step = self.arrive(send_all(self.lay_out(work), self.device), any(w.unknown for w in work))
        if step.gram is not None:
            step.found = self.engram.fetch(step.gram)
        return step

    def lay_out(self, work: list[Work]) -> Step:
        """The same on the host, before it arrives: no angles; Pages for segments, a Look for the windows of
        many rows, first positions for the turns of groups; an id below 0 is the newest one of that slot.
        """
        at = Layout(*(np.array([getattr(w, name) for w in work], dtype=np.int64)
                      for name in ("start", "stop", "seq_slot")))
        at.fresh = np.array([w.start if w.fresh is None else w.fresh for w in work], dtype=np.int64)
        at.saves = [(i, position, slot) for i, w in enumerate(work) for position, slot in w.saves]
        floor = np.where(at.fresh > at.starts, at.starts, 0)  # first position whose windows are there
        tail_start = np.array([max(w.prompt_len - self.keep, 0) for w in work], dtype=np.int64)
        late_floor = np.maximum(floor, tail_start) if self.replay != "off" else floor
        step = self._rows(work, at, floor, late_floor)
        step.groups = {r: self._groups(work, at, r) for r in self._ratios}
        step.wanted = self._wanted(work, at)
        if self.replay == "compact" and (at.starts < tail_start).any():
            kept = np.flatnonzero(at.pos >= tail_start[at.owner])
            late = Layout(np.minimum(np.maximum(at.starts, tail_start), at.stops), at.stops, at.slots)
            tail = self._rows(work, late, floor, late_floor)
            tail.wanted = self._wanted(work, late)
            step.tail = _tensor(kept), tail
        return step

    def arrive(self, step: Step, unknown: bool) -> Step:
        """What `lay_out` gave, on the device, with the rest; `unknown`: ids below 0 may be among it."""
        if unknown:
            step = self._known(step)
        rope = {flag: turns(step.pos, getattr(self.model, f"frequency_{flag:d}")) for flag in (False, True)}
        early, late = (plan and _seen(plan) for plan in step.windows)
        groups = {r: replace(group, turn=turns(group.turn, self.model.frequency_1))
                  for r, group in step.groups.items()}
        segments = {r: [pages.segment(self.block_size // r) for pages in parts]
                    for r, parts in step.segments.items()}
        tail = step.tail and (step.tail[0], self.arrive(step.tail[1], unknown))
        return replace(step, rope=rope, windows=(early, late or early), groups=groups, segments=segments,
                       tail=tail)

    def _known(self, step: Step) -> Step:
        """With tokens that only the device knows, also where rows depend on them."""
        config, gram, image = self.config, step.gram, step.image
        ids = torch.where(step.ids < 0, self.newest[-step.ids.clamp(max=0)], step.ids)
        if config.image_token_id is not None:
            image = ids == config.image_token_id
        if gram is not None:
            gram = torch.cat((self.folding[ids][:, None], gram[:, 1:]), dim=1)
        if gram is not None and image is not None:
            gram = torch.where(image[:, None], self.folding[config.engram_pad_token_id], gram)
        return replace(step, ids=ids, image=image, gram=gram)

    @property
    def _ratios(self) -> set[int]:
        return {self.config.ratio(s) for s in self.config.kv_source_layer_ids}

    def _rows(self, work: list[Work], at: Layout, floor: np.ndarray, late_floor: np.ndarray) -> Step:
        """What concerns the rows themselves; floors: first position that windows show, per work."""
        config = self.config
        around, place = _ids(work, at, config.engram_max_ngram_size - 1 if config.engram_layer_ids else 0)
        ids = around[place]
        image = ids == config.image_token_id if config.image_token_id is not None else ids < 0
        unknown = [i for i, w in enumerate(work) if w.unknown]
        ids[at.offsets[1:][unknown] - 1] = -at.slots[unknown]
        step = Step(_tensor(ids), _tensor(at.pos), {}, self._windows(at, floor, late_floor),
                    split=config.split)
        step.image = _tensor(image) if image.any() else None
        step.segments = self._segments(work, at)
        if config.engram_layer_ids:
            step.gram = self._grams(around, place)
        return step

    def _windows(self, at: Layout, floor: np.ndarray, late_floor: np.ndarray
                 ) -> tuple[RingPlan, RingPlan | None]:
        """Plans of encoder and decoder layers; None where these see as far back as those."""
        return self._window(at, floor), None if (floor == late_floor).all() else self._window(at, late_floor)

    def _window(self, at: Layout, floor: np.ndarray) -> RingPlan:
        window, ring = self.config.sliding_window, pools.window_ring(self.config)
        plan = ring_plan(at, ring, window, at.owner, at.pos, floor[at.owner], at.saves)
        return plan if len(at.pos) > MANY_ROWS else _seen(plan)

    def _groups(self, work: list[Work], at: Layout, ratio: int) -> GroupPlan:
        first, stop = at.fresh // ratio, at.stops // ratio  # entries completed by these rows
        count = stop - first
        owner = np.repeat(np.arange(len(work)), count)
        entry = np.arange(len(owner)) - (count.cumsum() - count)[owner] + first[owner]
        per_block = self.block_size // ratio
        begin, end = first // per_block, np.where(count > 0, -(-stop // per_block), first // per_block)
        spans = zip(work, begin.tolist(), end.tolist(), strict=True)
        held = [block for one, i, j in spans for block in one.blocks[i:j]]
        offset = (end - begin).cumsum() - (end - begin) - begin
        block = np.array(held, dtype=np.int64)[offset[owner] + entry // per_block]
        ring = None
        if ratio > 1 or not self.config.is_v41:
            members = pools.members(self.config, ratio)
            last = (entry + 1) * ratio - 1
            ring = _seen(ring_plan(at, pools.carry_ring(self.config, ratio), members, owner, last,
                                   np.zeros_like(last), at.saves))
        slots = _tensor(block * per_block + entry % per_block)
        again = (at.fresh > at.starts).any()
        rows = np.flatnonzero(at.pos >= at.fresh[at.owner]) if again else None
        return GroupPlan(ring, _tensor(entry * ratio), slots, _tensor(rows))

    def _segments(self, work: list[Work], at: Layout) -> dict[int, list[Pages]]:
        """Runs of works with equally many rows; each with the blocks of all visible entries, by ratio."""
        found: dict[int, list[Pages]] = {ratio: [] for ratio in self._ratios}
        for i, j in _runs(at.counts):
            rows, shape = slice(*at.offsets[[i, j]].tolist()), (j - i, int(at.counts[i]) if work else 1)
            seen = at.pos[rows].reshape(shape) + 1
            width = -(-int(seen.max(initial=0)) // self.block_size)
            held = list(itertools.zip_longest(*(w.blocks[:width] for w in work[i:j]), fillvalue=0))
            blocks = _tensor(np.array(held, dtype=np.int64).reshape(len(held), j - i).T)
            for ratio, parts in found.items():
                visible = seen // ratio
                parts.append(Pages(rows, shape, _tensor(visible), blocks, int(visible.max(initial=0))))
        return found

    def _grams(self, ids: np.ndarray, place: np.ndarray) -> Tensor:
        """Folded n-grams [T, Q] per row, newest first; what lies before the start or an image is filler."""
        config, folding = self.config, self.model.folding
        folded = np.where((ids < 0) | (ids == config.image_token_id), -1, folding[ids])
        gram = folded[place[:, None] - np.arange(config.engram_max_ngram_size)]
        dead = np.logical_or.accumulate(gram < 0, axis=1)
        return _tensor(np.where(dead, folding[config.engram_pad_token_id], gram))

    def _wanted(self, work: list[Work], at: Layout) -> Tensor:
        rows = np.array([{"none": 0, "last": 1, "all": len(at.pos)}[w.want] for w in work], dtype=np.int64)
        return _tensor(np.flatnonzero(at.pos >= (at.stops - rows)[at.owner]))
