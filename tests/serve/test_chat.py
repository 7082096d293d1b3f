"""Chats through OpenAI's own client, streamed and not: reasoning, content, tool calls, usage, reasons."""

from __future__ import annotations

import json

import pytest

from tests.serve.conftest import CALL, WEATHER, client_of, idle


def ask(client, question, **fields):
    """One question."""
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(model=fields.pop("model", "scripted"), messages=messages, **fields)


def gather(chunks) -> dict:
    """The message, finish reason and usage that a stream adds up to."""
    whole = {
        "content": "",
        "reasoning_content": "",
        "calls": {},
        "finish_reason": None,
        "usage": None,
        "roles": [],
    }
    for chunk in chunks:
        whole["usage"] = chunk.usage or whole["usage"]
        for choice in chunk.choices:
            delta = choice.delta
            whole["roles"] += [delta.role] if delta.role else []
            whole["content"] += delta.content or ""
            whole["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
            for part in delta.tool_calls or ():
                call = whole["calls"].setdefault(part.index, {"id": part.id, "name": "", "arguments": ""})
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
            whole["finish_reason"] = choice.finish_reason or whole["finish_reason"]
    return whole


def test_an_answer_has_its_thinking_apart(client):
    reply = ask(client, "What is a harbour?")
    message = reply.choices[0].message
    assert message.role == "assistant" and message.content == "A sheltered place for ships — quiet."
    assert message.reasoning_content == "A word about ships." and not message.tool_calls
    assert reply.choices[0].finish_reason == "stop" and reply.model == "scripted"
    assert reply.object == "chat.completion" and reply.id.startswith("chatcmpl-")


def test_usage_counts_what_was_read_and_written(client, scripted):
    usage = ask(client, "What is a harbour?").usage
    prompt, _ = scripted.render("What is a harbour?")
    assert (
        usage.prompt_tokens == len(prompt.ids)
        and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    )
    spoken = len("A word about ships.") + len("A sheltered place for ships — quiet.".encode())
    assert usage.completion_tokens == spoken + 2  # </think> and the end of the turn
    assert usage.completion_tokens_details.reasoning_tokens == len("A word about ships.")


def test_usage_counts_what_a_draft_guessed(tiny_server, tiny):
    with client_of(tiny_server) as client:
        usage = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}],
                                               max_tokens=12, temperature=0).usage
    details = usage.completion_tokens_details
    guesses = details.accepted_prediction_tokens + details.rejected_prediction_tokens
    assert guesses >= sum(r.judged for r in tiny.engine.rounds()[-2:]) > 0
    assert 0 <= details.accepted_prediction_tokens < usage.completion_tokens


def test_a_stream_adds_up_to_the_whole(client):
    whole = ask(client, "What is a harbour?")
    stream = gather(ask(client, "What is a harbour?", stream=True, stream_options={"include_usage": True}))
    message = whole.choices[0].message
    assert stream["content"] == message.content and stream["reasoning_content"] == message.reasoning_content
    assert stream["finish_reason"] == "stop" and stream["roles"] == ["assistant"]
    assert stream["usage"] == whole.usage


def test_usage_comes_only_when_asked_for_and_then_last(client):
    chunks = list(ask(client, "What is a harbour?", stream=True))
    assert all(chunk.usage is None for chunk in chunks) and chunks[-1].choices[0].finish_reason == "stop"
    chunks = list(ask(client, "What is a harbour?", stream=True, stream_options={"include_usage": True}))
    assert [bool(chunk.usage) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []


@pytest.mark.parametrize(
    "off",
    [
        {"reasoning_effort": "none"},
        {"extra_body": {"thinking": {"type": "disabled"}}},
        {"extra_body": {"chat_template_kwargs": {"thinking": False}}},
    ],
    ids=repr,
)
def test_thinking_can_be_switched_off(client, off):
    reply = ask(client, "What is a harbour?", **off)
    assert reply.choices[0].message.content == "A sheltered place for ships — quiet."
    assert not getattr(reply.choices[0].message, "reasoning_content", None)


def test_tool_calls(client):
    reply = ask(client, "How is the weather?", tools=[WEATHER])
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "tool_calls"
    assert message.content == "One moment." and message.reasoning_content == "It needs the tool."
    (call,) = message.tool_calls
    assert call.type == "function" and call.id and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Bergen", "days": 3}


def test_streamed_tool_calls(client):
    stream = gather(ask(client, "How is the weather?", tools=[WEATHER], stream=True))
    assert stream["finish_reason"] == "tool_calls" and stream["content"] == "One moment."
    (call,) = stream["calls"].values()
    assert call["id"] and call["name"] == "get_weather"
    assert json.loads(call["arguments"]) == {"city": "Bergen", "days": 3}


def test_a_tool_result_is_answered(client):
    messages = [
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"degrees": 12}'},
    ]
    reply = client.chat.completions.create(model="scripted", messages=messages, tools=[WEATHER])
    assert reply.choices[0].message.content == "It is sunny in Bergen."


def test_a_call_cut_by_the_limit_says_length(client):
    stream = gather(
        ask(client, "How is the weather?", tools=[WEATHER], stream=True, max_completion_tokens=60)
    )
    assert stream["finish_reason"] == "length"


def test_json_mode(client):
    reply = ask(client, "Give me an object in JSON.", response_format={"type": "json_object"})
    assert json.loads(reply.choices[0].message.content) == {"name": "Mira", "age": 34}


def test_a_limit_inside_the_thinking_leaves_the_answer_empty(client):
    reply = ask(client, "What is a harbour?", max_completion_tokens=6)
    assert reply.choices[0].finish_reason == "length" and reply.usage.completion_tokens == 6
    assert reply.choices[0].message.reasoning_content == "A word" and not reply.choices[0].message.content


def test_a_stop_string_ends_the_answer_before_it(client):
    reply = ask(client, "What is a harbour?", stop=[" for ships"])
    assert (
        reply.choices[0].message.content == "A sheltered place" and reply.choices[0].finish_reason == "stop"
    )


def test_several_choices_have_their_numbers(client):
    reply = ask(client, "What is a harbour?", n=3)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert {choice.message.content for choice in reply.choices} == {"A sheltered place for ships — quiet."}
    one = ask(client, "What is a harbour?").usage
    assert reply.usage.prompt_tokens == one.prompt_tokens
    assert reply.usage.completion_tokens == 3 * one.completion_tokens
    seen = {
        choice.index
        for chunk in ask(client, "What is a harbour?", n=3, stream=True)
        for choice in chunk.choices
    }
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_content_and_of_thinking(client, stream):
    fields = {"logprobs": True, "top_logprobs": 2, "max_completion_tokens": 30, "stream": stream}
    reply = ask(client, "What is a harbour?", **fields)
    parts = (
        [chunk.choices[0].logprobs for chunk in reply if chunk.choices]
        if stream
        else [reply.choices[0].logprobs]
    )
    thought = [one for part in parts if part for one in getattr(part, "reasoning_content", None) or ()]
    content = [one for part in parts if part for one in part.content or ()]
    spelled = "".join(one["token"] for one in thought) + "".join(one.token for one in content)
    assert spelled == "A word about ships.</think>A sheltered"[: 19 + 8 + 10]
    assert all(abs(one.logprob) < 1e-6 and len(one.top_logprobs) == 2 for one in content)
    assert bytes(content[-1].bytes).decode() == content[-1].token == content[-1].top_logprobs[0].token


def test_random_weights_follow_the_protocol_too(tiny_server, tiny):
    """No script: noise, which may hold any token at any place."""
    with client_of(tiny_server) as client:
        fields = {"model": "tiny", "max_completion_tokens": 12, "seed": 3, "temperature": 1.0, "top_p": 0.9}
        ask(client, "Hello", **fields)  # both that follow find as much of the prompt in the cache
        whole = ask(client, "Hello", **fields)
        stream = gather(ask(client, "Hello", stream=True, stream_options={"include_usage": True}, **fields))
        message = whole.choices[0].message
        assert stream["reasoning_content"] == (message.reasoning_content or "")
        assert stream["content"] == (message.content or "") and stream["usage"] == whole.usage
        assert 1 <= whole.usage.completion_tokens <= 12
        assert whole.usage.prompt_tokens_details.cached_tokens > 0
    idle(tiny)
