"""Engine: plan, launch, commit, step. Handle: one request, seen from outside.

Idea: everything that changes the scheduler happens in a step, in one thread at a time; other threads only put
requests and cancellations into an inbox, which the next plan empties. A step may be taken by hand (`step`, or
its three parts), by whoever waits for a Handle, or by the engine's own thread (`start`); the results are the
same.

Units: microseconds in StepRecord, seconds elsewhere.
State: an Engine owns its runner's caches until `close`. A request ends exactly once, with a `finish_reason`.
Errors: RequestError from `submit` when a request can't be served; RuntimeError from `submit` after `close`.
Whatever fails inside a step ends the requests of that step with reason "error" and leaves the others alone.
Source: engine.md sections 3, 20, 21.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any

import torch

from dskit.engine.canary import Canary
from dskit.engine.config import EngineConfig
from dskit.engine.runner import Work
from dskit.engine.sampler import NOT_FINITE, sample
from dskit.engine.scheduler import Scheduler
from dskit.engine.seq import (
    Chunk,
    Request,
    RequestError,
    Result,
    Sampled,
    SamplingParams,
    Sequence,
    StepPlan,
    StepRecord,
    StepResult,
    TokenEvent,
)
from dskit.engine.text import TextStream

logger = logging.getLogger("dskit.engine")


class Handle:
    """A submitted request, usable from any thread: iterate for its events, `result()` for all of it,
    `cancel()`.

    Whoever waits takes the steps, unless the engine's own thread does.
    """

    def __init__(self, engine: Engine, seq: Sequence):
        self.request_id = seq.request.request_id
        self._engine, self._seq = engine, seq
        self._events: deque[TokenEvent] = deque()
        self._news = threading.Condition()
        self._listener: Callable[[TokenEvent], None] | None = None
        self.finished = False

    def __iter__(self) -> Iterator[TokenEvent]:
        """Events as they come; the last one has a finish_reason."""
        while (event := self._next()) is not None:
            yield event

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """The same for asyncio; starts the engine's thread."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue()
        self._engine.start()
        self.subscribe(lambda event: loop.call_soon_threadsafe(events.put_nowait, event))
        while True:
            event = await events.get()
            yield event
            if event.finish_reason:
                return

    def subscribe(self, listener: Callable[[TokenEvent], None]) -> None:
        """Call `listener` for every unread and later event, in the thread that takes the step."""
        with self._news:
            while self._events:
                listener(self._events.popleft())
            self._listener = listener

    def cancel(self) -> None:
        """Stop; takes effect before the next step, frees everything, and ends the events with reason
        "abort"."""
        if not self.finished:
            self._engine.cancel(self.request_id)

    def result(self) -> Result:
        """Wait for the end and return everything, whether or not the events were read."""
        while not self.finished:
            self._wait(lambda: self.finished)
        return self._seq.result()

    @property
    def logits(self) -> torch.Tensor:
        """Of a finished scoring request: float32 [tokens, vocab]."""
        return torch.cat(self._seq.logits)

    @property
    def usage(self):
        """Counts and times so far."""
        return self._seq.usage()

    def _next(self) -> TokenEvent | None:
        while not self._events and not self.finished:
            self._wait(lambda: self._events or self.finished)
        return self._events.popleft() if self._events else None

    def _wait(self, ready: Callable[[], Any]) -> None:
        """Wait a little for the engine's thread, or take a step."""
        if self._engine.driven_elsewhere:
            with self._news:
                self._news.wait_for(ready, timeout=0.2)
        else:
            self._engine.step()

    def _push(self, event: TokenEvent) -> None:
        with self._news:
            if self._listener is None:
                self._events.append(event)
            else:
                self._tell(event)
            self.finished = event.finish_reason is not None
            self._news.notify_all()

    def _tell(self, event: TokenEvent) -> None:
        """A listener that fails (its event loop is gone) costs its own request, not the engine."""
        try:
            self._listener(event)
        except Exception:
            logger.exception("the listener of request %s failed; cancelling it", self.request_id)
            self._listener = None
            self._engine.cancel(self.request_id)


class Engine:
    """Serves requests over one runner.

    `decode` maps ids to text; `defaults` are the keys of generation_config.json; `eos_ids` end a sequence.
    """

    def __init__(
        self,
        runner,
        cfg: EngineConfig,
        blocks,
        slots,
        *,
        vocab_size: int,
        eos_ids: Iterable[int] = (),
        decode: Callable[[list[int]], str],
        defaults: Mapping[str, Any] | None = None,
    ):
        self.runner, self.cfg, self.vocab_size = runner, cfg, vocab_size
        self.scheduler = Scheduler(cfg, blocks, slots, frozenset(eos_ids))
        self._decode, self._defaults = decode, dict(defaults or {})
        self._handles: dict[str, Handle] = {}
        # a sequence to add, the id of a request to cancel, or what to do between two steps
        self._inbox: deque[Sequence | str | Callable[[], None]] = deque()
        self._news = threading.Condition()  # guards _inbox, _handles' keys, _thread, closed
        self._turn = threading.RLock()  # held by the thread that takes a step
        self._thread: threading.Thread | None = None
        self._open: StepPlan | None = None  # planned, not yet committed
        self._canary = Canary(cfg, self.scheduler) if cfg.canary != "off" else None
        self._records: deque[StepRecord] = deque(maxlen=4096)
        self._times = [0.0, 0.0]
        self.steps = self.tokens = 0
        self.closed = False

    # ---- from any thread ---------------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        scoring: bool = False,
        cache_salt: str = "",
    ) -> Handle:
        """Check a request and put it into the inbox; `scoring` asks for the logits of all its rows."""
        ids = self._check_prompt(prompt_ids, scoring)
        params = self._check_params(params or SamplingParams(), len(ids), scoring)
        request = Request(request_id or f"req-{secrets.token_hex(8)}", ids, params, scoring, cache_salt)
        seq = Sequence(request, TextStream(self._decode, params.stop))
        handle = Handle(self, seq)
        with self._news:
            if self.closed:
                raise RuntimeError("the engine is closed; make a new LLM")
            queued = len(self.scheduler.waiting) + len(self._inbox)
            if queued >= self.cfg.max_queued_requests:
                raise RequestError(
                    f"{queued} requests are waiting, the most that max_queued_requests allows; try again "
                    "later",
                    code="queue_full",
                    status=429,
                )
            if request.request_id in self._handles:
                raise RequestError(f"a request {request.request_id!r} is being served", param="request_id")
            self._handles[request.request_id] = handle
            self._inbox.append(seq)
            self._news.notify_all()
        return handle

    def cancel(self, request_id: str) -> bool:
        """Ask for the end of a request; False if there is none of that name (any more)."""
        with self._news:
            if request_id not in self._handles:
                return False
            self._inbox.append(request_id)
            self._news.notify_all()
        return True

    def settle(self) -> None:
        """Carry out cancellations now, if no other thread would and no step is open."""
        if not self.driven_elsewhere:
            with self._turn:
                if self._open is None:
                    self._empty_inbox()

    def between_steps(self, work: Callable[[], Any]) -> Any:
        """Run `work` while no step runs, in the thread that takes the steps; waits, and gives its result."""
        if not self.driven_elsewhere:
            with self._turn:
                return work()
        done: Future = Future()
        with self._news:
            self._inbox.append(lambda: _fulfil(done, work))
            self._news.notify_all()
        while not done.done():
            wait([done], timeout=0.2)
            self.settle()  # should the thread have stopped meanwhile
        return done.result()

    def start(self) -> None:
        """Let the engine's own thread take the steps from here on; nothing happens if it already does."""
        with self._news:
            if self._thread is None and not self.closed:
                self._thread = threading.Thread(target=self._serve, name="dskit-engine", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop the engine's own thread after its step; requests stay where they are."""
        with self._news:
            thread, self._thread = self._thread, None
            self._news.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def close(self) -> None:
        """End all requests with reason "abort", free everything; calling it twice is fine."""
        self.stop()
        with self._turn:
            with self._news:
                self.closed = True
                self._inbox.extend(list(self._handles))
            self._empty_inbox()
            self.runner = None

    @property
    def driven_elsewhere(self) -> bool:
        """True while another thread takes the steps."""
        return self._thread is not None and self._thread is not threading.current_thread()

    @property
    def has_work(self) -> bool:
        """True while some request is not finished."""
        return bool(self._inbox) or self.scheduler.has_work

    def stats(self) -> dict[str, int]:
        """Where the engine stands now: requests, blocks, slots, and totals since the start."""
        s = self.scheduler
        return {
            "running": len(s.running),
            "waiting": len(s.waiting) + len(self._inbox),
            "blocks_free": s.free_blocks,
            "blocks_total": s.blocks.total,
            "blocks_cached": len(s.tree.nodes),
            "slots_free": s.slots.free_count,
            "steps": self.steps,
            "tokens": self.tokens,
            "preemptions": s.preemptions,
            "evictions": s.tree.evictions,
        }

    def check(self) -> None:
        """Raise CanaryError if a block or slot is lost, or held by nobody; needs a canary."""
        with self._turn:
            self._canary.check_books([])

    def forget(self) -> None:
        """Reuse nothing that was computed until now: call it when kernels or weights have changed."""
        with self._turn:
            self.scheduler.tree.clear()

    def trace(self) -> list[StepRecord]:
        """The newest steps and their times."""
        return list(self._records)

    # ---- one step ----------------------------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """Plan, launch and commit once; returns the events, which the handles get too ([]: no work)."""
        with self._turn:
            plan = self._plan()
            if plan is None:
                return []
            try:
                result = self.launch(plan)
            except BaseException as error:  # Ctrl-C in a notebook: the books must stay in order
                self.commit(plan, StepResult([], f"interrupted by {type(error).__name__}"))
                raise
            return self.commit(plan, result)

    def plan(self) -> StepPlan | None:
        """Take in what the inbox holds and decide the next step; None when there is nothing to compute."""
        if self.driven_elsewhere:
            raise RuntimeError("the engine's own thread takes the steps; call stop() to take them by hand")
        return self._plan()

    def launch(self, plan: StepPlan) -> StepResult:
        """Run the model over the planned rows and sample; a failure becomes the result's `error`."""
        begin = time.perf_counter()
        if self._canary:
            self._canary.poison(plan.copies)
        try:
            logits = self.runner.run([_work(chunk) for chunk in plan.chunks], plan.copies)
            result = StepResult(_outputs(plan, logits))
        except Exception as error:
            logger.exception("a %s step of %d rows failed", plan.kind, plan.rows)
            result = StepResult([], f"the {plan.kind} step failed: {type(error).__name__}: {error}")
        self._times[1] = time.perf_counter() - begin
        return result

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Book a step's result and send its events out."""
        with self._turn:
            if plan is not self._open:
                raise RuntimeError("this plan is not the open one; every plan is committed once")
            begin = time.perf_counter()
            self._open = None
            if self._canary and result.error is None:
                self._canary.follow(plan)
            events = self.scheduler.commit(plan, result)
            if self._canary:
                self._canary.check_books([])
            self._send(events)
            self.steps += 1
            self.tokens += sum(event.token_id is not None for event in events)
            micros = [1e6 * t for t in (*self._times, time.perf_counter() - begin)]
            self._records.append(StepRecord(plan.kind, plan.rows, len(plan.chunks), *micros))
            return events

    # ---- inside ------------------------------------------------------------------------------------------

    def _plan(self) -> StepPlan | None:
        with self._turn:
            if self._open is not None:
                raise RuntimeError("the last plan is not committed yet; launch it and commit its result")
            begin = time.perf_counter()
            self._empty_inbox()
            self._open = self.scheduler.plan()
            self._times[0] = time.perf_counter() - begin
            return self._open

    def _serve(self) -> None:
        """The engine's own thread: steps while there is work, sleep while there is none."""
        me = threading.current_thread()
        while self._thread is me:
            with self._news:
                self._news.wait_for(lambda: self.has_work or self._thread is not me)
            if self._open is not None:  # someone takes this step by hand
                time.sleep(0.01)
                continue
            try:
                if self._thread is me:
                    self.step()
            except Exception as error:
                logger.exception("a step could not be planned or booked; ending every request")
                self._abandon(f"the engine failed: {type(error).__name__}: {error}")

    def _abandon(self, error: str) -> None:
        """End every request after a failure outside the model, so that nobody waits for ever."""
        with self._turn:
            self._open = None
            self._empty_inbox()
            self._send([self.scheduler.finish(s, "error", error) for s in self.scheduler.alive()])

    def _empty_inbox(self) -> None:
        """Add the new sequences, end the cancelled ones, run what waits for the end of a step."""
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Sequence):
                self.scheduler.add(item)
            elif callable(item):
                item()
            else:
                gone = [s for s in self.scheduler.alive() if s.request.request_id == item]
                self._send([self.scheduler.finish(s, "abort") for s in gone])

    def _send(self, events: list[TokenEvent]) -> None:
        for event in events:
            handle = self._handles[event.request_id]
            if event.finish_reason:
                with self._news:
                    del self._handles[event.request_id]
            handle._push(event)

    def _check_prompt(self, prompt_ids: Iterable[int], scoring: bool) -> list[int]:
        """Admission of a prompt: not empty, inside the vocabulary, inside the context."""
        if isinstance(prompt_ids, str):
            raise RequestError(
                "the engine takes token ids; encode the text first, or use LLM.submit", param="prompt"
            )
        ids = prompt_ids.tolist() if hasattr(prompt_ids, "tolist") else list(prompt_ids)
        try:
            ids = [operator.index(i) for i in ids]
        except TypeError:
            raise RequestError("a prompt is a flat list of token ids (integers)", param="prompt") from None
        if not ids:
            raise RequestError(
                "the prompt is empty; give at least one token", param="prompt", code="empty_prompt"
            )
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            bad = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise RequestError(
                f"the prompt has token id {bad}, outside the vocabulary of {self.vocab_size}", param="prompt"
            )
        limit = self.cfg.max_model_len - (0 if scoring else 1)
        if len(ids) > limit:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, but max_model_len {self.cfg.max_model_len} allows "
                f"{limit}",
                param="prompt",
                code="context_length_exceeded",
            )
        return ids

    def _check_params(self, params: SamplingParams, prompt_len: int, scoring: bool) -> SamplingParams:
        """Parameters with every None filled in and every id checked. Raises RequestError."""
        params = params.resolve(self._defaults, max_tokens=max(1, self.cfg.max_model_len - prompt_len))
        if prompt_len + params.max_tokens > self.cfg.max_model_len and not scoring:
            raise RequestError(
                f"{prompt_len} prompt tokens and max_tokens {params.max_tokens} are more than max_model_len "
                f"{self.cfg.max_model_len}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        for name in ("logit_bias", "stop_token_ids"):
            bad = [i for i in getattr(params, name) if i >= self.vocab_size]
            if bad:
                raise RequestError(
                    f"{name} has token id {bad[0]}, outside the vocabulary of {self.vocab_size}", param=name
                )
        if scoring and self.cfg.replay != "off":
            raise RequestError(
                f"logits of a whole prompt need replay='off'; this engine has replay={self.cfg.replay!r}, "
                "which computes the last rows only",
                param="replay",
            )
        return params


def _work(c: Chunk) -> Work:
    """What the runner needs to know of a chunk."""
    s = c.seq
    return Work(s.slot, s.blocks, s.tokens, c.start, c.stop, s.prompt_len, c.want, c.fresh, c.saves)


def _outputs(plan: StepPlan, logits_RV: torch.Tensor) -> list:
    """The rows that came back, one output per chunk: Sampled, a tensor, or None (StepResult)."""
    if all(chunk.want == "last" for chunk in plan.chunks):
        return sample(logits_RV, [chunk.seq for chunk in plan.chunks])
    rows = {"last": lambda c: 1, "none": lambda c: 0, "all": lambda c: c.stop - c.start}
    parts = logits_RV.split([rows[c.want](c) for c in plan.chunks])
    last = [i for i, c in enumerate(plan.chunks) if c.want == "last"]
    outputs = [_scores(part) if c.want == "all" else None for c, part in zip(plan.chunks, parts, strict=True)]
    if last:
        tokens = sample(torch.cat([parts[i] for i in last]), [plan.chunks[i].seq for i in last])
        for i, token in zip(last, tokens, strict=True):
            outputs[i] = token
    return outputs


def _fulfil(done: Future, work: Callable[[], Any]) -> None:
    """Run `work` and put its result, or what it raised, where the caller waits."""
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)


def _scores(logits_RV: torch.Tensor):
    """Logits for a scoring request, or its error."""
    return logits_RV.cpu() if logits_RV.isfinite().all() else Sampled(None, error=NOT_FINITE)
