"""What a request may ask of the API, and how a refusal looks: plain dicts in, nothing awaited.

Idea
    A field that dskit does not know is ignored, as everywhere. A field that would change the answer and is
    not supported is refused by name, since ignoring it would be worse. The same goes for wrong types.

Shapes
    body: the parsed JSON of a request; `prompts` gives list[str | list[int]].

Errors
    ApiError carries the HTTP status and the four fields of OpenAI's error object. `refusal` turns the
    engine's RequestError and chat's ChatError into one.

Source
    OpenAI's reference of chat completions and completions; engine.md 18.2 and 20.
"""

from __future__ import annotations

import re
from typing import Any

from dskit.chat import ChatError
from dskit.engine.seq import RequestError, SamplingParams

Body = dict[str, Any]
MAX_BODY = 32 * 2**20  # bytes
MAX_CHOICES = 128
TYPES = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable_error"}
ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")

# Fields that would change the answer: the values that change nothing, and why others are refused.
_GRAMMAR = "give it as structured_outputs"
_ONE_BEAM = "one sample is drawn per choice"
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("grammar", "regex", "ebnf", "json_schema", "structural_tag"), ((), _GRAMMAR)),
    "functions": ((), "use tools"),
    "function_call": ((), "use tool_choice"),
    "parallel_tool_calls": ((True,), "the model decides how many tools it calls"),
    "audio": ((), "there is no audio output"),
    "modalities": ((["text"],), "there is text output only"),
    "web_search_options": ((), "the server does not search the web"),
    "verbosity": (("medium",), "the model has no such setting; say it in the messages"),
    "best_of": ((1,), _ONE_BEAM),
    "use_beam_search": ((False,), _ONE_BEAM),
    "length_penalty": ((1, 1.0), _ONE_BEAM),
    "min_tokens": ((0,), "an end of the text can't be forbidden"),
    "bad_words": (([],), "use logit_bias"),
    "logits_processors": (([],), "code is not taken from requests"),
    "prompt_logprobs": ((), "log-probabilities are of generated tokens"),
    "include_stop_str_in_output": ((False,), "a stop string is never part of the text"),
    "chat_template": ((), "prompts are rendered by deepseek-recipe"),
    "documents": (([],), "put them into a message"),
    "add_generation_prompt": ((True,), "a reply is always begun"),
    "continue_final_message": ((False,), "give the last assistant message prefix: true"),
    "suffix": (("",), "the model does not fill in the middle"),
    "echo": ((False,), "the prompt is not sent back"),
}  # fmt: skip


class ApiError(Exception):
    """A refusal: HTTP `status`, what OpenAI's error object holds, and headers beside it."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.param, self.code, self.status, self.headers = param, code, status, headers or {}

    def body(self) -> Body:
        """The JSON that a client receives."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refusal(error: RequestError | ChatError, body: Body) -> ApiError:
    """The same refusal in the API's words; where no field was named, one that the message speaks of."""
    words = re.findall(r"\w+", str(error))
    param = error.param or next((word for word in words if word in body), None)
    return ApiError(str(error), param, getattr(error, "code", "invalid_value"), error.status)


def check_chat(body: Body) -> None:
    """Check the fields of a chat that can be checked without the model."""
    _check(body)
    messages = _field(body, "messages", list, "a list of messages")
    if not messages:
        raise ApiError("messages is empty; give at least one message", "messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ApiError(f"messages[{i}] needs a role, one of {', '.join(ROLES)}", f"messages.{i}.role")
    _check_tools(body)
    kind = (_field(body, "response_format", dict, "an object", {}) or {}).get("type", "text")
    if kind not in ("text", "json_object", "json_schema"):
        raise ApiError(
            f"response_format of type {kind!r} is not supported; there are text, json_object and json_schema",
            "response_format",
        )
    _field(body, "logprobs", bool, "true or false", False)
    if body.get("top_logprobs") is not None and not body.get("logprobs"):
        raise ApiError("top_logprobs needs logprobs to be true", "top_logprobs")


def _check_tools(body: Body) -> None:
    tools = _field(body, "tools", list, "a list of tools", []) or []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(f"tools[{i}] needs a function with a name", f"tools.{i}.function.name")
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return
    named = choice.get("function") if isinstance(choice, dict) else None
    names = [tool["function"]["name"] for tool in tools]
    if named is not None and (not isinstance(named, dict) or named.get("name") not in names):
        known = ", ".join(names) or "there are none"
        raise ApiError(f"tool_choice names none of the tools: {known}", "tool_choice")
    if named is None and choice != "required":
        raise ApiError(
            f"tool_choice {choice!r} is not known; there are auto, none, required, and an object that names "
            "a function",
            "tool_choice",
        )
    if not tools:
        raise ApiError('tool_choice is "required", but there are no tools', "tool_choice")


def check_completion(body: Body) -> list[str | list[int]]:
    """Check the fields of a completion; returns its prompts."""
    _check(body)
    if isinstance(body.get("logprobs"), bool):
        raise ApiError("logprobs of a completion is a number of alternatives, not true or false", "logprobs")
    prompt = body.get("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_id(prompt[0])):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt or not all(_is_prompt(one) for one in prompt):
        raise ApiError(
            "prompt must be a string, a list of token ids, or a list of either, and not empty",
            "prompt",
            "empty_prompt" if prompt == [] else "invalid_value",
        )
    return prompt


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(map(_is_id, value)))


def _check(body: Body) -> None:
    """What both kinds share: fields that are refused, types, sampling values."""
    for name, (neutral, reason) in UNSUPPORTED.items():
        if (value := body.get(name)) is not None and value not in neutral:
            raise ApiError(f"{name} is not supported: {reason}", name, "unsupported_parameter")
    stream = _field(body, "stream", bool, "true or false", False)
    options = _field(body, "stream_options", dict, "an object", None)
    if options is not None and not stream:
        raise ApiError("stream_options needs stream to be true", "stream_options")
    n = _field(body, "n", int, "an integer", 1)
    if n is not None and (isinstance(n, bool) or not 1 <= n <= MAX_CHOICES):
        raise ApiError(f"n is {n!r}; it must be an integer from 1 to {MAX_CHOICES}", "n")
    try:
        SamplingParams.from_body(body)
    except RequestError as error:
        raise refusal(error, body) from None


def _field(body: Body, name: str, kind: type, words: str, default: Any = ...) -> Any:
    """The value of a field, `default` where it is absent; ApiError for a wrong type or a missing one."""
    value = body.get(name)
    if value is None:
        if default is ...:
            raise ApiError(f"{name} is missing; it must be {words}", name, "missing_required_parameter")
        return default
    if not isinstance(value, kind):
        raise ApiError(f"{name} must be {words}, not {type(value).__name__}", name, "invalid_type")
    return value
