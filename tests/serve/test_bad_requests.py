"""Requests that can't be served: each its clear error, while another stream goes on untouched."""

from __future__ import annotations

import json
import threading

import httpx
import pytest

from tests.serve.conftest import WEATHER, idle, running
from tests.serve.scripted import ENDLESS

HI = [{"role": "user", "content": "hi"}]
STRICT = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
    "type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
    "required": ["a"]}}}  # fmt: skip
PICTURE = [
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}
]

UNSUPPORTED, TOO_LONG = "unsupported_parameter", "context_length_exceeded"
SURROGATE = (400, None, "invalid_json", "surrogates")

CHATS = {  # name: (body, status, param, code, words of the message)
    "no messages": ({}, 400, "messages", "missing_required_parameter", "messages is missing"),
    "empty messages": ({"messages": []}, 400, "messages", "invalid_value", "messages is empty"),
    "messages of text": ({"messages": "hi"}, 400, "messages", "invalid_type", "list of messages"),
    "unknown role": ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role", None, "role"),
    "picture": ({"messages": PICTURE}, 400, "messages.0.content", None, "image input is not supported"),
    "long prompt": ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "messages",
                    TOO_LONG, "4096"),
    "long limit": ({"messages": HI, "max_tokens": 5000}, 400, None, TOO_LONG, "5000"),
    "other model": ({"messages": HI, "model": "gpt-4"}, 404, "model", "model_not_found", "'scripted'"),
    "hot": ({"messages": HI, "temperature": 3}, 400, "temperature", None, "at most 2"),
    "words for a number": ({"messages": HI, "temperature": "hot"}, 400, "temperature", None, "number"),
    "not a number": ('{"messages": [{"role": "user"}], "top_p": NaN}', 400, "top_p", None, "top_p"),
    "no tokens": ({"messages": HI, "max_completion_tokens": 0}, 400, "max_tokens", None, "at least 1"),
    "no choices": ({"messages": HI, "n": 0}, 400, "n", None, "from 1"),
    "bias outside": ({"messages": HI, "logit_bias": {"999999": 1}}, 400, "logit_bias", None, "999999"),
    "stop outside": ({"messages": HI, "stop_token_ids": [70000]}, 400, "stop_token_ids", None, "70000"),
    "empty stop": ({"messages": HI, "stop": [""]}, 400, "stop", None, "non-empty"),
    "top without": ({"messages": HI, "top_logprobs": 3}, 400, "top_logprobs", None, "needs logprobs"),
    "usage without stream": ({"messages": HI, "stream_options": {}}, 400, "stream_options", None, "stream"),
    "stream in words": ({"messages": HI, "stream": "yes"}, 400, "stream", "invalid_type", "true or false"),
    "effort": ({"messages": HI, "reasoning_effort": "huge"}, 400, "reasoning_effort", None, "off, low"),
    "schema": ({"messages": HI, "response_format": {"type": "json_schema"}}, 400, "response_format", None,
               "json_schema"),
    "format": ({"messages": HI, "response_format": {"type": "xml"}}, 400, "response_format", None, "json_"),
    "open schema": ({"messages": HI, "response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"oneOf": [{}]}}}}, 400, "response_format", "invalid_grammar", "use anyOf"),
    "two formats": ({"messages": HI, "guided_json": {}, "guided_regex": "a"}, 400, "guided_regex", None,
                    "together"),
    "format beside tools": ({"messages": HI, "guided_regex": "a", "tools": [WEATHER]}, 400, "guided_regex",
                            None, "beside tools"),
    "format in words": ({"messages": HI, "structured_outputs": "json"}, 400, "structured_outputs", None,
                        "object"),
    "sglang's name": ({"messages": HI, "ebnf": "root ::= a"}, 400, "ebnf", UNSUPPORTED, "structured_outputs"),
    "json unsaid": ({"messages": HI, "response_format": {"type": "json_object"}}, 400, "response_format",
                    None, "json"),
    "regex": ({"messages": HI, "guided_regex": "(a"}, 400, "guided_regex", "invalid_grammar", "not closed"),
    "strict tool": ({"messages": HI, "tools": [STRICT]}, 400, None, None, "Required properties"),
    "nameless tool": ({"messages": HI, "tools": [{}]}, 400, "tools.0.function.name", None, "name"),
    "unknown tool": ({"messages": HI, "tools": [WEATHER], "tool_choice": {"type": "function", "function": {
        "name": "get_time"}}}, 400, "tool_choice", None, "get_weather"),
    "odd choice": ({"messages": HI, "tools": [WEATHER], "tool_choice": "any"}, 400, "tool_choice", None,
                   "any"),
    "required while thinking": ({"messages": HI, "tools": [WEATHER], "tool_choice": "required"}, 400,
                                "tool_choice", None, "tool"),
    "one call at most": ({"messages": HI, "tools": [WEATHER], "parallel_tool_calls": False}, 400,
                         "parallel_tool_calls", UNSUPPORTED, "not supported"),
    "sound": ({"messages": HI, "audio": {"voice": "x"}}, 400, "audio", UNSUPPORTED, "audio"),
    "half a surrogate": (r'{"messages": [{"role": "user", "content": "\ud800"}]}', *SURROGATE),
    "not JSON": ("{", 400, None, "invalid_json", "not valid JSON"),
    "a list": ("[]", 400, None, "invalid_json", "JSON object"),
    "deep": ("[" * 100_000, 400, None, "invalid_json", "JSON"),
    "not UTF-8": (b'{"messages": "\xff"}', 400, None, "invalid_json", "JSON"),
}  # fmt: skip
TEXTS = {
    "no prompt": ({}, 400, "prompt", None, "prompt must be"),
    "empty prompt": ({"prompt": ""}, 400, "prompt", "empty_prompt", "empty"),
    "no prompts": ({"prompt": []}, 400, "prompt", "empty_prompt", "empty"),
    "an empty one among prompts": ({"prompt": ["a", ""]}, 400, "prompt", "empty_prompt", "empty"),
    "id outside": ({"prompt": [5, 512]}, 400, "prompt", None, "512"),
    "negative id": ({"prompt": [5, -1]}, 400, "prompt", None, "-1"),
    "mixed": ({"prompt": [5, "a"]}, 400, "prompt", None, "prompt must be"),
    "long prompt": ({"prompt": [5] * 4096}, 400, "prompt", TOO_LONG, "4096"),
    "echo": ({"prompt": "a", "echo": True}, 400, "echo", UNSUPPORTED, "not sent back"),
    "suffix": ({"prompt": "a", "suffix": "b"}, 400, "suffix", UNSUPPORTED, "middle"),
    "best of": ({"prompt": "a", "best_of": 4}, 400, "best_of", UNSUPPORTED, "one sample"),
    "half a surrogate": (r'{"prompt": "\ud800"}', *SURROGATE),
}
CASES = [
    pytest.param(path, *case, id=f"{path.split('/')[2]}: {name}")
    for path, cases in (("/v1/chat/completions", CHATS), ("/v1/completions", TEXTS))
    for name, case in cases.items()
]


@pytest.fixture(scope="module")
def bystander(server, scripted):
    """Streams that follow one another while everything here is refused; each must be whole."""
    enough, texts = threading.Event(), []

    def listen() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            while not enough.is_set():
                texts.append(read_stream(http))

    thread = threading.Thread(target=listen)
    thread.start()
    running(scripted)
    yield
    enough.set()
    thread.join()
    assert texts and set(texts) == {(ENDLESS * 8)[:300]}
    idle(scripted)


def read_stream(http: httpx.Client) -> str:
    """The text of one streamed completion, which must end at its limit."""
    text, reason = "", None
    with http.stream(
        "POST", "/v1/completions", json={"prompt": "Once", "max_tokens": 300, "stream": True}
    ) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                text, reason = text + choice["text"], choice["finish_reason"]
    assert reason == "length"
    return text


@pytest.mark.parametrize(("path", "body", "status", "param", "code", "words"), CASES)
def test_refused(bystander, http, path, body, status, param, code, words):
    content = body if isinstance(body, (str, bytes)) else json.dumps(body)
    reply = http.post(path, content=content, headers={"Content-Type": "application/json"})
    error = reply.json()["error"]
    assert reply.status_code == status, error
    assert error["type"] == "invalid_request_error" and set(error) == {"message", "type", "param", "code"}
    assert words in error["message"], error
    assert param is None or error["param"] == param, error
    assert code is None or error["code"] == code, error


def test_other_refusals(bystander, http):
    def status(method: str, path: str, **fields) -> int:
        reply = http.request(method, path, **fields)
        assert reply.json()["error"]["message"]
        return reply.status_code

    assert (
        status(
            "POST",
            "/v1/completions",
            content=b'{"prompt": "' + b"x" * 2**25 + b'"}',
            headers={"Content-Type": "application/json"},
        )
        == 413
    )
    assert status("POST", "/v1/completions", content="{}", headers={"Content-Type": "text/plain"}) == 415
    assert status("GET", "/v1/completions") == 405
    assert status("GET", "/v1/embeddings") == 404
    assert status("POST", "/detokenize", json={"tokens": [99999]}) == 400
    assert status("POST", "/tokenize", json={}) == 400


def test_a_step_that_fails_ends_its_request_alone(bystander, http, scripted):
    scripted.runner.fail_on = scripted.tokenizer.encode("explode")
    try:
        reply = http.post("/v1/completions", json={"prompt": "explode", "max_tokens": 3})
        assert reply.status_code == 500 and reply.json()["error"]["code"] == "engine_error"
        assert "this step fails" in reply.json()["error"]["message"]
        with http.stream("POST", "/v1/completions", json={"prompt": "explode", "stream": True}) as stream:
            text = stream.read().decode()
        assert stream.status_code == 200 and '"code":"engine_error"' in text and text.endswith("[DONE]\n\n")
    finally:
        scripted.runner.fail_on = None
