"""Train the demo's tokenizer: byte-level BPE over conversations as they are rendered.

Idea
    The prompt format has long fixed parts (the tool instructions alone are about 1,050 characters), so the
    corpus is rendered conversations, not bare text.  Digits stay single tokens.  Ids: bos 0, eos 1, pad 2,
    the other control tokens, 256 bytes, merges; the image token keeps 4094, and 4095 (the draft's noise) has
    no spelling.

Shapes
    Writes tokenizer.json, tokenizer_config.json and generation_config.json into the preset's folder.

Errors
    None of its own; the same seed gives the same file.

Source
    The `tokenizers` package's BPE trainer; model.md 7.2 for the ids.

Try
    python -m dskit.train.tokenizer dskit/presets/demo
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace

from tokenizers import Tokenizer as Bpe
from tokenizers import models, pre_tokenizers, trainers

from dskit import chat
from dskit.train import skills
from dskit.train.words import load

IMAGE_ID = 4094
WORD_WEIGHT = 8  # how often the corpus repeats the list, so that merges go to words more than to coined names
COUNTS = {"define": 3000, "arithmetic": 600, "tools": 4000, "recall": 400, "json": 2500}
COUNTS |= {"greet": 300, "about": 300, "decline": 600}


def corpus(seed: int = 0) -> Iterator[str]:
    """Plain text between control tokens of rendered conversations, and every word with its definition."""
    config = SimpleNamespace(bos_token_id=0, eos_token_id=1, pad_token_id=2, vocab_size=512)
    letters = chat.Tokenizer.of_bytes(config)
    control = [letters.specials[s] for s in chat.SPECIALS]
    rng = Random(seed)
    for entry in load():
        yield from [f" {entry.word}", entry.definition] * WORD_WEIGHT
    for skill, count in COUNTS.items():
        for _ in range(count):
            item = skills.sample(skill, rng)
            ids = chat.render(item.body, letters).ids + chat.answer_ids(item.answer, letters, item.thinking)
            yield from _plain(ids, control, letters)


def _plain(ids: list[int], control: list[int], letters: chat.Tokenizer) -> Iterator[str]:
    start = 0
    for end, token in enumerate(ids):
        if token in control:
            yield letters.decode(ids[start:end])
            start = end + 1


def train(texts: Iterator[str]) -> str:
    """The contents of tokenizer.json."""
    others = [s for s in chat.SPECIALS if s not in (chat.BOS, chat.EOS, chat.IMAGE)]
    control = {s: i for i, s in enumerate((chat.BOS, chat.EOS, chat.PAD, *others))}
    size = IMAGE_ID - len(control)
    bpe = Bpe(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    learned = json.loads(bpe.to_str())["model"]
    order = sorted(learned["vocab"], key=learned["vocab"].get)
    vocab = {spelling: len(control) + i for i, spelling in enumerate(order)}
    control[chat.IMAGE] = IMAGE_ID
    return chat.tokenizer_json(vocab | control, [tuple(pair) for pair in learned["merges"]], control)


def main() -> None:
    """Write the three files into the folder named on the command line."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(train(corpus()), encoding="utf-8")
    names = {"bos_token": chat.BOS, "eos_token": chat.EOS, "pad_token": chat.PAD, "model_max_length": 16384}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        **names,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    sampling = {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "do_sample": False,
        "temperature": 0.0,
    }
    (folder / "generation_config.json").write_text(json.dumps(sampling, indent=2) + "\n")
    print(f"{folder}: {chat.Tokenizer(folder).vocab_size} entries")


if __name__ == "__main__":
    main()
