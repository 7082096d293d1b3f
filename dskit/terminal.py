"""`dskit chat`: a conversation in the terminal, with a model loaded here or with a running server.

Idea: both sources give the same deltas, OpenAI's, so that one loop prints them: the answer on stdout,
thinking dimmed on stderr, and after each reply one line of statistics. Ctrl-C stops a reply; at the prompt
it ends the chat.

Units: seconds, tokens per second.
Errors: a request that cannot be served raises the engine's RequestError or ChatError, or the client's error.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

Delta = dict[str, Any]
DIM, PLAIN = "\033[2m", "\033[0m"


def main(args: Any) -> int:
    """Ask one question (`-q`), or talk until the input ends."""
    source = Remote(args) if args.url else Local(args)
    messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
    try:
        if args.quick is not None:
            reply(source, messages, args.quick, args)
            return 0
        while (text := read_line()) is not None:
            talk(source, messages, text, args)
    finally:
        source.close()
    return 0


def read_line() -> str | None:
    """The next line of input, None at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def talk(source: Local | Remote, messages: list[Delta], text: str, args: Any) -> None:
    """One turn of a conversation: both sides are remembered, unless the reply was stopped."""
    if not text.strip():
        return
    try:
        answer = reply(source, messages, text, args)
    except KeyboardInterrupt:
        print("\nstopped; this turn is forgotten", file=sys.stderr)
        return
    messages += [{"role": "user", "content": text}, answer]


def reply(source: Local | Remote, messages: list[Delta], text: str, args: Any) -> Delta:
    """Print one reply as it comes, then its statistics; returns the assistant message."""
    body = {"messages": [*messages, {"role": "user", "content": text}], "reasoning_effort": args.think}
    body |= {
        name: value for name in ("temperature", "max_tokens") if (value := getattr(args, name)) is not None
    }
    start, first, screen = time.perf_counter(), None, Screen()
    for delta in source.deltas(body):
        first = first or time.perf_counter()
        screen.show(delta)
    screen.end()
    seconds, usage = time.perf_counter() - start, source.usage
    wait = (first or start) - start
    rate = (usage["completion_tokens"] - 1) / max(seconds - wait, 1e-9)
    counts = f"{usage['prompt_tokens']} prompt tokens, {usage['completion_tokens']} generated"
    if usage.get("drafted"):
        counts += f", {usage['accepted']} of {usage['drafted']} guesses held"
    line = f"[{counts}, first after {wait:.2f} s, {rate:.1f} tokens/s, ended by {screen.finish_reason}]"
    print(line, file=sys.stderr)
    return screen.message()


class Screen:
    """Prints deltas where they belong, and keeps the message that they add up to."""

    def __init__(self):
        self.thinking, self.answer, self.calls = "", "", {}
        self.finish_reason = None
        self.dim = (DIM, PLAIN) if sys.stderr.isatty() else ("", "")

    def show(self, delta: Delta) -> None:
        """Print one delta."""
        if text := delta.get("reasoning_content"):
            self.thinking += text
            print(self.dim[0] + text + self.dim[1], end="", file=sys.stderr, flush=True)
        if text := delta.get("content"):
            if self.thinking and not self.answer:
                print(file=sys.stderr)
            self.answer += text
            print(text, end="", flush=True)
        for part in delta.get("tool_calls") or ():
            call = self.calls.setdefault(part["index"], {"id": "", "type": "function", "function": {}})
            call["id"] = part.get("id") or call["id"]
            for name, value in (part.get("function") or {}).items():
                call["function"][name] = call["function"].get(name, "") + (value or "")
        self.finish_reason = delta.get("finish_reason") or self.finish_reason

    def end(self) -> None:
        """Finish the line, then print tool calls, one a line."""
        print()
        for call in self.calls.values():
            print(json.dumps(call["function"]))

    def message(self) -> Delta:
        """The assistant message for the next turn."""
        calls = {"tool_calls": list(self.calls.values())} if self.calls else {}
        return {"role": "assistant", "content": self.answer, **calls}


class Local:
    """A model loaded in this process."""

    def __init__(self, args: Any):
        from dskit.engine.llm import LLM

        self.llm = LLM(args.model, device=args.device, numerics=args.numerics, seed=args.seed)
        self.usage: dict[str, Any] = {}

    def deltas(self, body: dict[str, Any]) -> Iterator[Delta]:
        """Deltas of one reply; leaving the loop early frees what it holds."""
        from dskit.chat import StreamParser

        prompt, params = self.llm.render(body)
        handle, parser = self.llm.submit(prompt.ids, params), StreamParser(prompt)
        yield from _flat(parser.start())
        try:
            for event in handle:
                yield from _flat(parser.push(event.text) if event.text else [])
                if event.finish_reason == "error":
                    raise RuntimeError(handle.result().error)
                if event.finish_reason:
                    yield from _flat(parser.finish(event.finish_reason))
        finally:
            handle.cancel()
            self.usage = vars(handle.usage)

    def close(self) -> None:
        """Free the model."""
        self.llm.close()


class Remote:
    """A server that speaks the OpenAI API."""

    def __init__(self, args: Any):
        from openai import OpenAI

        self.client = OpenAI(base_url=args.url, api_key=args.api_key or "none", max_retries=0)
        self.model = args.model_name or next(iter(self.client.models.list())).id
        self.usage: dict[str, Any] = {}

    def deltas(self, body: dict[str, Any]) -> Iterator[Delta]:
        """Deltas of one reply; leaving the loop early closes the connection, which stops the server."""
        effort = {"reasoning_effort": body["reasoning_effort"]}
        rest = {name: value for name, value in body.items() if name not in effort}
        usage = {"include_usage": True}
        chunks = self.client.chat.completions.create(
            model=self.model, stream=True, stream_options=usage, extra_body=effort, **rest
        )
        with chunks:
            for chunk in chunks:
                plain = chunk.model_dump(exclude_none=True)
                if usage := plain.get("usage"):
                    details = usage.get("completion_tokens_details") or {}
                    accepted, rejected = (details.get(f"{kind}_prediction_tokens") or 0
                                          for kind in ("accepted", "rejected"))
                    self.usage = usage | {"accepted": accepted, "drafted": accepted + rejected}
                yield from _flat([plain])

    def close(self) -> None:
        """End the connection."""
        self.client.close()


def _flat(chunks: list[dict[str, Any]]) -> Iterator[Delta]:
    """The deltas in chunks, the finish reason among their fields; the opening role alone is no news."""
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        delta = {**choice["delta"], "finish_reason": choice.get("finish_reason")}
        if any(value for name, value in delta.items() if name != "role"):
            yield delta
