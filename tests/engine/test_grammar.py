"""Structured output: every text follows what it was asked to, however it was computed; else the request is
refused."""

import json
import random
import re
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import jsonschema
import pytest

from dskit.engine import grammar
from dskit.engine.seq import Constraint, RequestError, SamplingParams

from .mock import EOS, VOCAB, engine
from .test_draft import Guesser

IDS = [3 + (11 * i * i + 5 * i + i // 7) % 59 for i in range(40)]


def mock(**settings):
    """An engine over a mock with a draft; its letters, from "0" to "o", are its tokens, and "1" the end."""
    tokenizer = SimpleNamespace(spelling=lambda i: chr(48 + i), specials={})
    e = engine(Guesser(4) if settings.get("speculate") else None, **settings)
    e._grammars = grammar.Grammars(tokenizer, VOCAB, [EOS])
    return e


def asking(seed=0, max_tokens=300, **structure):
    return SamplingParams(seed=seed, temperature=1.3, max_tokens=max_tokens, structured_outputs=structure)


# ---- random schemas ----------------------------------------------------------------------------------------


def schema(r: random.Random, depth: int = 0) -> dict:
    """A schema whose texts are short."""
    kinds = ["integer", "number", "string", "pattern", "enum", "boolean", "null"]
    kind = r.choice(kinds + ["object", "array", "anyOf", "object"] * (depth < 2))
    if kind == "integer":
        low = r.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + r.randint(0, 99)}
    if kind == "number":
        return {"type": "number", "minimum": r.randint(-9, 0), "exclusiveMaximum": r.randint(1, 9)}
    if kind == "string":
        return {"type": "string", "minLength": r.randint(0, 3), "maxLength": r.randint(3, 6)}
    if kind == "pattern":
        return {"type": "string", "pattern": r.choice([r"^\d{2}-[a-f]+$", "^(ja|nein)?$", "^[a-zé]{1,3}$"])}
    if kind == "enum":
        return {"enum": r.sample([1, -2.5, "a", "é\n\"", None, True, [1, {"b": 2}], {"k": "v"}], 3)}
    if kind == "anyOf":
        return {"anyOf": [schema(r, depth + 1) for _ in range(r.randint(1, 3))]}
    if kind == "array":
        return {"type": "array", "items": schema(r, depth + 1), "minItems": r.randint(0, 1),
                "maxItems": r.randint(1, 3)}
    if kind == "object":
        names = r.sample(["a", "b", 'quo"te', "ünï", "longer name"], r.randint(1, 4))
        return {"type": "object", "properties": {name: schema(r, depth + 1) for name in names},
                "required": r.sample(names, r.randint(0, len(names))), "additionalProperties": False}
    return {"type": kind}


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_texts_follow_random_schemas(tiny, count):
    """Drawn at temperature 1.3 from random weights: whatever ends by itself is valid; little is cut off.

    Blanks are made rare, since random weights would write little else between two elements.
    """
    schemas = [schema(random.Random(seed)) for seed in range(count)]
    rare, ended = {tiny.tokenizer.encode(blank)[0]: -6 for blank in " \n\r\t"}, 0
    params = [replace(asking(i, 120, json=one), logit_bias=rare) for i, one in enumerate(schemas)]
    results = tiny.generate([IDS[:5]] * count, params)
    for one, result in zip(schemas, results, strict=True):
        assert result.error is None
        if result.finish_reason == "stop":
            jsonschema.Draft202012Validator(one).validate(json.loads(result.text))
            ended += 1
    assert ended > 0.9 * count


def test_patterns_choices_and_grammars(tiny):
    pattern, choices = r"(\d{1,3}\.){3}\d{1,3}|[a-c]+é", ["yes", "no", "no matter"]
    ebnf = 'root ::= "(" root ")" | [xy]'
    asked = [asking(1, regex=pattern), asking(1, choice=choices), asking(1, grammar=ebnf)]
    address, choice, nested = (r.text for r in tiny.generate([IDS[:5]] * 3, asked))
    assert re.fullmatch(pattern, address) and choice in choices and re.fullmatch(r"\(*[xy]\)*", nested)
    assert nested.count("(") == nested.count(")")


# ---- however it is computed --------------------------------------------------------------------------------

KEYS = "([a-c]=[02-9]{2,5};)+A"
MIXED = [asking(0, 40, regex=KEYS), asking(1, 40, regex="[a-f]{5,}"), SamplingParams(seed=2, max_tokens=40),
         SamplingParams(temperature=0, max_tokens=40, structured_outputs={"regex": KEYS}),
         asking(4, 40, grammar='root ::= "[" root "]" | [a-z]'),
         SamplingParams(seed=5, max_tokens=40, presence_penalty=1.5, stop=["=2"],
                        structured_outputs={"regex": KEYS})]  # fmt: skip
WAYS = {
    "static": {"speculate": "static"},
    "scheduled": {"speculate": "scheduled"},
    "overlap": {"overlap": True},
    "preempted": {"num_blocks": 17},
    "preempted ahead": {"num_blocks": 17, "overlap": True},
    "drafted and preempted": {"speculate": "static", "num_blocks": 17},
    "chunks": {"max_num_batched_tokens": 3},
}


@pytest.fixture(scope="module")
def plain():
    return [mock().submit([5, 6, 7, 8], one).result() for one in MIXED]


@pytest.mark.parametrize("way", WAYS)
def test_the_same_text_in_every_way(plain, way):
    e = mock(**WAYS[way])
    if "preempted" in way:
        e.scheduler.ratio = 0.0
    handles = [e.submit([5, 6, 7, 8], one) for one in MIXED]
    found = [handle.result() for handle in handles]
    assert "preempted" not in way or e.stats()["preemptions"] > 0
    e.check()
    for one, want in zip(found, plain, strict=True):
        assert one.token_ids == want.token_ids and one.error is None
        assert one.finish_reason == want.finish_reason
    assert all(re.fullmatch(KEYS, r.text) for r in found[::3] if r.finish_reason == "stop")


def test_rejection_follows_the_grammar_too():
    e = mock(speculate="static", accept="rejection")
    handles = [e.submit([5, 6], asking(i, 50, regex="(ab|cd){2,4}A")) for i in range(9)]
    results = [handle.result() for handle in handles]
    assert all(re.fullmatch("(ab|cd){2,4}A", r.text) for r in results)
    assert sum(r.usage.accepted for r in results) > 9  # guesses obey the grammar as well


def test_a_mask_behind_guesses_ends_with_the_first_that_breaks_it():
    """Rows behind a wrong guess and behind the end let everything through; the walk leaves no trace."""
    a, b, every = ord("a") - 48, ord("b") - 48, list(range(VOCAB))
    state = mock()._grammars.state(asking(regex="ab+").structured_outputs, 0)
    cases = {(): [a], (a,): [b], (a, b): [EOS, b], (a, a): every, (a, b, EOS): every, (a, b, b): [EOS, b]}
    for _ in range(2):
        for guesses, want in cases.items():
            bits = grammar.blank(1, VOCAB)
            state.fill(bits, 0, [], guesses)
            assert grammar.unpack(bits, VOCAB)[0].nonzero()[:, 0].tolist() == want
    assert state.error is None


@pytest.mark.parametrize("steps", range(1, 6))
def test_choices_of_one_prompt_and_an_abort(steps):
    e, work = mock(overlap=steps % 2 == 0), [([5, 6, 7], asking(i, 30, regex=KEYS)) for i in range(4)]
    handles = e.submit_all(work)
    for _ in range(steps):
        e.step()
    handles[0].cancel()
    results = [handle.result() for handle in handles]
    assert results[0].finish_reason == "abort" and len({r.text for r in results[1:]}) == 3
    assert [r.token_ids for r in results[1:]] == [mock().submit(*one).result().token_ids for one in work[1:]]
    e.check()
    assert e.stats()["blocks_free"] == e.stats()["blocks_total"]


def test_thinking_is_free_and_the_answer_is_not(tiny):
    """The bias makes the end of thinking likely; as a token of the answer it could not come."""
    think_end = tiny.tokenizer.specials["</think>"]
    body = {"messages": [{"role": "user", "content": "as json"}], "logit_bias": {think_end: 6}, "seed": 3,
            "temperature": 1.0, "max_tokens": 200, "response_format": {"type": "json_object"},
            "guided_json": None}  # fmt: skip
    prompt, params = tiny.render(body | {"response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"type": "integer", "maximum": 99, "minimum": 0}}}})
    assert prompt.thinking and params.structured_outputs.thinking
    result = tiny.generate(prompt.ids, params)
    thought, _, answer = result.text.partition("</think>")
    assert result.finish_reason == "stop" and thought and 0 <= int(answer) <= 99


# ---- what is refused, and what fails -----------------------------------------------------------------------

OBJECT, INTEGER = {"type": "object"}, {"type": "integer"}
REFUSED = {
    "oneOf": ({"oneOf": [INTEGER]}, "oneOf, which can't be enforced; use anyOf"),
    "not": ({"not": INTEGER}, "has not, which"),
    "untyped": ({"minimum": 3}, "minimum, which can't be enforced without a type"),
    "other type": ({"type": "string", "minimum": 3}, "has minimum"),
    "float multiple": ({"type": "number", "multipleOf": 0.5}, "has multipleOf"),
    "multiple in bounds": (INTEGER | {"multipleOf": 3, "minimum": 4}, "multipleOf and minimum"),
    "pattern and length": ({"type": "string", "pattern": "a", "maxLength": 3}, "pattern and maxLength"),
    "unique": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "unknown required": (OBJECT | {"properties": {"a": INTEGER}, "required": ["b"]}, "requires 'b'"),
    "enum of another type": ({"type": "string", "enum": ["a", 1]}, "has the value 1, which is no string"),
    "enum and length": ({"type": "string", "enum": ["a"], "minLength": 3}, "can't be enforced beside enum"),
    "ref and bound": ({"$ref": "#/$defs/x", "minimum": 1, "$defs": {"x": INTEGER}}, r"beside \$ref"),
    "outer ref": ({"$ref": "http://x/y"}, "only references inside"),
    "two allOf": ({"allOf": [INTEGER, {"minimum": 3}]}, "write them as one|without a type"),
    "no type": ({"type": "nul"}, "has type 'nul'"),
    "deep inside": (OBJECT | {"properties": {"a": {"type": "array", "items": {"if": True}}}},
                    "the schema, properties 'a', items has if"),
    "empty": ({"type": "integer", "minimum": 3, "maximum": 1}, "can't be compiled"),
    "no value": ({"enum": []}, "can't be compiled"),
    "quote": ({"type": "string", "pattern": 'a"'}, "quotes, backslashes and control"),
    "backslash": ({"type": "string", "pattern": r"a\\d"}, "quotes, backslashes and control"),
    "lengths": ({"type": "string", "minLength": 3, "maxLength": 1}, "can't be compiled"),
    "malformed": (OBJECT | {"required": 3}, "needs a list"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_be_held_to_is_refused_by_name(tiny, name):
    schema, words = REFUSED[name]
    with pytest.raises(RequestError, match=words) as no:
        tiny.submit(IDS[:3], asking(json=schema))
    assert (no.value.status, no.value.param) == (400, "structured_outputs") and not tiny.engine.has_work


@pytest.mark.parametrize(
    ("structure", "words"),
    [
        ({"json": {"enum": [f"value {i}" for i in range(9000)]}}, "at most 65536 are compiled"),
        ({"regex": "(a|aa)*" * 400}, "2800 bytes long; at most 2048"),
        ({"regex": "(a"}, "parenthesis is not closed"),
        ({"regex": r"(a)\1"}, "Backreference"),
        ({"grammar": "root ::= " + "(" * 4000 + '"a"' + ")" * 4000}, "can't be compiled"),
        ({"grammar": "root ::= missing"}, "not defined"),
        ({"grammar": "root ::= root"}, "lets no text begin"),
        ({}, "exactly one"),
        ({"json": True, "regex": "a"}, "exactly one"),
        ({"choice": []}, "list of texts"),
        ({"json": 3}, "JSON schema"),
    ],
)
def test_hostile_and_malformed_ones_are_refused(tiny, structure, words):
    with pytest.raises(RequestError, match=words) as no:
        tiny.submit(IDS[:3], asking(**structure))
    assert no.value.status == 400


def test_a_schema_that_is_too_deep_and_one_that_is_just_not(tiny):
    deep = INTEGER
    for _ in range(grammar.MAX_DEPTH):
        deep = OBJECT | {"properties": {"a": deep}, "required": ["a"]}
    assert tiny.generate(IDS[:3], asking(max_tokens=2, json=deep)).error is None
    with pytest.raises(RequestError, match="nested deeper than 64"):
        tiny.submit(IDS[:3], asking(json=OBJECT | {"properties": {"a": deep}}))


def test_what_takes_too_long_to_compile_is_refused_and_holds_nobody_up(tiny, monkeypatch):
    monkeypatch.setattr(grammar, "TIMEOUT", 0.05)
    go, real = threading.Event(), grammar.Grammars._compile
    monkeypatch.setattr(grammar.Grammars, "_compile", lambda *args: (go.wait(20), real(*args))[1])
    for _ in range(grammar.WORKERS):
        with pytest.raises(RequestError, match="within 0.05 s") as no:
            tiny.submit(IDS[:3], asking(regex="a"))
        assert (no.value.status, no.value.code) == (400, "grammar_timeout")
    with pytest.raises(RequestError, match="grammars of other requests") as no:
        tiny.submit(IDS[:3], asking(regex="a"))
    assert no.value.status == 503
    assert tiny.generate(IDS[:3], SamplingParams(max_tokens=3)).error is None
    go.set()
    monkeypatch.setattr(grammar, "TIMEOUT", 20.0)
    assert tiny.generate(IDS[:3], asking(regex="a")).text == "a"


def test_a_matcher_that_fails_ends_its_request_alone(monkeypatch):
    e, fill = mock(), grammar.State._fill
    bad, good = (e.submit([5, 6], asking(i, 30, regex=KEYS)) for i in range(2))

    def failing(self, bits, guesses):
        if self is bad._seq.grammar and bad._seq.generated == 3:
            raise RuntimeError("a bug in the matcher")
        fill(self, bits, guesses)

    monkeypatch.setattr(grammar.State, "_fill", failing)
    assert bad.result().finish_reason == "error" and "a bug in the matcher" in bad.result().error
    assert len(bad.result().token_ids) == 3
    assert good.result().token_ids == mock().submit([5, 6], asking(1, 30, regex=KEYS)).result().token_ids


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
    e = mock()
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    for structure in ({"regex": "a"}, Constraint("tool_call_required", "[]")):
        with pytest.raises(RequestError, match=r'pip install "dskit-llm\[grammar\]"'):
            e.submit([5], SamplingParams(structured_outputs=structure))
    assert e.submit([5], SamplingParams(max_tokens=2)).result().error is None


def test_an_end_can_not_be_ignored():
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True)


@pytest.mark.slow
def test_the_limit_of_compilation_holds_for_a_real_bomb(tiny, monkeypatch):
    monkeypatch.setattr(grammar, "TIMEOUT", 0.2)
    monkeypatch.setitem(grammar.MAX_BYTES, "regex", 10_000)
    begin = time.monotonic()
    with pytest.raises(RequestError, match="could not be compiled within 0.2 s"):
        tiny.submit(IDS[:3], asking(regex="|".join(f"[a-z]{{{i}}}x" for i in range(1, 400))))
    assert time.monotonic() - begin < 10
