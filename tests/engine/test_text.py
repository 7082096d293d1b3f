"""Ids become text as they arrive: nothing given out ever changes, whatever the borders of the tokens."""

import random

import pytest

from dskit.engine.text import TextStream

SAMPLES = [
    "plain",
    "Smørrebrød på brygga",
    "日本語のテキスト",
    "😀👩‍👩‍👧 family",
    "mixed é😀x",
    "\ufffd as a character",
]


def decode(ids):
    return bytes(ids).decode("utf-8", errors="replace")


def pieces(stream, ids):
    """Everything given out, piece by piece, up to a stop string."""
    out = []
    for token in ids:
        text, stopped = stream.push(token)
        out.append(text)
        if stopped:
            return out, True
    return [*out, stream.finish()], False


@pytest.mark.parametrize("text", SAMPLES)
def test_characters_come_whole(text):
    out, _ = pieces(TextStream(decode), list(text.encode()))
    assert "".join(out) == text
    assert all("\ufffd" not in piece for piece in out) or "\ufffd" in text


@pytest.mark.parametrize("text", SAMPLES)
def test_half_a_character_at_the_end_is_shown_as_broken(text):
    ids = list(text.encode())[:-1]
    stream = TextStream(decode)
    assert "".join(pieces(stream, ids)[0]) == decode(ids) == stream.text


def test_random_bytes_decode_as_a_whole():
    rng = random.Random(0)
    for _ in range(200):
        ids = [
            rng.choice([rng.randrange(256), rng.randrange(0x80, 0xF8), 65]) for _ in range(rng.randrange(40))
        ]
        assert "".join(pieces(TextStream(decode), ids)[0]) == decode(ids)


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("one END two", ("END",), "one "),
        ("one EN two", ("END",), "one EN two"),
        ("aab", ("ab",), "a"),
        ("aaab", ("aab",), "a"),
        ("xyz", ("xyz!", "yz"), "x"),
        ("é日END", ("日END",), "é"),
        ("END", ("END",), ""),
        ("ends with EN", ("END",), "ends with EN"),
    ],
)
def test_stop_strings_across_tokens(text, stops, shown):
    stream = TextStream(decode, stops)
    out, stopped = pieces(stream, list(text.encode()))
    assert "".join(out) == shown == stream.text
    assert stopped == (shown != text)
    assert stream.finish() == ""


def test_stop_strings_against_a_plain_search():
    """The text given out is what lies before the first stop string to be complete, for every cut into
    tokens."""
    rng = random.Random(1)
    for _ in range(500):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 14)))
        stops = tuple(
            "".join(rng.choice("ab") for _ in range(rng.randrange(1, 5))) for _ in range(rng.randrange(1, 3))
        )
        ends = [text.find(s) + len(s) for s in stops if s in text]
        first = min(ends, default=len(text) + 1)
        shown = min((text[:first].find(s) for s in stops if s in text[:first]), default=len(text))
        out, stopped = pieces(TextStream(decode, stops), list(text.encode()))
        assert ("".join(out), stopped) == (text[:shown], bool(ends)), (text, stops)


def test_what_may_still_change_is_held_back():
    stream = TextStream(decode, ("stop",))
    assert [stream.push(b)[0] for b in b"a st"] == ["a", " ", "", ""]
    assert stream.push(ord("y"))[0] == "sty"
