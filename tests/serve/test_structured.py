"""Structured output over HTTP: with OpenAI's fields and vLLM's, from the bundled model."""

from __future__ import annotations

import json
import re

import httpx
import jsonschema
import pytest

from dskit import serve

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9},
                                         "days": {"type": "integer"}},
        "required": ["city", "days"], "additionalProperties": False}  # fmt: skip
NAMED = {"name": "trip", "schema": CITY}
OFF = {"thinking": {"type": "disabled"}, "max_tokens": 90}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("trip", "stay")]


@pytest.fixture(scope="module")
def server(demo):
    """The API over the bundled model."""
    with serve.start(demo, port=0, ui=False) as running:
        yield running


def ask(server, **fields) -> dict:
    body = {"messages": [{"role": "user", "content": "Tell me of a harbour, as json."}], **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": True}}},
        {"guided_json": CITY},
    ],
    ids=["response_format", "guided_json"],
)
def test_an_answer_follows_its_schema(server, fields):
    choice = ask(server, **fields, **OFF)
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), CITY)


def test_thinking_comes_before_the_constraint(server):
    choice = ask(server, guided_regex=r"[A-Z][a-z]{2,9}, \d{4}", max_tokens=300)
    assert choice["message"]["reasoning_content"]
    assert re.fullmatch(r"[A-Z][a-z]{2,9}, \d{4}", choice["message"]["content"])


def test_json_object(server):
    choice = ask(server, response_format={"type": "json_object"}, **OFF | {"max_tokens": 20})
    assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "stay"}}], ids=str)
def test_a_tool_is_called_as_asked(server, choice):
    answer = ask(server, tools=TOOLS, tool_choice=choice, **OFF)
    assert answer["finish_reason"] == "tool_calls"
    for call in answer["message"]["tool_calls"]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), CITY)
        assert call["function"]["name"] == "stay" or choice == "required"


def test_a_strict_tool_is_called_by_its_schema_or_not_at_all(server):
    strict = [{"type": "function", "function": one["function"] | {"strict": True}} for one in TOOLS]
    message = ask(server, tools=strict, **OFF)["message"]
    for call in message.get("tool_calls") or ():
        jsonschema.validate(json.loads(call["function"]["arguments"]), CITY)


def test_a_completion_with_two_choices(server):
    body = {"prompt": "The answer is", "guided_choice": ["yes", "no"], "n": 2, "temperature": 1, "seed": 1}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    assert len(answer["choices"]) == 2
    assert all(choice["text"] in ("yes", "no") for choice in answer["choices"])
