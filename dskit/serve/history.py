"""A conversation as the page shows it, and as a request holds it.

Idea
    What the page shows is the conversation: there is no second copy. `Turn` collects the chunks of a reply
    and shows them as a folding thought, the answer, tool calls and a folded line of statistics;
    `conversation` reads such a list back into the messages of a chat body.

Shapes
    history: list of Gradio's {"role", "content", "metadata"}; `metadata.id` says what a folded part is
    ("thought", "call", "stats"), so that a title can be changed without harm.

Errors
    None.

Source
    experience.md section 5; gradio's ChatMessage.
"""

from __future__ import annotations

import json
import pprint
import time
from typing import Any

from dskit.engine.seq import Usage
from dskit.serve.protocol import Body

History = list[dict[str, Any]]


class Turn:
    """One reply as the page shows it: `add` its chunks, `end` it with the statistics."""

    def __init__(self) -> None:
        self.thought, self.answer, self.calls = "", "", {}
        self.finish_reason: str | None = None
        self._begun, self._thought_s, self._stats = time.monotonic(), None, None

    def add(self, chunks: list[Body]) -> None:
        """Take in chunks of the API."""
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            delta = choice["delta"]
            self.thought += delta.get("reasoning_content") or ""
            if (delta.get("content") or delta.get("tool_calls")) and self._thought_s is None:
                self._thought_s = time.monotonic() - self._begun
            self.answer += delta.get("content") or ""
            for part in delta.get("tool_calls") or ():
                function = self.calls.setdefault(part["index"], {"name": "", "arguments": ""})
                for name, value in part["function"].items():
                    function[name] += value or ""
            self.finish_reason = choice["finish_reason"] or self.finish_reason

    def end(self, usage: Usage, reasoning_tokens: int, seed: int) -> None:
        """Add the line of statistics."""
        rate = f" · {usage.decode_tok_s:.1f} tokens/s" if usage.decode_tok_s else ""
        first = f" · first after {usage.ttft_s:.2f} s" if usage.ttft_s is not None else ""
        rows = {
            "prompt": f"{usage.prompt_tokens} tokens, {usage.cached_tokens} of them from the cache",
            "thinking": f"{reasoning_tokens} tokens",
            "answer": f"{usage.completion_tokens - reasoning_tokens} tokens",
            "ended by": {
                "length": "the limit of tokens",
                "stop": "the model",
                "tool_calls": "a tool call",
                "abort": "an abort",
            }.get(self.finish_reason, self.finish_reason),
            "seed": str(seed),
        }
        if usage.rounds:
            rows["draft"] = f"{usage.accepted} of {usage.drafted} guesses held, in {usage.rounds} rounds"
        title = f"{usage.prompt_tokens} + {usage.completion_tokens} tokens{first}{rate}"
        self._stats = folded("stats", title, "\n".join(f"- {name}: {value}" for name, value in rows.items()))

    def messages(self) -> History:
        """The messages of this turn so far."""
        shown = []
        if self.thought:
            shown.append(self._thought())
        shown += [
            folded("call", f"Calls {call['name']}", f"```json\n{call['arguments']}\n```", status="open")
            for call in self.calls.values()
        ]
        if self.answer:
            shown.insert(bool(self.thought), {"role": "assistant", "content": self.answer})
        if not shown and not self.finish_reason:
            shown = [folded("thought", "Reading", "", status="pending")]
        if self.finish_reason and not (self.answer or self.calls):
            shown.append(note("no answer"))
        return shown + ([self._stats] if self._stats else [])

    def _thought(self) -> dict[str, Any]:
        if self._thought_s is None and not self.finish_reason:
            return folded("thought", "Thinking", self.thought, status="pending")
        cut = self._thought_s is None and self.finish_reason == "length"
        seconds = self._thought_s or time.monotonic() - self._begun
        title = "Thought, ran out of tokens" if cut else "Thought"
        return folded("thought", title, self.thought, duration=round(seconds, 1))


# ---- histories ----


def folded(kind: str, title: str, content: str, status: str = "done", **more: Any) -> dict[str, Any]:
    """A part that folds: "pending" shows it open with a spinner, "open" without one, "done" closed."""
    shown = {} if status == "open" else {"status": status}
    return {
        "role": "assistant",
        "content": content,
        "metadata": {"id": kind, "title": title, **shown, **more},
    }


def note(text: str) -> dict[str, Any]:
    """A remark of the page's own, which is no part of the conversation."""
    return {"role": "assistant", "content": f"*({text})*", "metadata": {"id": "note"}}


def is_pending(message: dict[str, Any]) -> bool:
    """Whether a part is still being written."""
    return (message.get("metadata") or {}).get("status") == "pending"


def kind_of(message: dict[str, Any]) -> str | None:
    """What a folded part is; None for plain text."""
    return (message.get("metadata") or {}).get("id")


def text_of(message: dict[str, Any]) -> str:
    """The text of a message, as the page sends it back."""
    content = message["content"]
    parts = content if isinstance(content, list) else [content]
    return "".join(part if isinstance(part, str) else part.get("text", "") for part in parts)


def conversation(history: History, system: str = "") -> list[Body]:
    """The messages that a history stands for; what follows a tool call is the tool's result."""
    messages: list[Body] = [{"role": "system", "content": system}] if (system or "").strip() else []
    for message in history:
        kind, text = kind_of(message), text_of(message)
        last = messages[-1] if messages else {"role": None}
        if message["role"] == "user":
            calls = last.get("tool_calls") or [None]
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls if call
            ]
            messages += results or [{"role": "user", "content": text}]
        elif kind in ("thought", "call", None):
            if last["role"] != "assistant":
                messages.append(last := {"role": "assistant", "content": ""})
            _into(last, kind, message, text, len(messages))
    return messages


def _into(answer: Body, kind: str | None, message: dict[str, Any], text: str, number: int) -> None:
    """Put one shown part into the assistant's message."""
    if kind == "thought":
        answer["reasoning_content"] = text
    elif kind is None:
        answer["content"] += text
    else:
        calls = answer.setdefault("tool_calls", [])
        name, arguments = (
            message["metadata"]["title"].removeprefix("Calls "),
            text.strip("`\n").removeprefix("json\n"),
        )
        calls.append(
            {
                "id": f"call_{number}_{len(calls)}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        )


def shown(messages: list[Body]) -> History:
    """A history of plain messages, as an examples file has them."""
    return [{"role": message["role"], "content": message["content"]} for message in messages]


# ---- as code ----


def as_curl(url: str, body: Body, keyed: bool = False) -> str:
    """A request as a shell command."""
    text = json.dumps(body, ensure_ascii=False, indent=1).replace("'", "'\\''")
    key = '-H "Authorization: Bearer $API_KEY" ' if keyed else ""
    return f"curl {url}/chat/completions {key}-H 'Content-Type: application/json' -d '{text}'"


def as_python(url: str, body: Body, keyed: bool = False) -> str:
    """A request as Python with the openai package."""
    fields = "".join(f"    {name}={_literal(value)},\n" for name, value in body.items())
    key = "YOUR KEY" if keyed else "none"
    return (
        f'from openai import OpenAI\n\nclient = OpenAI(base_url="{url}", api_key="{key}")\n'
        f"reply = client.chat.completions.create(\n{fields})\nprint(reply.choices[0].message.content)"
    )


def _literal(value: Any) -> str:
    return pprint.pformat(value, width=90, sort_dicts=False).replace("\n", "\n    ")
