"""Driving the runner by hand: which rows of which sequence go through the model in which step.

Blocks and slots are dealt out shuffled and are never cleaned, so that a sequence which reads what another
left behind is noticed.

Shapes: logits float32 [T, V] per sequence.
Errors: none of its own.
Source: engine.md section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from dskit.engine import pools
from dskit.engine.runner import ModelRunner, Work
from dskit.layers.rope import turns
from dskit.layers.swa import RingPlan
from dskit.model import Model, Step

Schedule = Iterable[dict[int, int]]  # per step: sequence -> how many of its rows


def runner(
    model: Model, *, sequences: int = 8, length: int = 256, blocks_of: int = 3, **settings
) -> ModelRunner:
    """A runner for `sequences` sequences of `length` tokens, with `blocks_of` whole groups to a block."""
    size = math.lcm(*[r for r in model.config.compress_ratios if r], 1) * blocks_of
    return ModelRunner(
        model, num_blocks=sequences * -(-length // size), block_size=size, num_slots=sequences, **settings
    )


class Deal:
    """A hand of blocks and a slot for each sequence."""

    def __init__(self, on: ModelRunner, prompts: list[list[int]], seed: int = 0):
        r = torch.Generator().manual_seed(seed)
        window = on.memory.windows[0].shape[0]
        pool = next(iter(on.memory.entries.items()), None)
        ring = on.config.sliding_window + max(6, on.config.dspark_block_size + 1)
        slots = (torch.randperm(window // ring - 1, generator=r) + 1).tolist()
        blocks = []
        if pool is not None:
            count = pool[1].shape[0] * on.config.ratio(pool[0]) // on.block_size - 1
            blocks = (torch.randperm(count, generator=r) + 1).tolist()
        self.slots, self.blocks = slots[: len(prompts)], []
        for prompt in prompts:
            need = -(-len(prompt) // on.block_size) if blocks else 0
            self.blocks.append([blocks.pop() for _ in range(need)])


def play(
    on: ModelRunner,
    prompts: list[list[int]],
    schedule: Schedule,
    *,
    seed: int = 0,
    prompt_lens: list[int] | None = None,
) -> list[Tensor]:
    """Logits of every row of every prompt, computed in the steps of the schedule."""
    deal, done = Deal(on, prompts, seed), [0] * len(prompts)
    found: list[list[Tensor]] = [[] for _ in prompts]
    for step in schedule:
        work = [
            Work(
                deal.slots[s],
                deal.blocks[s],
                prompts[s],
                done[s],
                done[s] + count,
                prompt_lens[s] if prompt_lens else len(prompts[s]),
                "all",
            )
            for s, count in step.items()
        ]
        logits = on.run(work)
        counts = list(step.values())
        if len(logits) != sum(counts):  # bounded replay dropped the rows before the tail of a prompt
            counts = [min(w.stop - w.start, max(0, w.stop - max(w.prompt_len - on.keep, 0))) for w in work]
        for s, part in zip(step, logits.split(counts), strict=True):
            found[s].append(part)
            done[s] += step[s]
    assert done == [len(p) for p in prompts]
    return [torch.cat(parts) for parts in found]


# ---- schedules -------------------------------------------------------------------------------------------


def at_once(prompts: list[list[int]]) -> Schedule:
    """All rows of all sequences in one step."""
    yield {s: len(p) for s, p in enumerate(prompts)}


def one_by_one(prompts: list[list[int]]) -> Schedule:
    """Each sequence alone, in one step."""
    for s, p in enumerate(prompts):
        yield {s: len(p)}


def token_by_token(prompts: list[list[int]]) -> Schedule:
    """One row of every unfinished sequence per step."""
    for t in range(max(map(len, prompts))):
        yield {s: 1 for s, p in enumerate(prompts) if t < len(p)}


def chunks(prompts: list[list[int]], size: int) -> Schedule:
    """`size` rows of every unfinished sequence per step."""
    for t in range(0, max(map(len, prompts)), size):
        yield {s: min(size, len(p) - t) for s, p in enumerate(prompts) if t < len(p)}


def ragged(prompts: list[list[int]], seed: int, longest: int = 17) -> Schedule:
    """Random sequences per step, in random order, with random numbers of rows: often one, as in decoding."""
    r = torch.Generator().manual_seed(seed)
    left = {s: len(p) for s, p in enumerate(prompts)}
    while left:
        who = [s for s in list(left) if torch.rand((), generator=r) < 0.7] or list(left)[:1]
        who = [who[i] for i in torch.randperm(len(who), generator=r).tolist()]
        step = {}
        for s in who:
            wide = torch.rand((), generator=r) < 0.5
            step[s] = min(left[s], int(torch.randint(1, longest, (), generator=r)) if wide else 1)
        yield step
        left = {s: n - step.get(s, 0) for s, n in left.items() if n > step.get(s, 0)}


def draft_step(model, memory, token: int, P: int) -> Step:
    """Rows [token, noise ...] at positions P ..; all see the ring of slot 1 and all of the block."""
    c, B = model.config, model.config.dspark_block_size
    ring = pools.window_ring(c)
    before = [ring + t % ring for t in range(max(0, P - c.sliding_window), P)]
    nothing = torch.empty(0, dtype=torch.long)
    plan = RingPlan(torch.arange(len(before) + B).expand(B, -1), torch.tensor(before), nothing, nothing)
    pos = torch.arange(P, P + B)
    rope = {flag: turns(pos, getattr(model, f"frequency_{flag:d}")) for flag in (False, True)}
    return Step(torch.tensor([token] + [c.dspark_noise_token_id] * (B - 1)), pos, rope, (plan, plan))
