"""Training batches: conversations packed into rows, with what may be learned marked.

Idea
    Each batch is a function of (seed, index) alone, so a run resumes anywhere and any number of workers gives
    the same stream.  A row holds whole conversations, each starting with bos at a multiple of 8 positions, so
    that no compression group and no candidate block spans two of them.  Everything an assistant says is a
    target, in earlier turns too.

Shapes
    `Batch.ids` int32 [rows, seq_len]; `Batch.loss` bool [rows, seq_len], True at t where token t + 1 is a
    target; `Batch.doc_start` int32 [rows, seq_len], the row position where the conversation of position t
    begins.  A pad that fills up to the next start belongs to its conversation; the pads at a row's end are a
    conversation of their own.

Errors
    ValueError for a row too short, an unknown skill in the mix, or a tokenizer without a pad token.

Source
    dskit/train/skills (what is said), dskit/chat.py (how it is rendered).

Try
    next(batches(Tokenizer(folder), seed=0, seq_len=2048, rows=4, workers=0)).ids
"""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

import numpy as np

from dskit import chat
from dskit.train import skills
from dskit.train.skills import Item, sample

__all__ = ["MIX", "Batch", "Item", "batch", "batches", "encode", "sample"]

# Conversations per hundred (not tokens: a recall conversation is twenty times as long as a definition), by
# the longest row that they are for: short rows hold what is short, long rows mostly recall.
MIXES = {
    512: {"define": 52.0, "arithmetic": 26.0, "json": 12.0, "greet": 3.0, "about": 3.0, "decline": 4.0},
    1024: {"define": 34.0, "arithmetic": 14.0, "tools": 28.0, "recall": 8.0, "json": 10.0, "greet": 2.0,
           "about": 2.0, "decline": 3.0},
    4096: {"define": 20.0, "arithmetic": 5.0, "tools": 10.0, "recall": 55.0, "json": 5.0, "decline": 2.0},
}  # fmt: skip
MIX = MIXES[1024]
ALIGN = 8  # positions: a candidate block of the demo, and four groups of ratio 2
LONGEST, SHORTEST = 3700, 150  # tokens of a recall conversation


@dataclass(frozen=True)
class Batch:
    """Rows of packed conversations (shapes in the module's docstring)."""

    index: int
    ids: np.ndarray
    loss: np.ndarray
    doc_start: np.ndarray


def mix_for(seq_len: int) -> dict[str, float]:
    """The mix of skills for rows of this length."""
    return MIXES[max((length for length in MIXES if length <= seq_len), default=min(MIXES))]


def encode(item: Item, tokenizer: chat.Tokenizer) -> tuple[list[int], list[bool]]:
    """Ids of a conversation with its answer, and which of them an assistant says (its final eos included)."""
    ids = chat.render(item.body, tokenizer).ids + chat.answer_ids(item.answer, tokenizer, item.thinking)
    assistant, eos = tokenizer.specials[chat.ASSISTANT], tokenizer.eos_id
    said, mask, since = False, [], 0
    for position, token in enumerate(ids):
        if token == assistant:
            said, since = True, position
        mask.append(said and position > since + 1)  # the mark and the <think> or </think> after it are given
        said = said and token != eos
    return ids, mask


def batch(
    tokenizer: chat.Tokenizer,
    seed: int,
    index: int,
    seq_len: int,
    rows: int,
    mix: Mapping[str, float] | None = None,
    split: str = "train",
) -> Batch:
    """The batch of one index: conversations put into the fullest row that still has room for them."""
    mix = MIX if mix is None else mix
    unknown = set(mix) - set(skills.MAKERS)
    if unknown or seq_len < 512 or tokenizer.pad_id is None:
        raise ValueError(
            f"unknown skills {sorted(unknown)}, seq_len {seq_len} below 512, or no {chat.PAD} token"
        )
    rng = Random(f"{seed} {index}")
    names, weights = list(mix), list(mix.values())
    ids = np.full((rows, seq_len), tokenizer.pad_id, np.int32)
    loss = np.zeros((rows, seq_len), bool)
    starts = np.zeros((rows, seq_len), np.int32)
    used, misses = [0] * rows, 0
    while misses < 12:
        skill = rng.choices(names, weights)[0]
        length = _length(rng, min(LONGEST, int(0.85 * seq_len))) if skill == "recall" else None
        item = sample(skill, rng, split, tokens=length)
        tokens, said = encode(item, tokenizer)
        fits = [row for row in range(rows) if used[row] + len(tokens) <= seq_len]
        if not fits:
            misses += 1
            continue
        row = max(fits, key=used.__getitem__)
        begin, end = used[row], used[row] + len(tokens)
        ids[row, begin:end] = tokens
        loss[row, begin : end - 1] = said[1:]
        used[row] = end + -end % ALIGN
        starts[row, begin : used[row]] = begin
    for row, end in enumerate(used):
        starts[row, end:] = end
    return Batch(index, ids, loss, starts)


def batches(
    tokenizer: chat.Tokenizer,
    seed: int,
    seq_len: int,
    rows: int,
    mix: Mapping[str, float] | None = None,
    *,
    start: int = 0,
    workers: int = 0,
    ahead: int = 4,
) -> Iterator[Batch]:
    """Batches `start`, `start + 1`, ... for ever; `workers` processes keep `ahead` batches each ready."""
    if not workers:
        index = start
        while True:
            yield batch(tokenizer, seed, index, seq_len, rows, mix)
            index += 1
    context = mp.get_context("spawn")
    queues = [context.Queue(ahead) for _ in range(workers)]
    settings = (tokenizer.json, seed, seq_len, rows, mix, workers)
    processes = [
        context.Process(target=_work, args=(queues[i], start + i, *settings), daemon=True)
        for i in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        turn = 0
        while True:
            found = queues[turn % workers].get()
            if isinstance(found, str):
                raise RuntimeError(f"a data worker failed: {found}")
            yield found
            turn += 1
    finally:
        for process in processes:
            process.terminate()


def _work(
    queue: mp.Queue, index: int, text: str, seed: int, seq_len: int, rows: int, mix: Mapping | None, step: int
) -> None:
    try:
        tokenizer = chat.Tokenizer.of_json(text)
        while True:
            queue.put(batch(tokenizer, seed, index, seq_len, rows, mix))
            index += step
    except Exception as error:  # the parent shows it: a worker's own traceback would be lost
        queue.put(f"{type(error).__name__}: {error}")


def _length(rng: Random, longest: int) -> int:
    return int(SHORTEST * (longest / SHORTEST) ** rng.random())
