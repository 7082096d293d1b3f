"""Packing: whole conversations at aligned positions, the right targets, the same stream for any workers."""

from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest

import dskit
from dskit import chat
from dskit.train import data, skills

DEMO = Path(dskit.__file__).parent / "presets" / "demo"


@pytest.fixture(scope="module")
def tokenizer():
    """The demo's."""
    return chat.Tokenizer(DEMO)


@pytest.fixture(scope="module")
def packed(tokenizer):
    """One batch."""
    return data.batch(tokenizer, seed=1, index=0, seq_len=1024, rows=6)


@pytest.mark.parametrize("skill", list(skills.MAKERS))
def test_targets_are_what_the_assistant_says(tokenizer, skill):
    rng = Random(2)
    for _ in range(40):
        item = data.sample(skill, rng, tokens=250 if skill == "recall" else None)
        ids, said = data.encode(item, tokenizer)
        prompt = chat.render(item.body, tokenizer).ids
        answer = chat.answer_ids(item.answer, tokenizer, item.thinking)
        assert ids == prompt + answer and all(said[len(prompt) :])
        assistants = [m for m in item.body["messages"] if m["role"] == "assistant"]
        assert sum(t == tokenizer.eos_id and s for t, s in zip(ids, said, strict=True)) == len(assistants) + 1
        given = {tokenizer.specials[s] for s in (chat.BOS, chat.USER, chat.SYSTEM, chat.ASSISTANT)}
        assert not given & {t for t, s in zip(ids, said, strict=True) if s}


def test_answers_read_back(tokenizer):
    rng = Random(3)
    for skill in skills.MAKERS:
        for _ in range(25):
            item = data.sample(skill, rng, tokens=200 if skill == "recall" else None)
            prompt = chat.render(item.body, tokenizer)
            message = chat.parse_ids(
                prompt, chat.answer_ids(item.answer, tokenizer, item.thinking), tokenizer
            )
            assert (message["content"] or "").strip() == item.answer["content"]
            assert (message.get("reasoning_content") or None) == (
                item.answer["reasoning_content"] if item.thinking else None
            )
            calls = [c["function"] for c in message.get("tool_calls") or ()]
            assert calls == [c["function"] for c in item.answer.get("tool_calls", ())]


def test_rows(tokenizer, packed):
    ids, loss, start = packed.ids, packed.loss, packed.doc_start
    assert ids.shape == loss.shape == start.shape == (6, 1024) and ids.dtype == start.dtype == np.int32
    position = np.arange(1024)
    for row in range(6):
        begins = sorted(set(start[row]))
        assert (
            all(b % data.ALIGN == 0 for b in begins)
            and (np.diff(start[row]) >= 0).all()
            and (start[row] <= position).all()
        )
        documents = [b for b in begins if ids[row, b] != tokenizer.pad_id]
        assert len(documents) >= 3 and (ids[row, documents] == tokenizer.bos_id).all()
        assert (ids[row] == tokenizer.bos_id).sum() == len(documents)
    targets = ids[:, 1:][loss[:, :-1]]
    assert not loss[:, -1].any() and tokenizer.pad_id not in targets and tokenizer.bos_id not in targets
    assert (start[:, 1:][loss[:, :-1]] == start[:, :-1][loss[:, :-1]]).all()
    assert (ids != tokenizer.pad_id).mean() > 0.95 and 0.15 < loss.mean() < 0.6
    assert ids.min() >= 0 and ids.max() < 4096


def test_a_batch_depends_on_seed_and_index_alone(tokenizer):
    mix = {"define": 1.0, "arithmetic": 1.0}
    alone = list(islice(data.batches(tokenizer, 7, 512, 2, mix), 4))
    resumed = next(data.batches(tokenizer, 7, 512, 2, mix, start=3))
    assert (alone[3].ids == resumed.ids).all() and not (alone[2].ids == resumed.ids).all()
    stream = data.batches(tokenizer, 7, 512, 2, mix, workers=2)
    for wanted, found in zip(alone, islice(stream, 4), strict=True):
        assert wanted.index == found.index and (wanted.ids == found.ids).all()
    stream.close()


def test_errors(tokenizer):
    with pytest.raises(ValueError, match="poetry"):
        data.batch(tokenizer, 0, 0, 512, 1, {"poetry": 1.0})
    with pytest.raises(ValueError, match="seq_len 100"):
        data.batch(tokenizer, 0, 0, 100, 1)
    with pytest.raises(RuntimeError, match="poetry"):
        next(data.batches(tokenizer, 0, 512, 1, {"poetry": 1.0}, workers=1))
