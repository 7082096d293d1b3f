"""The skills: right answers, every setting covered, and nothing shared between training and evaluation."""

import json
import re
from random import Random

import pytest

from dskit.train import skills
from dskit.train.skills import arithmetic, draw, talk
from dskit.train.words import WORDS, load

HELD_OUT = [skill for skill in skills.SKILLS if skill != "define"]


def items(skill, n, split="train", seed=0, **kw):
    """Items of one skill."""
    rng = Random(seed)
    if skill == "recall":
        kw.setdefault("tokens", 300)
    return [skills.sample(skill, rng, split, **kw) for _ in range(n)]


def evaluation_strings(item):
    """Every name-like word, phrase and number of a body that belongs to evaluation by its hash."""
    text = json.dumps(item.body["messages"], ensure_ascii=False)
    return {v for v in re.findall(r"\b(?:[A-Z][a-z]+|\d{3,6})\b", text) if draw.split_of(v) == "eval"}


def check_overlap(skill, n):
    seen = {item.key for item in items(skill, n)}
    asked = {item.key for item in items(skill, n // 4, "eval", plain=True)}
    assert len(seen & asked) == 0 and len(asked) > n // 40


@pytest.mark.parametrize("skill", HELD_OUT)
def test_no_item_is_in_both_splits(skill):
    check_overlap(skill, 1500)


@pytest.mark.slow
@pytest.mark.parametrize("skill", HELD_OUT)
def test_no_item_is_in_both_splits_at_full_count(skill):
    check_overlap(skill, 40_000)


def test_names_and_codes_of_evaluation_never_occur_in_training():
    rng = Random(1)
    for make in (draw.person, draw.city, draw.title, draw.message):
        seen = {make(rng, "train") for _ in range(3000)}
        assert not seen & {make(rng, "eval") for _ in range(600)}
    assert not {draw.number(rng, "train", 3) for _ in range(3000)} & {
        draw.number(rng, "eval", 3) for _ in range(600)
    }
    names = set(draw.PEOPLE) | set(draw.CITIES)
    for skill in ("recall", "json"):  # in their own turns, where such words are values
        for item in items(skill, 300, plain=True):
            assert not evaluation_strings(item) & names


def test_items_follow_from_the_seed():
    for skill in skills.MAKERS:
        assert items(skill, 20, seed=3) == items(skill, 20, seed=3)
        assert items(skill, 20, seed=3) != items(skill, 20, seed=4)


def test_every_word_can_be_asked_in_evaluation():
    asked = {item.key for item in items("define", 40_000, "eval", plain=True)}
    assert asked == {entry.word for entry in load()}


def test_definitions_are_the_list_s():
    known = {entry.word: entry.definition for entry in load()}
    for item in items("define", 200):
        assert item.answer["content"] == known[item.key]
        assert item.key in item.body["messages"][-1]["content"]


def test_word_list():
    lines = WORDS.read_text().splitlines()
    assert len(lines) >= 3000 and len({line.split("\t")[0] for line in lines}) == len(lines)
    for word, pos, definition in load():
        assert re.fullmatch("[a-z]{3,12}", word) and pos in ("noun", "verb", "adjective", "adverb")
        assert (
            8 <= len(definition) <= 70
            and not set(definition) & set('();:"')
            and word not in definition.split()
        )
    assert (
        "WordNet 3.0 Copyright 2006 by Princeton University"
        in WORDS.with_name("WORDNET-LICENSE.txt").read_text()
    )


@pytest.mark.parametrize("op", "+-x")
def test_steps_are_right(op):
    rng = Random(5)
    pairs = [(rng.randrange(1000), rng.randrange(1000)) for _ in range(2000)] + [
        (0, 0),
        (999, 999),
        (0, 999),
        (999, 0),
    ]
    for a, b in pairs:
        lines = arithmetic.steps(a, op, b).split("\n")
        assert int(lines[-1]) == arithmetic.result(a, op, b)
        for line in lines[:-1]:
            if "=" in line and line != "=":
                check_line(line)


def check_line(line):
    """Every equation of a step holds: 7x5=35+0=35+3=38 from left to right, 4-8-0=6b1 with its borrow."""
    parts = line.split("=")
    for left, right in zip(parts, parts[1:], strict=False):
        expected = eval(re.sub(r"\b0+(\d)", r"\1", left.replace("x", "*")))  # noqa: S307
        digit, borrowed, borrow = right.partition("b")
        found = int(digit) - 10 * int(borrow) if borrowed else int(re.match(r"\d+", right).group())
        assert found == expected, line


def test_arithmetic_refuses_what_it_was_not_made_for():
    with pytest.raises(ValueError, match="0..999"):
        arithmetic.steps(1000, "+", 1)
    with pytest.raises(ValueError, match="operator"):
        arithmetic.steps(1, "/", 1)


def test_arguments_and_fields_are_copied_from_the_question():
    for item in items("tools", 300):
        offered = {tool["function"]["name"]: tool["function"] for tool in item.body["tools"]}
        for call in item.answer.get("tool_calls", ()):
            function, asked = call["function"], item.body["messages"][-1]["content"]
            arguments = json.loads(function["arguments"])
            schema = offered[function["name"]]["parameters"]
            assert set(schema["required"]) <= set(arguments) <= set(schema["properties"])
            for value in arguments.values():
                assert (json.dumps(value) if isinstance(value, bool) else str(value)) in asked
    for item in items("json", 300):
        for value in json.loads(item.answer["content"]).values():
            shown = json.dumps(value) if isinstance(value, bool) else str(value)
            assert shown in item.body["messages"][-1]["content"]


def test_recall_asks_what_was_told():
    told = 0
    for item in items("recall", 200):
        value = item.answer["content"].rstrip(".").split(" is ")[-1]
        earlier = " ".join(m["content"] for m in item.body["messages"][:-1])
        if not item.answer["content"].startswith("You did not"):
            assert value in earlier
            told += 1
    assert 150 < told < 200  # the rest asks for what nobody told
    for item in items("recall", 30, "eval", plain=True, tokens=1000):
        value = item.answer["content"].rstrip(".").split(" is ")[-1]
        assert value in item.body["messages"][0]["content"]


def test_every_setting_occurs():
    seen = [item for skill in skills.MAKERS for item in items(skill, 150)]
    assert {item.body.get("reasoning_effort") for item in seen} == {None, "none", "low", "high", "max"}
    found = {(i.skill, i.body["messages"][0]["role"] == "system", bool(i.body.get("tools"))) for i in seen}
    assert {f[:2] for f in found} == {(skill, system) for skill in skills.MAKERS for system in (True, False)}
    assert len({f[0] for f in found if f[2]}) >= 7  # recall alone never offers tools


def test_same_question_same_answer():
    known = {}
    for skill in ("define", "arithmetic", "json", "greet", "about", "decline"):
        for item in items(skill, 3000):
            asked = skill, item.thinking, item.body["messages"][-1]["content"]
            answer = item.answer["content"], item.answer["reasoning_content"]
            assert known.setdefault(asked, answer) == answer


def test_declines_name_the_skills():
    answers = {item.answer["content"] for item in items("decline", 300)}
    assert answers == {talk.DECLINE, talk.UNKNOWN, talk.TOO_HARD}
    assert talk.SKILLS_SENTENCE in talk.DECLINE


def test_unknown_skill_or_split():
    with pytest.raises(ValueError, match="poetry"):
        skills.sample("poetry", Random(0))
    with pytest.raises(ValueError, match="test"):
        skills.sample("define", Random(0), "test")
