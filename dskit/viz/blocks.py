"""CacheMap: the cache blocks of an engine, stepped by hand.

    CacheMap(llm)       # plan, launch, commit; or a whole step

Idea: each button is one call on the engine, and the line of code under the picture is that call. The counts
are those of `llm.stats()` and of `/metrics`.

State: `lives` has a row per step and request, for figures.request_lives. Nothing runs between two clicks.
Errors: what the engine raises is shown under the picture, such as that its own thread takes the steps.
Try: notebooks/07_assemble_the_engine.ipynb
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets

from dskit.viz import figures
from dskit.viz.widgets import Board, push_button


class CacheMap(Board):
    """Who holds which block, with buttons for the parts of a step."""

    def __init__(self, llm: Any):
        self.llm, self.lives, self.steps = llm, [], 0
        self.plan_open = self.result_open = None
        self._drawing = True
        self.said = ipywidgets.HTML()
        actions = {
            "plan": ("decide what to compute, and hand out blocks", self.plan),
            "launch": ("run the model over the plan", self.launch),
            "commit": ("book the tokens, free what has ended", self.commit),
            "step": ("all three, or what is left of them", lambda: self.go(1)),
            "10 steps": ("ten whole steps", lambda: self.go(10)),
        }
        buttons = [push_button(name, tip, lambda _, act=act: self._act(act))
                   for name, (tip, act) in actions.items()]
        super().__init__("cache_map", self._map, [ipywidgets.HBox(buttons), self.said])
        self.look("llm.engine.block_rows()", "nothing is planned")

    def plan(self) -> bool:
        """Plan a step; False when there is nothing to do."""
        self.plan_open = self.llm.engine.plan()
        if self.plan_open is None:
            self.look("plan = llm.engine.plan()", "nothing to do")
            return False
        self._note_lives()
        rows = ", ".join(f"{c.seq.request_id} {c.start}-{c.stop - 1}" for c in self.plan_open.chunks)
        self.look("plan = llm.engine.plan()", f"{self.plan_open.kind} step planned, positions: {rows}")
        return True

    def launch(self) -> None:
        """Run the model over the open plan."""
        self._require(self.plan_open, "plan")
        self.result_open = self.llm.engine.launch(self.plan_open)
        self.look("result = llm.engine.launch(plan)", "the model has run; nothing is booked yet")

    def commit(self) -> None:
        """Book the result of the open plan."""
        self._require(self.result_open, "launch")
        events = self.llm.engine.commit(self.plan_open, self.result_open)
        self.plan_open = self.result_open = None
        self.steps += 1
        ended = ", ".join(f"{e.request_id} ({e.finish_reason})" for e in events if e.finish_reason)
        self.look("llm.engine.commit(plan, result)", f"{len(events)} tokens booked; ended: {ended or 'none'}")

    def go(self, steps: int | None = None) -> int:
        """Take so many whole steps, None: all there are, and draw once; gives how many there were."""
        self._drawing, taken = False, 0
        try:
            while taken != steps and (self.plan_open or self.plan()):
                if self.result_open is None:
                    self.launch()
                self.commit()
                taken += 1
        finally:
            self._drawing = True
            self.look(self.code, self.said.value)
        return taken

    def look(self, code: str = "llm.engine.block_rows()", said: str = "") -> None:
        """Draw the blocks as they are now."""
        self.code, self.said.value = code, said
        if self._drawing:
            self.present(self.llm.engine.block_rows())

    # ---- inside --------------------------------------------------------------------------------------------

    def _act(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except RuntimeError as error:
            self.say(error)

    def _require(self, thing: Any, before: str) -> None:
        if thing is None:
            raise RuntimeError(f"press {before} first")

    def _note_lives(self) -> None:
        """What this step means for each request."""
        planned = {chunk.seq.request_id for chunk in self.plan_open.chunks}
        for seq in self.llm.engine.scheduler.alive():
            resting = "preempted" if seq.preemptions else "waiting"
            kind = self.plan_open.kind if seq.request_id in planned else resting
            self.lives.append({"request": seq.request_id, "step": self.steps, "kind": kind,
                               "blocks": len(seq.blocks)})

    def _map(self, rows: list[dict[str, Any]]) -> figures.Picture:
        stats = self.llm.stats()
        have = f"{stats['blocks_free']} of {stats['blocks_total']} blocks"
        title = f"{have} can be had, after step {self.steps}"
        return figures.cache_map(rows, self.llm.cache_bytes(), title)
