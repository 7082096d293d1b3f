"""Engine: plan, launch, commit, step. Handle: one request, seen from outside.

Idea: everything that changes the scheduler happens in a step, in one thread at a time; other threads only put
requests and cancellations into an inbox, which the next plan empties. A step may be taken by hand (`step`, or
its three parts), by whoever waits for a Handle, or by the engine's own thread (`start`); the results are the
same.

With `overlap` the device does not wait for these books: step N+1 is planned and launched while N runs, its
newest tokens are filled in on the device, and the results of N are booked while N+1 runs. So they come one
step late, and a sequence that N ends has a row in N+1, whose token is thrown away. A prompt is planned only
when everything is booked, and its step is booked at once, so that the first token leaves soon.

    this thread: | plan(N+1) | launch(N+1) | wait for sample(N) | book(N) | queue sample(N+1) | plan(N+2) ...
    the device:  | forward(N)                     | sample(N) | forward(N+1)                      | ...

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
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dskit.engine import sampler
from dskit.engine.canary import Canary
from dskit.engine.config import EngineConfig
from dskit.engine.draft import Drafter
from dskit.engine.grammar import Grammars, State
from dskit.engine.host import current
from dskit.engine.runner import Work
from dskit.engine.scheduler import Scheduler
from dskit.engine.seq import (
    Chunk,
    Request,
    RequestError,
    Result,
    RoundRecord,
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

    rank = 0  # where it is served

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
            if self.finished:
                return
            if self._listener is None:
                self._events.append(event)
            self.finished = event.finish_reason is not None
            if self._listener is not None:
                self._tell(event)
            self._news.notify_all()

    def _tell(self, event: TokenEvent) -> None:
        """A listener that fails (its event loop is gone) costs its own request, not the engine."""
        try:
            self._listener(event)
        except Exception:
            logger.exception("the listener of request %s failed; cancelling it", self.request_id)
            self._listener = None
            self._engine.cancel(self.request_id)


@dataclass
class Flight:
    """A step on its way: its plan, and what the device will have made of it."""

    plan: StepPlan
    logits: Future
    plan_s: float
    launch_s: float
    tokens: Future | None = None  # of a function that reads the outputs


class Inline(Executor):
    """Runs what it is given at once: a GPU queues it by itself, and without overlap nobody is to wait."""

    def submit(self, work: Callable, /, *args: Any) -> Future:
        """A future that is done."""
        future: Future = Future()
        try:
            future.set_result(work(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class Engine:
    """Serves requests over one runner.

    `decode` maps ids to text; `defaults` are the keys of generation_config.json; `eos_ids` end a sequence;
    `grammars` compiles structured output.
    """

    failure: str | None = None  # why the engine can serve no more, ever
    on_failure: Callable[[], None] | None = None  # called when that is known

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
        grammars: Grammars | None = None,
    ):
        self.runner, self.cfg, self.vocab_size = runner, cfg, vocab_size
        self.scheduler = Scheduler(cfg, blocks, slots, eos_ids)
        self._decode, self._defaults, self._grammars = decode, dict(defaults or {}), grammars
        self._pieces: dict[int, str] = {}  # texts of tokens, see TextStream
        self._handles: dict[str, Handle] = {}
        # a sequence to add, the id of a request to cancel, or what to do between two steps
        self._inbox: deque[Sequence | str | Callable[[], None]] = deque()
        self._inbox_tokens = 0  # of the prompts in it
        self._news = threading.Condition()  # guards _inbox, _handles' keys, _thread, closed
        self._lock, self._where = threading.RLock(), runner.device  # of `_turn`
        self._thread: threading.Thread | None = None
        self._open: StepPlan | None = None  # planned by hand, not yet committed
        self._flights: deque[Flight] = deque()  # oldest first; at most two, one between two steps
        threaded = cfg.overlap and not runner.asynchronous
        self._device = ThreadPoolExecutor(1, "dskit-device") if threaded else Inline()
        self._drafter = Drafter(runner, cfg.accept) if cfg.drafts else None
        self._canary = Canary(cfg, self.scheduler) if cfg.canary != "off" else None
        self._records: deque[StepRecord] = deque(maxlen=4096)
        self._hand = 0.0, 0.0, 0.0  # seconds of plan, launch and wait of a step by hand
        self._next_look = 0.0  # when to look for requests that have taken too long
        self.steps = self.tokens = 0
        self.closed = False

    # ---- from any thread ---------------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Any,
    ) -> Handle:
        """Check a request and put it into the inbox; `options` as for `submit_all`.

        Raises RequestError; its status is 429 when too much is waiting already.
        """
        return self.submit_all([(prompt_ids, params)], [request_id], **options)[0]

    def submit_all(
        self,
        work: Iterable[tuple[Iterable[int], SamplingParams | None]],
        names: Iterable[str | None] | None = None,
        *,
        scoring: bool = False,
        cache_salt: str = "",
        priority: int = 0,
        timeout: float | None = None,
    ) -> list[Handle]:
        """Check prompts with their parameters and put them all into the inbox, or none.

        Equal prompts that come together are computed once. `scoring` asks for the logits of all rows, the
        others are those of seq.Request.
        """
        _check_options(priority, timeout, cache_salt)
        work = list(work)
        admitted = []
        for (prompt_ids, params), name in zip(work, names or [None] * len(work), strict=True):
            ids = self._check_prompt(prompt_ids, scoring)
            params = self._check_params(params or SamplingParams(), len(ids), scoring)
            name = name or f"req-{secrets.token_hex(8)}"
            request = Request(name, ids, params, scoring, cache_salt, priority, timeout)
            admitted.append((request, self.grammar_of(request)))
        with self._news:
            if self.closed:
                raise RuntimeError("the engine is closed; make a new LLM")
            self._check_queue([len(request.prompt_ids) for request, _ in admitted])
            names = [request.request_id for request, _ in admitted]
            if taken := next((name for name in names if name in self._handles), None):
                raise RequestError(f"a request {taken!r} is being served", param="request_id")
            return self.take(admitted)

    def grammar_of(self, request: Request) -> State | None:
        """What its text has to follow, compiled. Raises RequestError."""
        wanted = request.params.structured_outputs
        return self._grammars.state(wanted, len(request.prompt_ids)) if wanted else None

    def take(self, admitted: list[tuple[Request, State | None]]) -> list[Handle]:
        """Put requests that were checked already, with their grammars, into the inbox."""
        handles = []
        for request, grammar in admitted:
            seq = Sequence(request, TextStream(self._decode, request.params.stop, self._pieces))
            seq.grammar = grammar
            handles.append(Handle(self, seq))
        with self._news:
            self._handles |= {handle.request_id: handle for handle in handles}
            self._inbox_tokens += sum(handle._seq.prompt_len for handle in handles)
            self._inbox.extend(handle._seq for handle in handles)
            self._news.notify_all()
        return handles

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
            with self._turn():
                if self._open is None:
                    self._empty_inbox()
                    self._land_all()

    def between_steps(self, work: Callable[[], Any]) -> Any:
        """Run `work` while no step runs, in the thread that takes the steps; waits, and gives its result."""
        if not self.driven_elsewhere:
            with self._turn():
                self._land_all()
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
        with self._turn():
            with self._news:
                self.closed = True
                self._inbox.extend(list(self._handles))
            self._empty_inbox()
            self._land_all()
            self._device.shutdown()
            if self._grammars:
                self._grammars.close()
            self.runner = self._drafter = None

    @property
    def driven_elsewhere(self) -> bool:
        """True while another thread takes the steps."""
        return self._thread is not None and self._thread is not threading.current_thread()

    @property
    def has_work(self) -> bool:
        """True while some request is not finished."""
        return bool(self._inbox or self._flights) or self.scheduler.has_work

    def stats(self) -> dict[str, int]:
        """Where the engine stands now: requests, blocks, slots, and totals since the start."""
        s, graphs = self.scheduler, getattr(self.runner, "graphs", None)
        return (graphs.counts if graphs else {}) | {
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

    def block_rows(self) -> list[dict[str, Any]]:
        """Who holds each cache block: {"block", "requests", "cached"}, the last if the prefix tree does.

        `blocks_free` of `stats` are those without requests, `blocks_cached` those that are cached.
        """
        with self._turn():
            s = self.scheduler
            rows = {n: {"block": n, "requests": [], "cached": False} for n in range(1, s.blocks.total + 1)}
            for seq in s.alive():
                for block in seq.blocks:
                    rows[block]["requests"].append(seq.request_id)
            for node in s.tree.nodes.values():
                rows[node.block]["cached"] = True
            return list(rows.values())

    def check(self) -> None:
        """Raise CanaryError if a block or slot is lost, or held by nobody; needs a canary."""
        with self._turn():
            self._canary.check_books([flight.plan for flight in self._flights])

    def forget(self) -> None:
        """Reuse nothing that was computed until now: call it when kernels or weights have changed."""
        with self._turn():
            self.scheduler.tree.clear()

    def rounds(self) -> list[RoundRecord]:
        """The newest rounds with a draft, and how many of its guesses held."""
        return list(self.scheduler.rounds)

    def trace(self) -> list[StepRecord]:
        """The newest steps and their times."""
        return list(self._records)

    # ---- one step ----------------------------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """Take one turn; returns its events, which the handles get too.

        Without overlap: plan, launch and commit a step. With it: plan and launch one and commit the one
        before, so that [] does not mean that there is nothing to do.
        """
        with self._turn():
            self._require_no_open_plan()
            try:
                return self._step()
            except BaseException as error:  # Ctrl-C in a notebook: the books must stay in order
                if not isinstance(error, Exception):
                    self._give_up(f"interrupted by {type(error).__name__}")
                raise

    def plan(self) -> StepPlan | None:
        """Take in what the inbox holds and decide the next step; None when there is nothing to compute."""
        if self.driven_elsewhere:
            raise RuntimeError("the engine's own thread takes the steps; call stop() to take them by hand")
        with self._turn():
            self._require_no_open_plan()
            self._land_all()
            begin = time.perf_counter()
            self._empty_inbox()
            self._open = self.scheduler.plan()
            self._hand = time.perf_counter() - begin, 0.0, 0.0
            return self._open

    def launch(self, plan: StepPlan) -> StepResult:
        """Run the model over the planned rows and sample; a failure becomes the result's `error`."""
        begin = time.perf_counter()
        with self._turn():
            flight = self._launch(plan, self._hand[0])
            self._sample(flight)
            launched = time.perf_counter()
            result = self._result(flight)
        self._hand = self._hand[0], launched - begin, time.perf_counter() - launched
        return result

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Book a step's result and send its events out."""
        with self._turn():
            if plan is not self._open:
                raise RuntimeError("this plan is not the open one; every plan is committed once")
            self._open = None
            return self._book(plan, result, *self._hand)

    # ---- inside ------------------------------------------------------------------------------------------

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One thread at a time takes steps, and the device of the model is its current one meanwhile."""
        with self._lock, current(self._where):
            yield

    def _step(self) -> list[TokenEvent]:
        begin = time.perf_counter()
        self._empty_inbox()
        plan, events = self.scheduler.plan(ahead=bool(self._flights)), []
        if plan is None and self._flights:  # what comes next depends on what is not booked yet
            events = self._land()
            begin, plan = time.perf_counter(), self.scheduler.plan()
        return events if plan is None else events + self._fly(plan, time.perf_counter() - begin)

    def _fly(self, plan: StepPlan, plan_s: float) -> list[TokenEvent]:
        """Launch a step, book the one before, choose the tokens; without overlap, book it too."""
        events: list[TokenEvent] = []
        self._open = plan
        self._flights.append(self._launch(plan, plan_s))
        self._open = None
        if len(self._flights) > 1:
            events += self._land()
        self._sample(self._flights[-1])  # penalties and grammars need the tokens that were just booked
        if not self.cfg.overlap or plan.kind == "prefill" or not self.scheduler.has_work:
            events += self._land()
        return events

    def _launch(self, plan: StepPlan, plan_s: float) -> Flight:
        """Let the device compute the logits of a step."""
        begin = time.perf_counter()
        if self._canary and plan.chunks:  # one without rows runs before the copies that are due
            self._canary.poison(plan.copies)
        work = [_work(chunk) for chunk in plan.chunks if chunk.origin is None]
        logits = self._device.submit(self._forward, work, plan)
        return Flight(plan, logits, plan_s, time.perf_counter() - begin)

    def _forward(self, work: list[Work], plan: StepPlan) -> torch.Tensor:
        return self.runner.run(work, plan.copies)

    def _sample(self, flight: Flight) -> None:
        """Let the device choose the tokens of a step, and the draft guess what follows them."""
        begin, runner = time.perf_counter(), self.runner if self.cfg.overlap else None
        self.scheduler.foresee(flight.plan)
        flight.tokens = self._device.submit(_outputs, flight.plan, flight.logits, runner, self._drafter)
        flight.launch_s += time.perf_counter() - begin

    def _result(self, flight: Flight) -> StepResult:
        """Wait for a step."""
        try:
            return StepResult(flight.tokens.result()())
        except Exception as error:
            plan = flight.plan
            logger.exception("a %s step of %d rows failed", plan.kind, plan.rows)
            return _failed(f"the {plan.kind} step failed: {type(error).__name__}: {error}")

    def _land(self) -> list[TokenEvent]:
        """Wait for the oldest step on its way and book it."""
        flight, begin = self._flights[0], time.perf_counter()
        result = self._result(flight)
        events = self._book(flight.plan, result, flight.plan_s, flight.launch_s, time.perf_counter() - begin)
        self._flights.popleft()
        if self._canary:
            self._canary.check_books([flight.plan for flight in self._flights])
        return events

    def _land_all(self) -> None:
        while self._flights:
            self._land()

    def _book(self, plan: StepPlan, result: StepResult, *seconds: float) -> list[TokenEvent]:
        """Commit a step to the scheduler, send its events, record its times (plan, launch, wait)."""
        begin = time.perf_counter()
        if self._canary and result.error is None:
            self._canary.follow(plan)
        events = self.scheduler.commit(plan, result)
        self._send(events)
        self.steps += 1
        self.tokens += (tokens := sum(event.token_id is not None for event in events))
        end = time.perf_counter()
        micros = [1e6 * t for t in (*(seconds or (0.0, 0.0, 0.0)), end - begin)]
        self._records.append(StepRecord(plan.kind, plan.rows, len(plan.chunks), *micros, tokens, end))
        return events

    def _require_no_open_plan(self) -> None:
        if self._open is not None:
            raise RuntimeError("the last plan is not committed yet; launch it and commit its result")

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
        with self._turn():
            self._give_up(error)
            self._empty_inbox()
            self._send([self.scheduler.finish(s, "error", error) for s in self.scheduler.alive()])

    def _give_up(self, error: str) -> None:
        """End the requests of every step that is on its way."""
        wait([flight.logits for flight in self._flights])
        plans = [flight.plan for flight in self._flights] + ([self._open] if self._open else [])
        self._flights.clear()
        self._open = None
        for plan in plans:
            self._send(self.scheduler.commit(plan, _failed(error)))

    def _empty_inbox(self) -> None:
        """Add the new sequences, end the cancelled ones, run what waits for the end of a step."""
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Sequence):
                self._inbox_tokens -= item.prompt_len
                self.scheduler.add(item)
            elif callable(item):
                self._land_all()
                item()
            else:
                gone = [s for s in self.scheduler.alive() if s.request.request_id == item]
                self._send([self.scheduler.finish(s, "abort") for s in gone])
        if (now := time.perf_counter()) > self._next_look:
            self._next_look = now + 0.1
            late = self.scheduler.expired(now)
            self._send([self.scheduler.finish(seq, "error", why) for seq, why in late])

    def _send(self, events: list[TokenEvent]) -> None:
        for event in events:
            handle = self._handles[event.request_id]
            if event.finish_reason:
                with self._news:
                    del self._handles[event.request_id]
            handle._push(event)

    def _check_queue(self, lengths: list[int]) -> None:
        """Backpressure: refuse what would have to wait behind too much. Raises RequestError, status 429."""
        requests, tokens = self._queued()
        for what, have, add, name in (
            ("requests", requests, len(lengths), "max_queued_requests"),
            ("prompt tokens", tokens, sum(lengths), "max_queued_tokens"),
        ):
            most = getattr(self.cfg, name)
            if most is not None and have + add > most and (have or what == "requests"):
                raise RequestError(
                    f"{have + add} {what} would wait, and {name} allows {most}; try again later",
                    code="queue_full",
                    status=429,
                )

    def _queued(self) -> tuple[int, int]:
        """Requests that wait, and the tokens of their prompts."""
        waiting = self.scheduler.waiting
        return len(waiting) + len(self._inbox), self.scheduler.waiting_tokens + self._inbox_tokens

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
        if params.structured_outputs and self._grammars is None:
            raise RequestError(
                "this engine has no tokenizer, which grammars need", param="structured_outputs"
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
    s, want = c.seq, "all" if c.drafts else c.want
    return Work(
        s.slot, s.blocks, c.tokens, c.start, c.stop, s.prompt_len, want, c.fresh, c.saves, c.unknown
    )


def _fulfil(done: Future, work: Callable[[], Any]) -> None:
    """Run `work` and put its result, or what it raised, where the caller waits."""
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)


def _failed(error: str) -> StepResult:
    return StepResult([], error)


def _check_options(priority: int, timeout: float | None, cache_salt: str) -> None:
    """Raises RequestError."""
    if not isinstance(cache_salt, str):
        raise RequestError(f"cache_salt is {cache_salt!r}; it must be a string", param="cache_salt")
    if not isinstance(priority, int):
        raise RequestError(f"priority is {priority!r}; it must be an integer", param="priority")
    if timeout is not None and not timeout > 0:
        raise RequestError(f"timeout is {timeout!r}; it must be seconds above 0", param="timeout")


def _outputs(
    plan: StepPlan, logits: Future, runner: Any | None, drafter: Drafter | None
) -> Callable[[], list]:
    """Start to sample, and tell the runner of the new tokens if it is to go on before they are read.

    The function that comes back reads one output per chunk: Sampled, a tensor, or None (StepResult).
    """
    logits_RV, chunks = logits.result(), plan.chunks
    last, scored = chunks, {}
    if plan.kind == "prefill":
        last = [c for c in chunks if c.want == "last"]
        counts = [c.rows_wanted for c in chunks]
        parts = dict(zip(chunks, logits_RV.split(counts), strict=True))
        scored = {c: part for c, part in parts.items() if c.want == "all"}
        logits_RV = torch.cat([logits_RV[:0], *(parts[c.origin or c] for c in last)])
    if not last and not (drafter and drafter.joint):
        chosen = list
    elif drafter is not None:
        rounds = drafter.rounds(last, logits_RV)
        chosen = lambda: rounds  # noqa: E731
    else:
        drawn = sampler.start(logits_RV, [c.seq for c in last])
        chosen = drawn.read
        if runner is not None:
            runner.publish([c.seq.slot for c in last], drawn.ids_R)

    def read() -> list:
        found = dict(zip(last, chosen(), strict=True))
        found |= {c: _scores(part) for c, part in scored.items()}
        return [found.get(c) for c in chunks]

    return read


def _scores(logits_RV: torch.Tensor):
    """Logits for a scoring request, or its error."""
    return logits_RV.cpu() if logits_RV.isfinite().all() else Sampled(None, error=sampler.NOT_FINITE)
