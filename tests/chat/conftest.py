"""The two kinds of tokenizers."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import dskit
from dskit import chat

DEMO = Path(dskit.__file__).parent / "presets" / "demo"


@pytest.fixture(scope="module")
def demo():
    """The shipped tokenizer."""
    return chat.Tokenizer(DEMO)


@pytest.fixture(scope="module")
def letters():
    """The byte tokenizer of `tiny`."""
    return of_bytes(vocab_size=512, image_token_id=510)


def of_bytes(vocab_size, image_token_id=None):
    """A byte tokenizer for a configuration with the usual first ids."""
    ids = dict(bos_token_id=0, eos_token_id=1, pad_token_id=2, image_token_id=image_token_id)
    return chat.Tokenizer.of_bytes(SimpleNamespace(vocab_size=vocab_size, **ids))
