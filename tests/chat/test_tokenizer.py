"""The tokenizer: bytes without a file, the demo's own, and control tokens that user text cannot forge."""

import json
import subprocess
import sys

import pytest

from dskit import chat
from tests.chat.conftest import of_bytes

TEXTS = ["Hello, world!", "été 日本 🙂\n\t", "12345 - 6", "", "<think> ｜DSML｜ <｜User｜>", "a" * 300]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(demo, letters, text):
    for tokenizer in (demo, letters):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not set(ids) & set(tokenizer.specials.values())
    assert letters.encode(text) == [3 + byte for byte in text.encode()]


def test_control_tokens_only_when_asked_for(demo):
    assert demo.encode("<think>", specials=True) == [demo.specials["<think>"]]
    assert demo.decode([demo.bos_id, *demo.encode("x"), demo.eos_id], specials=False) == "x"


def test_ids_of_the_presets(demo, letters):
    assert (demo.bos_id, demo.eos_id, demo.pad_id, demo.specials[chat.IMAGE]) == (0, 1, 2, 4094)
    assert demo.vocab_size == 4095 and demo.spelling(4095) is None and demo.decode([4095]) == ""
    assert letters.specials[chat.THINK] == 259 and letters.specials[chat.IMAGE] == 510
    assert len(set(letters.specials.values())) == len(chat.SPECIALS) + 1


def test_digits_are_single_tokens(demo):
    ids = demo.encode("a 4821 and x347+085=0432")
    digits = [demo.decode([i]) for i in ids if any(c.isdigit() for c in demo.decode([i]))]
    assert "".join(digits) == "48213470850432" and all(len(d) == 1 for d in digits)


def test_what_a_tokenizer_refuses(tmp_path, demo):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        chat.Tokenizer(tmp_path)
    damaged = json.loads(demo.json)
    damaged["added_tokens"] = [t for t in damaged["added_tokens"] if t["content"] != "<think>"]
    del damaged["model"]["vocab"]["<think>"]
    with pytest.raises(ValueError, match="<think>"):
        chat.Tokenizer.of_json(json.dumps(damaged))
    with pytest.raises(ValueError, match="vocab_size 270"):
        of_bytes(vocab_size=270)


def test_the_package_needs_no_torch_for_text():
    check = "import sys, dskit.chat; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
