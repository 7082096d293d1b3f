"""Processes that work off a list of calls side by side, and have the GPU in turns where times count.

Idea
    A kernel that reads where it must not takes its process's CUDA context along, and a compiler keeps a core
    for seconds.  So calls are handed to processes of `worker.py` one by one; whoever dies or hangs costs its
    own call alone, and another process takes the next.  One that says it is ready to be timed gets the GPU
    and the cores for itself: all others are stopped, wherever they are, until it has answered.

Shapes
    stdin of a process: its options, then a job a line, each one JSON object, and "go" where it waits to be
    timed; stdout: one JSON value a line, null for waiting.

Units
    Seconds of the monotonic clock.

Errors
    None: what became of a job is its answer, or the reason why there is none.

Source
    kernels.md 6.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from dskit.bench import worker

Job = dict[str, Any]
LIMIT_S = 150  # without an answer in this time, a process is stuck
SETTLE_S = 0.03  # until what a stopped process had launched has run
OVER = "the minutes of this run were over"


class Lost(NamedTuple):
    """Why a job has no answer, and whether it is to blame for that."""

    reason: str
    guilty: bool = True


def cores() -> int:
    """How many processes compile or compare side by side."""
    return min(32, os.cpu_count() or 1)


def work(jobs: list[Job], options: worker.Options, count: int, end: float) -> Iterator[tuple[Job, Any]]:
    """Each job and its answer, or why it has none, as they come; in the jobs' order if `count` is 1."""
    todo, done, hired = deque(jobs), queue.Queue(), [Process(options) for _ in range(min(count, len(jobs)))]
    turn = Turn(hired)
    for process in hired:
        threading.Thread(target=work_off, args=(process, todo, done, turn, end), daemon=True).start()
    try:
        for _ in jobs:
            yield done.get()
    finally:
        todo.clear()
        for process in hired:
            process.stop()


def work_off(process: Process, todo: deque[Job], done: queue.Queue, turn: Turn, end: float) -> None:
    """Give a process the jobs of a common list until it is empty."""
    while True:
        try:
            job = todo.popleft()
        except IndexError:
            return process.stop()
        answer = process.ask(job, end)
        if answer is None:
            with turn.of(process):
                answer = process.go(end)
        done.put((job, answer))


class Turn:
    """The GPU, for one of several processes at a time."""

    def __init__(self, hired: list[Process]):
        self.hired, self.lock = hired, threading.Lock()

    @contextlib.contextmanager
    def of(self, process: Process) -> Iterator[None]:
        """Stop all others meanwhile."""
        with self.lock:
            others = [each for each in self.hired if each is not process]
            try:
                for each in others:
                    each.signal(signal.SIGSTOP)
                time.sleep(SETTLE_S if others else 0)
                yield
            finally:
                for each in others:
                    each.signal(signal.SIGCONT)


def start() -> subprocess.Popen:
    """A worker that waits for its options; without a GPU it interprets."""
    switches = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if not torch.cuda.is_available():
        switches["TRITON_INTERPRET"] = "1"
    return subprocess.Popen([sys.executable, "-m", "dskit.bench.worker"], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True, env=os.environ | switches,
                            start_new_session=True)


class Process:
    """A worker that is started when it is asked, and again after it has died."""

    def __init__(self, options: worker.Options):
        self.options, self.process, self.lines = options, None, queue.Queue()

    def ask(self, job: Job, end: float) -> Any:
        """Its answer, None where it waits to be timed, or `Lost`."""
        for _ in range(2):
            if time.monotonic() >= end:
                return Lost(OVER, False)
            said = self.answer(job, end)
            if said != worker.LOST:
                return said
        return Lost("two workers lost the GPU before they answered")

    def go(self, end: float) -> Any:
        """The answer of one that has waited to be timed, or `Lost`."""
        said = self.answer("go", end)
        return Lost("the worker lost the GPU while it was timed") if said == worker.LOST else said

    def answer(self, word: Job | str, end: float) -> Any:
        """What it says to a line, `Lost`, or `worker.LOST` where another process may try again."""
        try:
            self.tell(word)
            said = self.lines.get(timeout=min(LIMIT_S, max(0.1, end - time.monotonic())))
        except BrokenPipeError:  # it lost its context after the last answer
            said = worker.LOST
        except queue.Empty:
            self.stop()
            late = time.monotonic() >= end
            return Lost(OVER, False) if late else Lost(f"no result within {LIMIT_S} s")
        if isinstance(said, int):
            self.stop()
            return said if said == worker.LOST else Lost(f"the worker ended with exit code {said}")
        return said

    def tell(self, word: Job | str) -> None:
        """Write a line; before the first one start and write the options."""
        words = [word]
        if self.process is None:
            self.process, self.lines = start(), queue.Queue()
            threading.Thread(target=read, args=(self.process, self.lines), daemon=True).start()
            words = [asdict(self.options), word]
        self.process.stdin.write("".join(json.dumps(word) + "\n" for word in words))
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        """Send a signal to it and to the compilers that it started, if it runs."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):  # `read` has just seen it end
                os.killpg(self.process.pid, number)

    def stop(self) -> None:
        """End it and the compilers that it started."""
        process, self.process = self.process, None
        if process is not None:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def read(process: subprocess.Popen, lines: queue.Queue) -> None:
    """A worker's answers as they come, then its exit code."""
    for line in process.stdout:
        lines.put(json.loads(line))
    lines.put(process.wait())
