"""The evaluation: judged to the letter, on items that differ, by a perfect and a faulty model."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import dskit
from dskit import chat, evaluate
from dskit.train.skills import SKILLS

DEMO = Path(dskit.__file__).parent / "presets" / "demo"


class Pupil:
    """Answers every `wrong_every`-th item of the evaluation wrongly, the others perfectly."""

    def __init__(self, wrong_every=0, n=8):
        self.tokenizer, self.wrong_every, self.params = chat.Tokenizer(DEMO), wrong_every, []
        self.answers = {}
        for skill in SKILLS:
            for item in evaluate.items(skill, n, 0):
                ids = tuple(chat.render(item.body, self.tokenizer).ids)
                self.answers[ids] = chat.answer_ids(item.answer, self.tokenizer, True)

    def generate(self, prompts, params):
        """One result per prompt."""
        self.params.append(params)
        results = []
        for i, prompt in enumerate(prompts):
            ids = self.answers[tuple(prompt)]
            if self.wrong_every and i % self.wrong_every == 0:
                ids = self.tokenizer.encode("</think>x", specials=True)
            results.append(
                SimpleNamespace(token_ids=ids, text=self.tokenizer.decode(ids), finish_reason="stop")
            )
        return results


def test_a_perfect_model_is_right_everywhere():
    pupil = Pupil()
    report = evaluate.evaluate(pupil, n=8)
    assert list(report["skills"]) == list(SKILLS) and report["model"] == "demo"
    for row in report["skills"].values():
        assert (
            row["n"] == row["correct"] == 8
            and row["rate"] == 1.0
            and 0.6 < row["ci95"][0] < row["ci95"][1] == 1.0
        )
    assert all(p.temperature == 0.0 for p in pupil.params)
    assert json.loads(json.dumps(report)) == report
    assert evaluate.table(report).row_count == 5


def test_mistakes_are_counted_and_kept():
    failures = []
    report = evaluate.evaluate(Pupil(wrong_every=4), n=8, failures=failures)
    assert [row["correct"] for row in report["skills"].values()] == [6] * 5
    assert len(failures) == 10 and all(f["got"]["content"] == "x" for f in failures)


def test_items_are_distinct_and_long_enough():
    tokenizer = chat.Tokenizer(DEMO)
    for skill in SKILLS:
        drawn = evaluate.items(skill, 40, 1)
        assert len({item.key for item in drawn}) == 40 and all(item.thinking for item in drawn)
        for item in drawn[:6]:
            ids = chat.render(item.body, tokenizer).ids
            answer = chat.answer_ids(item.answer, tokenizer, True)
            assert len(answer) <= evaluate.MAX_TOKENS[skill]
            assert skill != "recall" or 1950 <= len(ids) <= 2400


def drawn(skill):
    return evaluate.items(skill, 1, 0)[0]


def test_judging_json_and_calls():
    item = drawn("json")
    value = json.loads(item.answer["content"])
    assert evaluate.right(item, {"content": json.dumps(dict(reversed(value.items())), indent=1)})
    assert not evaluate.right(item, {"content": json.dumps(value | {"more": 1})})
    assert not evaluate.right(item, {"content": json.dumps(value)[:-1]})
    call = drawn("tools").answer["tool_calls"][0]
    right = {"content": "", "tool_calls": [call]}
    assert evaluate.right(drawn("tools"), right)
    assert not evaluate.right(drawn("tools"), {"content": "", "tool_calls": [call, call]})
    assert not evaluate.right(drawn("tools"), {"content": "done"})
    broken = {**call, "function": {**call["function"], "arguments": call["function"]["arguments"][:-1]}}
    assert not evaluate.right(drawn("tools"), {"content": "", "tool_calls": [broken]})
    assert not evaluate.right(drawn("arithmetic"), {"content": drawn("arithmetic").answer["content"] + "0"})


@pytest.mark.parametrize(("left", "right", "equal"), [
    ("1", "1.0", True), ("true", "1", False), ('"1"', "1", False), ("[1, 2]", "[2, 1]", False),
    ("x", "x", False),
    ('{"a": 1, "b": [true]}', '{"b": [true], "a": 1}', True),
])  # fmt: skip
def test_values(left, right, equal):
    assert (
        evaluate._canonical(evaluate._value(left)) == evaluate._canonical(evaluate._value(right))
    ) == equal


def test_interval():
    low, high = evaluate.wilson(95, 100)
    assert low == pytest.approx(0.8883, abs=1e-3) and high == pytest.approx(0.9785, abs=1e-3)
    assert evaluate.wilson(0, 10)[0] == 0.0


def test_errors():
    with pytest.raises(ValueError, match="poetry"):
        evaluate.evaluate(Pupil(n=1), ["poetry"])
    with pytest.raises(ValueError, match="got 0"):
        evaluate.evaluate(Pupil(n=1), n=0)
