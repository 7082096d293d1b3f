"""From the engine's events to the bodies of the API: one Reply per request, one Choice per answer in it.

Idea
    A Reply submits the choices of a request and gathers their events in one queue of the event loop,
    whichever thread takes the steps. A Choice turns the events of one answer into chunks (for a stream) and
    keeps what a whole body needs. The chat page uses both, so that page and API cannot differ.

Shapes
    batches: lists of (index, TokenEvent), everything that has come since the last; chunks: dicts of OpenAI's
    shape with one choice each.

State
    A Reply holds cache blocks until each choice has ended or `cancel` is called; whoever makes one calls
    `cancel` at the end, which does no harm after the last event.

Errors
    RequestError from the constructor; EngineFailure from `push` when a step failed.

Source
    engine.md 18.2 and 20 (a reader that stalls for 60 s with 256 events unread is cut off).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from dskit.chat import Prompt, StreamParser, Tokenizer
from dskit.engine.llm import LLM
from dskit.engine.seq import SamplingParams, TokenEvent

Chunk = dict[str, Any]
UNREAD, STALLED = 256, 60.0  # events, seconds


class EngineFailure(RuntimeError):
    """A step failed, and this answer with it."""


class Reply:
    """The choices of one request, submitted together: `work` holds (token ids, parameters) for each.

    `options` are those of Engine.submit_all.
    """

    def __init__(
        self,
        llm: LLM,
        request_id: str,
        work: list[tuple[list[int], SamplingParams]],
        loop: asyncio.AbstractEventLoop,
        options: dict[str, Any] | None = None,
    ):
        self.request_id, self.created = request_id, int(time.time())
        self.started = self._read = time.monotonic()
        self._queue: asyncio.Queue[tuple[int, TokenEvent]] = asyncio.Queue()
        self._open = len(work)
        names = [f"{request_id}-{index}" for index in range(len(work))]
        self.handles = llm.submit_all(work, names, **options or {})
        for index, handle in enumerate(self.handles):
            handle.subscribe(partial(loop.call_soon_threadsafe, self._put, index))

    async def batches(self, every: float = 0.0) -> AsyncIterator[list[tuple[int, TokenEvent]]]:
        """Events as they come, at most one list in `every` seconds; ends after the last choice has."""
        while self._open:
            batch = [await self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get_nowait())
            self._read = time.monotonic()
            self._open -= sum(event.finish_reason is not None for _, event in batch)
            yield batch
            if every and self._open:
                await asyncio.sleep(every)

    def cancel(self) -> None:
        """End what has not ended; its blocks are free before the next step."""
        for handle in self.handles:
            handle.cancel()

    def usage(self, prompts: int = 1, reasoning_tokens: int | None = None) -> Chunk:
        """Token counts over all choices; the prompt of several choices counts once."""
        each = [handle.usage for handle in self.handles]
        first = each[:: len(each) // prompts]
        read, written = sum(u.prompt_tokens for u in first), sum(u.completion_tokens for u in each)
        usage: Chunk = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        usage["prompt_tokens_details"] = {"cached_tokens": sum(u.cached_tokens for u in first)}
        details = {} if reasoning_tokens is None else {"reasoning_tokens": reasoning_tokens}
        if drafted := sum(u.drafted for u in each):
            accepted = sum(u.accepted for u in each)
            details |= {"accepted_prediction_tokens": accepted,
                        "rejected_prediction_tokens": drafted - accepted}
        return usage | ({"completion_tokens_details": details} if details else {})

    def _put(self, index: int, event: TokenEvent) -> None:
        self._queue.put_nowait((index, event))
        if self._queue.qsize() > UNREAD and time.monotonic() - self._read > STALLED:
            self.cancel()


class ChatChoice:
    """One answer of a chat: reasoning, content and tool calls apart, by deepseek-recipe."""

    def __init__(
        self, index: int, prompt: Prompt, reply: Reply, model: str, tokenizer: Tokenizer, logprobs: bool
    ):
        self.index, self._reply, self._tokenizer = index, reply, tokenizer
        self._parser = StreamParser(prompt, request_id=reply.request_id, model=model)
        self._logprobs = {"content": [], "reasoning_content": []} if logprobs else None
        self._unsaid: list[dict] = []  # log-probabilities of tokens whose text is held back
        self._tokens = 0  # likewise their number
        self._finish_reason: str | None = None
        self.reasoning_tokens = 0

    def start(self) -> list[Chunk]:
        """The chunk that opens the message."""
        return self._mend(self._parser.start())

    def push(self, event: TokenEvent) -> list[Chunk]:
        """Chunks that follow from one event."""
        fail(event)
        self._tokens += event.token_id is not None
        if self._logprobs is not None and event.logprob is not None:
            self._unsaid.append(spell(event, self._tokenizer))
        chunks = self._parser.push(event.text) if event.text else []
        if chunks:  # text that is held back is counted with what comes after it
            if any(chunk["choices"][0]["delta"].get("reasoning_content") for chunk in chunks):
                self.reasoning_tokens += self._tokens
            self._tokens = 0
        if event.finish_reason:
            chunks += self._parser.finish(event.finish_reason)
        return self._mend(chunks, event.finish_reason)

    def whole(self) -> Chunk:
        """The finished choice of a body that is not streamed."""
        choice = self._parser.response()["choices"][0]
        for call in choice["message"].get("tool_calls") or ():
            call.pop("index", None)
        return choice | {
            "index": self.index,
            "logprobs": self._logprobs,
            "finish_reason": self._finish_reason,
        }

    def _mend(self, chunks: list[Chunk], ended: str | None = None) -> list[Chunk]:
        """Put in what deepseek-recipe can't know: the index, log-probabilities, why the engine stopped."""
        for chunk in chunks:
            choice = chunk["choices"][0]
            choice["index"] = self.index
            chunk.pop("usage", None)  # the engine's counts are used
            if choice["finish_reason"]:
                choice["finish_reason"] = self._finish_reason = (
                    ended if ended in ("length", "abort") else choice["finish_reason"]
                )
            if self._unsaid:
                part = "reasoning_content" if choice["delta"].get("reasoning_content") else "content"
                choice["logprobs"] = {part: self._unsaid}
                self._logprobs[part] += self._unsaid
                self._unsaid = []
        return chunks


class TextChoice:
    """One continuation of a prompt, as text."""

    def __init__(self, index: int, reply: Reply, model: str, tokenizer: Tokenizer, logprobs: int | None):
        self.index, self._tokenizer = index, tokenizer
        self._frame = {
            "id": reply.request_id,
            "object": "text_completion",
            "created": reply.created,
            "model": model,
        }
        self._top = logprobs
        self._logprobs = _empty_logprobs() if logprobs is not None else None
        self._text = ""
        self._finish_reason: str | None = None

    def start(self) -> list[Chunk]:
        """Nothing: a continuation has no opening."""
        return []

    def push(self, event: TokenEvent) -> list[Chunk]:
        """The chunk of one event, if it has text, a log-probability or the end in it."""
        fail(event)
        logprobs = None
        if self._logprobs is not None and event.logprob is not None:
            logprobs = self._logprobs_of(event)
            for name, values in logprobs.items():
                self._logprobs[name] += values
        self._text += event.text
        self._finish_reason = event.finish_reason
        if not (event.text or event.finish_reason or logprobs):
            return []
        choice = {
            "index": self.index,
            "text": event.text,
            "logprobs": logprobs,
            "finish_reason": event.finish_reason,
        }
        return [self._frame | {"choices": [choice]}]

    def whole(self) -> Chunk:
        """The finished choice of a body that is not streamed."""
        return {
            "index": self.index,
            "text": self._text,
            "logprobs": self._logprobs,
            "finish_reason": self._finish_reason,
        }

    def _logprobs_of(self, event: TokenEvent) -> Chunk:
        one = spell(event, self._tokenizer)
        top = {other["token"]: other["logprob"] for other in one["top_logprobs"]} if self._top else None
        return {
            "tokens": [one["token"]],
            "token_logprobs": [one["logprob"]],
            "top_logprobs": [top],
            "text_offset": [len(self._text)],
        }


def _empty_logprobs() -> Chunk:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def spell(event: TokenEvent, tokenizer: Tokenizer) -> Chunk:
    """A token's log-probability beside its spelling and bytes, and those of the likeliest ones."""
    top = [_spelled(token_id, logprob, tokenizer) for token_id, logprob in event.top_logprobs or ()]
    return _spelled(event.token_id, event.logprob, tokenizer) | {"top_logprobs": top}


def _spelled(token_id: int, logprob: float, tokenizer: Tokenizer) -> Chunk:
    text = tokenizer.decode([token_id])
    whole = "\ufffd" not in text  # else the token is a part of a character
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}


def fail(event: TokenEvent) -> None:
    """Raise what an event says went wrong."""
    if event.finish_reason == "error":
        raise EngineFailure(event.error or "the engine failed")
