"""LiveProfile: where the time of a running engine goes, from one step in 51.

    LiveProfile(llm)

Idea: the registry runs one step in `every` inside a clock (`ops.named_ranges`), and the others as if nobody
looked. The clock writes a list; the panel reads it from the notebook's event loop, so the engine's thread
never touches a widget. What torch.compile or Triton spend on compiling is taken out of the op that waited for
it and has a bar of its own.

Units: milliseconds; on a GPU those between two events of its queue, else the processor's.
State: sampling goes on until "pause", or until another LiveProfile starts. The newest 20 samples are kept.
Errors: none of its own. A step that is looked at calls its ops, also where others replay a CUDA graph.
Try: notebooks/06_kernel_swap_and_profile.ipynb
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import ipywidgets
import torch

from dskit import ops
from dskit.viz import figures
from dskit.viz.widgets import Board, push_button

KEPT = 20
NOTHING = {"label": "(no step sampled yet)", "ms": 0.0, "share": 0.0}


@dataclass(eq=False)
class Frame:
    """One range: when it began and ended (seconds, or events of a GPU), what was compiled meanwhile."""

    label: str
    outer: Frame | None
    start: Any
    end: Any = None
    compile_ms: float = 0.0

    @property
    def done(self) -> bool:
        """True once a GPU has come to its end."""
        return self.end.query() if isinstance(self.end, torch.cuda.Event) else True

    @property
    def ms(self) -> float:
        """Its length without compiling."""
        gpu = isinstance(self.start, torch.cuda.Event)
        length = self.start.elapsed_time(self.end) if gpu else 1e3 * (self.end - self.start)
        return max(0.0, length - self.compile_ms)


class Compiling:
    """Milliseconds that torch.compile and Triton have spent on compiling since it was made."""

    def __init__(self):
        self.ms, self._since, self._heard = 0.0, 0.0, set()

    def listen(self) -> None:
        """Hear of compilers once they are loaded: loading them for this would take seconds."""
        dynamo, knobs = sys.modules.get("torch._dynamo.callback"), sys.modules.get("triton.knobs")
        if dynamo and "dynamo" not in self._heard:
            dynamo.callback_handler.register_start_callback(self._started)
            dynamo.callback_handler.register_end_callback(self._ended)
            self._heard.add("dynamo")
        if knobs and "triton" not in self._heard:
            knobs.compilation.listener = self._triton(knobs.compilation.listener)
            self._heard.add("triton")

    def _started(self, *_: Any) -> None:
        self._since = time.perf_counter()

    def _ended(self, *_: Any) -> None:
        self.ms += 1e3 * (time.perf_counter() - self._since)

    def _triton(self, other: Any) -> Any:
        def heard(*, times: Any, **about: Any) -> None:
            self.ms += times.total / 1e3
            if other:
                other(times=times, **about)

        return heard


class Clock:
    """Samples of steps, as `ops.named_ranges` wants it; `samples` holds the finished ones, newest last."""

    def __init__(self, compiling: Compiling):
        self.compiling = compiling
        self.samples: deque[list[Frame]] = deque(maxlen=KEPT)
        self.taken = 0
        self._frames: list[Frame] = []
        self._open: Frame | None = None
        self._thread = 0

    @contextmanager
    def __call__(self, label: str) -> Iterator[None]:
        """Time what runs inside; calls of other threads, which no step made, are let through."""
        begins = label.startswith("dskit::step[")
        if begins:
            self.compiling.listen()
            self._frames, self._open, self._thread = [], None, threading.get_ident()
        if threading.get_ident() != self._thread:
            yield
            return
        frame = Frame(label.removeprefix("dskit::"), self._open, None)
        self._frames.append(frame)
        self._open, before = frame, self.compiling.ms
        frame.start = _now()
        try:
            yield
        finally:
            frame.end, self._open = _now(), frame.outer
            frame.compile_ms = self.compiling.ms - before
            if begins:
                self.samples.append(self._frames)
                self.taken, self._thread = self.taken + 1, 0


def _now() -> Any:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def own_times(samples: list[list[Frame]]) -> dict[str, float]:
    """{label: milliseconds per step without inner ranges}; what no op owns is `(outside ops)`."""
    found: dict[str, float] = defaultdict(float)
    for frames in samples:
        for frame in frames:
            ms = frame.ms
            found[frame.label if frame.outer else "(outside ops)"] += ms
            if frame.outer:
                found[frame.outer.label if frame.outer.outer else "(outside ops)"] -= ms
    return {label: ms / len(samples) for label, ms in sorted(found.items(), key=lambda item: -item[1])}


_running: weakref.ref[LiveProfile] | None = None


class LiveProfile(Board):
    """Bars by op of the steps that an LLM takes, compiling apart, and its last steps as a line."""

    def __init__(self, llm: Any, every: int = 51, bars: int = 10, poll_s: float = 0.5):
        self.llm, self.every, self.bars, self.poll_s = llm, every, bars, poll_s
        self.compiling = Compiling()
        self.clock, self._open, self._shown = Clock(self.compiling), ExitStack(), -1
        self.phase = ipywidgets.ToggleButtons(options=ops.PHASES[::-1], description="steps",
                                              tooltips=["steps that add tokens", "steps that read prompts"])
        self.phase.observe(lambda _: self.poll(anew=True), "value")
        self._pause = push_button("pause", "stop sampling, or go on", lambda _: self._turn())
        self.paused = True
        super().__init__("live_profile", self._bars, [ipywidgets.HBox([self.phase, self._pause])])
        self.go_on()

    @property
    def code(self) -> str:
        """The call that made this panel."""
        return f"LiveProfile(llm, every={self.every})"

    def go_on(self) -> None:
        """Sample from here on, in place of any other LiveProfile."""
        global _running
        other = _running() if _running else None
        if other is not None and other is not self:
            other.pause()
        _running = weakref.ref(self)
        if self.paused:
            self._open.enter_context(ops.named_ranges(self.clock, self.every))
        self.paused, self._pause.description = False, "pause"
        self.poll(anew=True)
        self._later()

    def pause(self) -> None:
        """Stop sampling; the picture stays."""
        self._open.close()
        self.paused, self._pause.description = True, "go on"

    def poll(self, anew: bool = False) -> None:
        """Draw what has been sampled since the last look."""
        self.compiling.listen()
        if anew or self.clock.taken != self._shown:
            self._shown = self.clock.taken
            self.present(self._rows())

    # ---- inside --------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        self.go_on() if self.paused else self.pause()

    def _later(self) -> None:
        """Look again in a while, from the kernel's event loop; without one `poll` is up to the reader."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        loop.call_later(self.poll_s, self._look)

    def _look(self) -> None:
        if not self.paused and not self.llm.engine.closed:
            self.poll()
            self._later()

    def _samples(self) -> list[list[Frame]]:
        """Finished samples of the phase."""
        wanted = f"step[{self.phase.value}]"
        return [frames for frames in list(self.clock.samples) if frames[0].label == wanted and frames[0].done]

    def _rows(self) -> list[dict[str, Any]]:
        samples = self._samples()
        times = own_times(samples) if samples else {}
        whole = sum(times.values())
        named = list(times.items())[: self.bars]
        if rest := list(times.values())[self.bars :]:
            named.append((f"({len(rest)} others)", sum(rest)))
        rows = [{"label": label, "ms": ms, "share": ms / whole if whole else 0.0} for label, ms in named]
        if self.compiling.ms:
            rows.append({"label": "compiling, in all", "ms": self.compiling.ms, "share": None})
        return rows or [NOTHING]

    def _bars(self, rows: list[dict[str, Any]]) -> figures.Picture:
        steps = [one for one in self.llm.engine.trace() if one.kind == self.phase.value][-KEPT:]
        times = [(one.plan_us + one.launch_us + one.wait_us + one.commit_us) / 1e3 for one in steps]
        title = f"{self.phase.value}: mean of {len(self._samples())} sampled steps, one in {self.every}"
        return figures.op_bars(rows, times, title)
