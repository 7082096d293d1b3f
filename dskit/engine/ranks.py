"""One engine on several ranks: each steps with the others, and rank 0 hands the requests out.

Idea: every rank runs a whole `Engine` over its own caches. Before a step the ranks agree on its kind
(dist.py); a rank with nothing to compute takes part without rows, since the experts it holds are needed, and
one that has nothing to do at all looks again after 20 ms. What rank 0's `LLM` talks to is a `Front`: an
engine like the others, which also sends each request to the rank with the fewest, and passes on what comes
back. To a caller it is one engine.

    rank 0:  LLM - Front --- its own requests         rank 1 ..:  RankEngine --- the requests sent to it
                     |  \\--- links: requests, cancellations -> events <-|
                     \\------- a row of integers before every step ------/

Votes: a prompt is begun when some rank wants to, `prefill_interval` decode steps after the last one (1: at
once), or when all ranks want to, every TOGETHER steps. The wish travels with the row of the step before.

Ranks: `LLM(..., dp=2)` and `dskit serve --dp 2` start the others as fresh interpreters (never forked) on
this node, with the kernels that are chosen here; under torchrun they are there already, and an `LLM` on
another rank than 0 serves until rank 0 closes it, then ends its process.

Triton compiles a kernel when it is first launched, a minute's worth of them in the first steps of a new
machine. On GPUs ranks therefore take steps of all kinds before they say that they have loaded.

Units: seconds.
State: ranks end together. `close` on rank 0 ends all of them in order. Any failure of a step on any rank, a
rank that is gone and one that is silent end the group: open requests get an error that says so, the other
ranks' processes end with code 1, and rank 0's `failure` says why, so that a server can end as well.
Errors: GroupError where the ranks do not fit the machine, would carry rows in different ways, or one does not
come up.
Source: engine.md sections 4.4, 11.2, 23, 25.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist

from dskit import ops
from dskit.engine.dist import DECODE, IDLE, LOADING, PREFILL, STOP, Group, GroupError, Parallel, Watchdog
from dskit.engine.exchange import ALIKE
from dskit.engine.grammar import State
from dskit.engine.loop import Engine, Flight, Handle
from dskit.engine.rebalance import Rebalancer
from dskit.engine.runner import Work
from dskit.engine.seq import Request, RequestError, Result, StepPlan, StepResult, TokenEvent, Usage
from dskit.engine.spec import padded

logger = logging.getLogger("dskit.engine")
TOGETHER = 70  # decode steps after which a prompt is begun if every rank has one
SHARED = ("steps", "eplb_balance", "eplb_draft_balance", "eplb_rebalances", "eplb_failures",
          "eplb_stall_ms")  # not summed
EVERY = 2.0  # between two words about loading
WARM = 8192  # positions of the longest sequence in the steps that compile kernels
WAYS = "exchange.dispatch", "exchange.combine"  # of which ranks must have chosen the same
PAUSE = 0.02  # between two looks of a group that has nothing to do
NAMES = {DECODE: "decode", PREFILL: "prefill"}


# ---- a rank ------------------------------------------------------------------------------------------------


class RankEngine(Engine):
    """The engine of one rank, which steps with the others; `start` it on all of them."""

    def __init__(self, *args: Any, group: Group, rebalancer: Rebalancer | None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.group, self.rebalancer = group, rebalancer
        if self._drafter is not None:
            self._drafter.joint = group.peers.group is not None
        self._kind, self._since = DECODE, 0  # of the next step; decode steps since the last prefill
        self._closing = self._over = False  # rank 0 wants the end; all have agreed on it
        self._resting = False
        self._most = 0, 0  # rows of a rank in this step, and sequences whose next token it chooses
        self._watchdog: Watchdog | None = None
        self.dummies = 0  # steps without rows of this rank

    def warm_up(self) -> None:
        """Have kernels compiled while the group still waits for loading; all ranks do it at the same time.

        The first steps of a new machine take longer than a rank may be silent later on.
        """
        with self._turn():
            self._bring(ALIKE)
            length = min(self.cfg.max_model_len, WARM)
            self.runner.warm_up(self.cfg.max_num_batched_tokens, self.cfg.max_num_seqs, length)
            if self.rebalancer is not None:
                self.rebalancer.warm_up()

    def start(self) -> None:
        """Let the engine's thread step with the others, from here to the end."""
        if self._thread is None and not self.closed:
            self._watchdog = Watchdog(self.group.parallel.timeout, self._stuck)
        super().start()

    def stop(self) -> None:
        """Not by itself: the others would wait. RuntimeError unless the group has ended."""
        if not (self._over or self.failure):
            raise RuntimeError("the ranks of a group step together; close() ends them")
        super().stop()

    def between_steps(self, work: Callable[[], Any]) -> Any:
        """Refused: RuntimeError."""
        raise RuntimeError("the ranks of a group change nothing on their own; choose kernels at the start, "
                           "by --kernels or DSKIT_USE")

    def close(self) -> None:
        """End all requests, here and elsewhere, in the same step; calling it twice is fine."""
        if self.runner is None:
            return
        with self._news:
            self._closing, thread = True, self._thread
            self._news.notify_all()
        if thread is not None:
            thread.join(1.0 if self.failure else self.group.parallel.timeout)
            self._watchdog.close()
        self._over = True
        if thread is None or not thread.is_alive():
            super().close()
            if self.rebalancer is not None:
                self.rebalancer.close()
            self._leave()
        self.closed, self.runner, self._drafter = True, None, None

    def fail(self, error: str) -> None:
        """The group has ended: tell whoever waits. From any thread; the first one counts."""
        with self._news:
            if self.closed:
                return
            self.closed, self.failure, handles = True, error, list(self._handles.values())
        logger.error("%s", error)
        if self.group.peers.window is not None:
            self.group.peers.window.end()
        for handle in handles:
            handle._seq.finish_reason, handle._seq.error = "error", error
            handle._push(TokenEvent(handle.request_id, None, "", finish_reason="error", error=error))
        self._failed()

    def stats(self) -> dict[str, int]:
        """As of one engine; `dummy_steps`, in which this rank had no rows; what moving experts has cost."""
        balance = self.rebalancer.stats() if self.rebalancer else {}
        return super().stats() | {"dummy_steps": self.dummies} | balance

    # ---- inside ------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        self.group.leave()

    def _serve(self) -> None:
        me = threading.current_thread()
        try:
            while self._thread is me and not (self._over or self.failure):
                self.step()
                self._watchdog.beat()
                if self._resting:
                    with self._news:
                        self._news.wait_for(lambda: self._inbox or self._closing, timeout=PAUSE)
        except Exception as error:
            self.fail(self._ended(error))

    def _step(self) -> list[TokenEvent]:
        begin = time.perf_counter()
        self._empty_inbox()
        plan, events = self._planned()
        table = self._agree(plan)
        if self._kind == PREFILL and not any(row.kind == PREFILL for row in table):  # no wish could be met
            self._kind = DECODE
            plan, more = self._planned()
            events += more
            table = self._agree(plan)
        kind = max(row.kind for row in table)
        self._over, self._resting = kind == STOP, kind == IDLE and not any(row.wants for row in table)
        if kind in NAMES:
            self.dummies += plan is None
            self._most = max(row.rows for row in table), max(row.rounds for row in table)
            events += self._fly(plan or StepPlan(NAMES[kind], []), time.perf_counter() - begin)
        self._vote(kind, table)
        if self.failure:
            raise GroupError(self.failure)
        return events

    def _planned(self) -> tuple[StepPlan | None, list[TokenEvent]]:
        """A plan of the agreed kind, once what it depends on is booked; with the events of that."""
        if self._closing:
            return None, []
        plan, events = self.scheduler.plan_as(NAMES[self._kind], ahead=bool(self._flights)), []
        if plan is None and self._flights:
            events = self._land()
            plan = self.scheduler.plan_as(NAMES[self._kind])
        return plan, events

    def _agree(self, plan: StepPlan | None) -> list:
        kind = STOP if self._closing else IDLE if plan is None else self._kind
        wants = not self._closing and self.scheduler.wants_prefill
        rows, rounds = (plan.rows, len(plan.chunks)) if plan else (0, 0)
        return self.group.agree(kind, rows, wants, len(self.scheduler.running), rounds)

    def _vote(self, kind: int, table: list) -> None:
        """What the next step is; every rank comes to the same."""
        self._since = 0 if kind == PREFILL else self._since + (kind == DECODE)
        every, wants = self.cfg.prefill_interval, [bool(row.wants) for row in table]
        due = self._since % every == 0 and (self._since > 0 or every == 1)
        due = due or not any(row.running for row in table)
        together = all(wants) and self._since % TOGETHER == 0
        self._kind = PREFILL if (any(wants) and due) or together else DECODE

    def _launch(self, plan: StepPlan, plan_s: float) -> Flight:
        """The experts' ranks know how many rows any of them brings."""
        self._device.submit(self._bring, padded(self._most[0]))
        return super()._launch(plan, plan_s)

    def _sample(self, flight: Flight) -> None:
        """The draft has a block of rows for each sequence."""
        self._device.submit(self._bring, padded(self._most[1]) * self.runner.config.dspark_block_size)
        super()._sample(flight)

    def _bring(self, rows: int) -> None:
        self.group.peers.rows = rows

    def _forward(self, work: list[Work], plan: StepPlan) -> torch.Tensor:
        logits = self.runner.run(work, plan.copies, plan.kind)  # the same kernels on all ranks
        if self.rebalancer is not None:
            self.rebalancer.after_step(counts=plan.kind == "decode")
        return logits

    def _result(self, flight: Flight) -> StepResult:
        """Wait for a step; after a failure this rank is no longer where the others are."""
        result = super()._result(flight)
        if result.error is not None:
            self.fail(self._ended(result.error))
        return result

    def _ended(self, why: object) -> str:
        return f"the group of {self.group.size} ranks has ended (seen by rank {self.group.rank}): {why}"

    def _stuck(self) -> None:
        self.fail(self._ended(f"no step for {self.group.parallel.timeout:g} s"))

    def _failed(self) -> None:
        """A rank that serves no one but rank 0 has nothing left to do."""
        logging.shutdown()
        os._exit(1)


# ---- between rank 0 and the others -------------------------------------------------------------------------


class Link:
    """Python objects to and from another rank, over an authenticated connection."""

    def __init__(self, end: connection.Connection):
        self.end, self._lock = end, threading.Lock()

    def send(self, *message: Any) -> None:
        """From any thread; OSError when the other side is gone."""
        with self._lock:
            self.end.send_bytes(pickle.dumps(message))

    def receive(self) -> tuple:
        """The next message; EOFError or OSError when the other side is gone."""
        return pickle.loads(self.end.recv_bytes())


@dataclass
class Away:
    """A request that another rank serves, as far as it is known here (what a Handle asks of a Sequence)."""

    request: Request
    so_far: Usage
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    whole: Result | None = None
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    def usage(self) -> Usage:
        """Counts and times so far."""
        return self.so_far

    def result(self) -> Result:
        """What its rank said at the end; what had come, if that rank is gone."""
        return self.whole or Result(self.request.request_id, self.text, self.tokens, self.finish_reason,
                                    self.so_far, self.request.params.seed or 0, error=self.error)


class Front(RankEngine):
    """Rank 0's engine, which the caller sees: requests go to the rank that has the fewest."""

    def __init__(self, *args: Any, seat: Seat, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._seat, self.links = seat, seat.links
        self._asked: dict[int, Future] = {}  # by rank: stats on their way
        self._asking = threading.Lock()

    def warm_up(self) -> None:
        """With an eye on the others: whoever waits for a GPU does not see that they are gone."""
        done = threading.Event()
        threading.Thread(target=self._look_after, args=(done,), name="dskit-loading", daemon=True).start()
        try:
            super().warm_up()
        finally:
            done.set()
        if self.failure:
            raise GroupError(self.failure)

    def start(self) -> None:
        """Step with the others, and listen to them."""
        if self._thread is None and not self.closed:
            for rank, link in self.links.items():
                name = f"dskit-rank-{rank}"
                threading.Thread(target=self._listen, args=(rank, link), name=name, daemon=True).start()
        super().start()

    def take(self, admitted: list[tuple[Request, State | None]]) -> list[Handle]:
        """Spread checked requests over the ranks; equal prompts stay together, to be computed once."""
        with self._news:
            load = Counter(dict.fromkeys(range(self.group.size), 0))
            load.update(handle.rank for handle in self._handles.values())
            homes: dict[int, int] = {}
            for request, _ in admitted:
                home = homes.setdefault(request.prompt_key, min(load, key=lambda rank: (load[rank], rank)))
                load[home] += 1
            parts: dict[int, list[tuple[Request, State | None]]] = {}
            for one in admitted:
                parts.setdefault(homes[one[0].prompt_key], []).append(one)
            found = [handle for rank, part in parts.items() for handle in self._take_at(rank, part)]
            by_name = {handle.request_id: handle for handle in found}
        return [by_name[request.request_id] for request, _ in admitted]

    def cancel(self, request_id: str) -> bool:
        """Ask for the end of a request, wherever it is."""
        handle = self._handles.get(request_id)
        if handle is None or not handle.rank:
            return super().cancel(request_id)
        self._send_to(handle.rank, "cancel", request_id)
        return True

    def stats(self) -> dict[str, int]:
        """Sums over the ranks, but for what is everybody's (SHARED)."""
        own = super().stats()
        with self._asking:
            futures = self._asked = {rank: Future() for rank in ([] if self.closed else self.links)}
            for rank in futures:
                self._send_to(rank, "stats")
            done, _ = wait(futures.values(), timeout=1.0)  # a rank that is gone is found out elsewhere
        for theirs in (future.result() for future in done):
            own |= {name: own[name] + n for name, n in theirs.items() if name not in SHARED}
        return own

    def close(self) -> None:
        """End the group: all requests, then the other ranks."""
        super().close()
        for handle in [handle for handle in self._handles.values() if handle.rank]:
            handle._seq.finish_reason = "abort"
            handle._push(TokenEvent(handle.request_id, None, "", finish_reason="abort"))
        self._seat.dismiss(self.group.parallel.timeout)

    # ---- inside ------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """NCCL lets nobody go alone, so the others hear of it before."""
        self._seat.say_close()
        super()._leave()

    def _take_at(self, rank: int, admitted: list[tuple[Request, State | None]]) -> list[Handle]:
        if not rank:
            return super().take(admitted)
        handles, requests = [], [request for request, _ in admitted]  # a grammar is compiled where it is used
        for request in requests:
            handle = Handle(self, Away(request, Usage(len(request.prompt_ids), 0, 0, None, None)))
            handle.rank = rank
            handles.append(handle)
        self._handles |= {handle.request_id: handle for handle in handles}
        self._send_to(rank, "take", requests)
        return handles

    def _send_to(self, rank: int, *message: Any) -> None:
        try:
            self.links[rank].send(*message)
        except OSError:  # gone: `_listen` sees it too, and ends the group
            logger.info("rank %d takes no messages any more", rank)

    def _look_after(self, done: threading.Event) -> None:
        """Fail when a process that was started here is gone."""
        while not done.wait(0.2):
            for rank, process in enumerate(self._seat.started, start=1):
                if process.poll() is not None:
                    return self.fail(self._ended(f"the process of rank {rank} is gone"))

    def _listen(self, rank: int, link: Link) -> None:
        """Pass on what a rank says."""
        try:
            while True:
                what, *rest = link.receive()
                getattr(self, f"_on_{what}")(rank, *rest)
        except (EOFError, OSError):
            if not (self._closing or self._over):
                self.fail(self._ended(f"the process of rank {rank} is gone"))

    def _on_stats(self, rank: int, stats: dict[str, int]) -> None:
        self._asked[rank].set_result(stats)

    def _on_event(self, rank: int, event: TokenEvent, usage: Usage, whole: Result | None,
                  logits: list[torch.Tensor]) -> None:
        with self._news:
            handle = self._handles.get(event.request_id)
            if handle is None:
                return
            if event.finish_reason:
                del self._handles[event.request_id]
        away: Away = handle._seq
        away.so_far, away.whole, away.logits = usage, whole, logits
        away.tokens += [] if event.token_id is None else [event.token_id]
        away.text += event.text
        away.finish_reason, away.error = event.finish_reason, event.error
        handle._push(event)

    def _queued(self) -> tuple[int, int]:
        """Requests that wait here, and at the others as far as they have more than they can run."""
        requests, tokens = super()._queued()
        with self._news:
            away = [handle for handle in self._handles.values() if handle.rank]
        places = {rank: self.cfg.max_num_seqs for rank in self.links}
        for handle in away:  # the oldest first
            places[handle.rank] -= 1
            if places[handle.rank] < 0:
                requests, tokens = requests + 1, tokens + handle._seq.prompt_len
        return requests, tokens

    def _failed(self) -> None:
        """The other ranks are of no use any more."""
        self._seat.dismiss(0)
        if self.on_failure is not None:
            self.on_failure()


def obey(engine: RankEngine, link: Link) -> None:
    """Serve what rank 0 sends until it says close; then end this process."""

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; rank 0 ends the group
    try:
        while True:
            what, *rest = link.receive()
            if what == "take":
                _take(engine, link, *rest)
            elif what == "cancel":
                engine.cancel(*rest)
            elif what == "stats":
                link.send("stats", engine.stats())
            else:
                break
    except (EOFError, OSError):
        logger.error("rank 0 is gone")
    engine.close()
    raise SystemExit(0 if engine.failure is None else 1)


def _take(engine: RankEngine, link: Link, requests: list[Request]) -> None:
    """Serve requests that rank 0 has checked, and tell it of their events."""

    def tell(handle: Handle, event: TokenEvent) -> None:
        whole = handle.result() if event.finish_reason else None
        logits = handle._seq.logits if event.finish_reason else []
        with contextlib.suppress(OSError):  # rank 0 has gone, which `obey` notices
            link.send("event", event, handle.usage, whole, logits)

    for request in requests:
        try:
            [handle] = engine.take([(request, engine.grammar_of(request))])
        except RequestError as error:  # compiled in time there, but not here
            name, nothing = request.request_id, Usage(len(request.prompt_ids), 0, 0, None, None)
            event = TokenEvent(name, None, "", finish_reason="error", error=str(error))
            link.send("event", event, nothing, None, [])
        else:
            handle.subscribe(partial(tell, handle))


def engine_at(seat: Seat, group: Group, rebalancer: Rebalancer | None) -> Callable[..., RankEngine]:
    """What makes the engine of a rank."""
    given = {"group": group, "rebalancer": rebalancer}
    return partial(RankEngine, **given) if seat.rank else partial(Front, **given, seat=seat)


# ---- who is where ------------------------------------------------------------------------------------------


@dataclass
class Seat:
    """A process's place in the group; on rank 0 also what it has started."""

    rank: int
    local_rank: int
    asked: str | None  # the device that was asked for
    store: dist.Store  # where ranks find each other
    links: dict[int, Link] = field(default_factory=dict)  # on rank 0 to the others, on the others to rank 0
    started: list[subprocess.Popen] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """The device of this rank: its own GPU, or the CPU."""
        asked = self.asked
        device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type != "cuda":
            return device
        if device.index is not None:
            raise GroupError(f"device is {asked!r}, but each rank takes a GPU of its own; say cuda")
        if self.local_rank >= torch.cuda.device_count():
            raise GroupError(f"rank {self.rank} needs GPU {self.local_rank}; here are "
                             f"{torch.cuda.device_count()}")
        return torch.device("cuda", self.local_rank)

    def __enter__(self) -> Seat:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """If this rank could not come up, neither do the others."""
        if kind not in (None, SystemExit):  # SystemExit: a rank that has served to the end
            self.dismiss(0)
            if dist.is_initialized():
                dist.destroy_process_group()

    def say_close(self) -> None:
        """Tell the other ranks to end; telling them again is fine."""
        for link in self.links.values():
            with contextlib.suppress(OSError):
                link.send("close")

    def dismiss(self, timeout: float) -> None:
        """Tell the other ranks to end, and wait for those that this one has started; then kill them."""
        self.say_close()
        end = time.monotonic() + timeout
        for process in self.started:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


_given: Seat | None = None  # the seat of a process that rank 0 has started


def take_seat(parallel: Parallel, settings: dict[str, Any]) -> Seat:
    """This process's seat: given by rank 0, by torchrun, or the first one, for which the others are started.

    settings: the other arguments of the `LLM` that every rank makes.
    """
    if dist.is_initialized():
        raise GroupError("this process is part of a group already; close the other LLM first")
    if _given is not None:
        return _given
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        world = int(os.environ["WORLD_SIZE"])
        if world != parallel.dp:
            raise GroupError(f"{world} ranks were started, but dp is {parallel.dp}; they must be as many")
        local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        store, rank, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=LOADING)))
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store remembers ranks that are gone
        return Seat(rank, local, settings["device"], dist.PrefixStore(f"start {again}", store))
    store = dist.TCPStore("127.0.0.1", 0, parallel.dp, is_master=True, wait_for_workers=False)
    seat = Seat(0, 0, settings["device"], store)
    threads = max(1, (os.cpu_count() or 1) // parallel.dp)
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(threads, torch.get_num_threads()))
    for rank in range(1, parallel.dp):
        command = [sys.executable, "-c", "from dskit.engine.ranks import begin; begin()"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        told = sys.path, ops.choices(), rank, store.port, parallel, settings
        process.stdin.write(pickle.dumps(told))
        process.stdin.flush()  # and left open, for as long as this process lives
        seat.started.append(process)
    return seat


def begin() -> None:
    """What a process that rank 0 has started runs: the same LLM, on the seat that standard input names."""
    global _given
    from dskit.engine.llm import LLM

    sys.path[:], chosen, rank, port, parallel, settings = pickle.load(sys.stdin.buffer)
    logging.basicConfig(format=f"rank {rank}: %(message)s", level=logging.WARNING)
    threading.Thread(target=_end_with_rank_0, name="dskit-parent", daemon=True).start()
    ops.adopt(chosen)
    store = dist.TCPStore("127.0.0.1", port, parallel.dp, is_master=False)
    store.set(f"here/{rank}", "")
    _given = Seat(rank, rank, settings["device"], store)
    try:
        LLM(**settings, dp=parallel.dp, ep=parallel.ep, distributed_timeout=parallel.timeout)
    except Exception as error:
        for link in _given.links.values():
            link.send("failed", f"{type(error).__name__}: {error}")
        raise


def _end_with_rank_0() -> None:
    """End this process when rank 0's is gone, even while the main thread waits for a GPU."""
    os.read(sys.stdin.fileno(), 1)  # nothing comes but the end; a buffer would be locked as Python ends
    logging.shutdown()
    os._exit(1)


def join(seat: Seat, parallel: Parallel) -> Group:
    """Meet the others and connect with rank 0. GroupError when one of them does not come, or would carry
    rows in another way, for which both would wait for ever.
    """
    for rank, process in enumerate(seat.started, start=1):
        while not seat.store.check([f"here/{rank}"]):
            if process.poll() is not None:
                raise GroupError(f"rank {rank} ended with code {process.returncode} before it was there")
            time.sleep(0.02)
    group = Group(parallel, seat.rank, seat.device, seat.store)
    ways = [None] * group.size
    dist.all_gather_object(ways, {name: ops.selection()[name] for name in WAYS}, group=group.control)
    for rank, way in enumerate(ways):
        if way != ways[0]:
            raise GroupError(f"rank {rank} has chosen {way} and rank 0 {ways[0]}; choose the same kernels on "
                             "all, by --kernels or DSKIT_USE")
    found: list[Any] = [None]
    if seat.rank == 0:
        host = "127.0.0.1" if seat.started else os.environ.get("MASTER_ADDR", "127.0.0.1")
        listener = connection.Listener((host, 0), authkey=(key := secrets.token_bytes(32)))
        found = [(listener.address, key)]
    dist.broadcast_object_list(found, 0, group=group.control)
    address, key = found[0]
    if seat.rank:
        seat.links[0] = Link(connection.Client(address, authkey=key))
        seat.links[0].send(seat.rank)
        return group
    with listener:
        for _ in range(group.size - 1):
            link = Link(listener.accept())
            seat.links[link.receive()[0]] = link
    return group


class Loading:
    """How far each rank is with its weights: `tell` gets a line now and then, on rank 0 about all of them."""

    def __init__(self, tell: Callable[[str], None] | None, seat: Seat | None = None):
        self._tell, self._seat, self._last = tell, seat, time.monotonic()
        self._links = dict(seat.links) if seat else {}  # to ranks that have not finished
        self._shares = dict.fromkeys([seat.rank if seat else 0, *self._links], 0.0)

    def __call__(self, share: float) -> None:
        """This rank has so much."""
        if time.monotonic() < self._last + EVERY:
            return
        self._last = time.monotonic()
        if self._seat and self._seat.rank:
            self._links[0].send("loading", share)
            return
        self._shares[0] = share
        self._hear(0)
        self._say()

    def say(self, words: str) -> None:
        """Rank 0 passes it on."""
        if self._tell is not None:
            self._tell(words)

    def meet(self) -> None:
        """Wait until every rank has loaded. GroupError when one of them could not."""
        if self._seat.rank:
            self._links[0].send("ready")
            return
        self._shares[0] = 1.0
        while self._links:
            if self._hear(EVERY):
                self._say()

    def _hear(self, timeout: float) -> bool:
        """Read what the others say, if one of them says anything."""
        ready = connection.wait([link.end for link in self._links.values()], timeout)
        for rank, link in [(rank, link) for rank, link in self._links.items() if link.end in ready]:
            try:
                what, *rest = link.receive()
            except (EOFError, OSError):
                what, rest = "failed", ["its process is gone"]
            if what == "failed":
                raise GroupError(f"rank {rank} could not be started: {rest[0]}")
            self._shares[rank] = rest[0] if rest else 1.0
            if what == "ready":
                del self._links[rank]
        return bool(ready)

    def _say(self) -> None:
        parts = [f"rank {rank} {share:.0%}" for rank, share in sorted(self._shares.items())]
        self.say("weights loaded: " + (", ".join(parts) if self._seat else f"{self._shares[0]:.0%}"))
