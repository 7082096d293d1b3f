"""KernelSwap: one line per group of ops; click what computes it, see what that costs and how far it is off.

    KernelSwap(["norm", "moe"])

Idea: a click is a call of `dskit.use`, and the line of code under the picture is that call. Errors and times
are those of `dskit.compare` at the last edge shape of each op's case table (on a GPU: at the released
widths), so a click on `triton` without a GPU runs the group in the interpreter: seconds, and no time to show.

State: choices hold until "reset", which gives back what was there before; "undo" takes back the last one.
Errors: a choice that the registry refuses changes nothing, and its reason stands in the group's line.
Try: notebooks/06_kernel_swap_and_profile.ipynb
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import ipywidgets

import dskit
from dskit import ops
from dskit.viz import figures
from dskit.viz.widgets import Board, push_button


class KernelSwap(Board):
    """Toggles for groups of ops (None: all) between implementations, with state, error and time."""

    def __init__(self, groups: Iterable[str] | None = None,
                 choices: Sequence[str] = ("torch", "triton", "auto")):
        ops.load_all()
        by_group: dict[str, list[ops.Op]] = {}
        for op in ops.all_ops().values():
            by_group.setdefault(op.group, []).append(op)
        self.groups = {group: by_group[group] for group in groups or by_group}
        self.choices = tuple(choices)
        self._chosen: list[dict[str, str]] = [{}]  # the panel's words after each click
        self._use: ops.use | None = None
        self._refused: dict[str, str] = {}
        self._showing = False
        self._measured: dict[tuple[str, str], tuple[float | None, str]] = {}
        self.toggles = {group: self._toggle(group) for group in self.groups}
        self.cells = {group: ipywidgets.HTML() for group in self.groups}
        lines = [ipywidgets.HBox([self.toggles[group], self.cells[group]]) for group in self.groups]
        buttons = [
            push_button("undo", "take back the last choice", lambda _: self.undo()),
            push_button("reset", "everything as it was before this panel", lambda _: self.reset()),
        ]
        super().__init__("kernel_swap", figures.swap_board, [*lines, ipywidgets.HBox(buttons)])
        self.refresh()

    @property
    def code(self) -> str:
        """The call that makes the same choices."""
        words = ", ".join(f"{group}={choice!r}" for group, choice in self._chosen[-1].items())
        return f"dskit.use({words})" if words else "# as it was before this panel"

    def choose(self, group: str, choice: str) -> None:
        """What a click does."""
        try:
            self._apply(self._chosen[-1] | {group: choice})
        except (ops.Unsupported, ops.UnknownImplementation) as error:
            self._refused[group] = str(error)
        else:
            self._chosen.append(self._chosen[-1] | {group: choice})
            self._refused.pop(group, None)
        self.refresh()

    def undo(self) -> None:
        """Take back the last choice."""
        if len(self._chosen) > 1:
            self._apply(self._chosen[-2])
            self._chosen.pop()
        self._refused.clear()
        self.refresh()

    def reset(self) -> None:
        """Give back what was there before the panel."""
        self._apply({})
        self._chosen[1:] = []
        self._refused.clear()
        self.refresh()

    def refresh(self) -> None:
        """Measure what is new, and show every line as the registry has it now."""
        selected = self._selected()
        rows = [self._row(group, selected[group]) for group in self.groups]
        self._showing = True
        for row in rows:
            self.toggles[row["group"]].value = row["choice"] if row["choice"] in self.choices else None
            self.cells[row["group"]].value = _cells(row)
        self._showing = False
        self.present(rows)

    # ---- inside --------------------------------------------------------------------------------------------

    def _toggle(self, group: str) -> ipywidgets.ToggleButtons:
        tips = [f"dskit.use({group}={choice!r})" for choice in self.choices]
        toggle = ipywidgets.ToggleButtons(options=self.choices, description=group, tooltips=tips, value=None,
                                          style={"button_width": "4.5em"})
        toggle.observe(partial(self._clicked, group), "value")
        return toggle

    def _clicked(self, group: str, change: dict[str, Any]) -> None:
        if self._showing:  # no click: the line is shown as the registry has it
            return
        self.say(f"{group}: measuring {change['new']} ...")
        self.choose(group, change["new"])

    def _apply(self, words: dict[str, str]) -> None:
        """Make these choices in place of the panel's last ones; raises, and then nothing has changed."""
        use = ops.use(words).__enter__() if words else None
        if self._use:
            self._use.__exit__(None, None, None)
        self._use = use

    def _selected(self) -> dict[str, str]:
        """What each group runs: the word that most of its ops follow."""
        now = ops.selection()
        words = {group: [now[op.name] for op in mine] for group, mine in self.groups.items()}
        return {group: max(dict.fromkeys(mine), key=mine.count) for group, mine in words.items()}

    def _row(self, group: str, choice: str) -> dict[str, Any]:
        if (group, choice) not in self._measured:
            self._measured[group, choice] = _measure(self.groups[group], choice)
        error, time = self._measured[group, choice]
        state = self._state(group, choice)
        return {"group": group, "choice": choice, "state": state, "error": error, "time": time}

    def _state(self, group: str, choice: str) -> str:
        """In words of the registry: what is in use, what else there is, what was refused and why."""
        mine, now = self.groups[group], ops.selection()
        following = sum(now[op.name] == choice for op in mine)
        used = f"{choice} in use" + (f" by {following} of {len(mine)} ops" if following < len(mine) else "")
        if group in self._refused:
            return f"refused: {self._refused[group]}"
        if choice == "auto":
            asides = list(dict.fromkeys(filter(None, (op.aside("triton") for op in mine))))
            return f"{used}; leaves triton aside: {asides[0]}" if asides else used
        if choice == "triton":
            return used
        reason = ops.not_here("triton")
        return f"{used}; triton refused: {reason}" if reason else f"{used}; triton available"


def _measure(mine: list[ops.Op], choice: str) -> tuple[float | None, str]:
    """(largest error against float64, time in words) of the ops that have a case table: one call of each."""
    errors, times = [], []
    for op in mine:
        taken = choice if choice in op.implementations else "torch"
        if choice in ("triton", "auto"):
            taken = "torch" if _missing(op) or choice == "auto" and op.aside("triton") else "triton"
        with suppress(ValueError):  # those without a case table
            (row,) = dskit.compare(op.name, only=(taken,), repeat=3)
            errors.append(row["relative_rms"])
            times.append(row["time_ms"])
    if not errors:
        return None, ""
    return max(errors), "interpreted" if None in times else f"{sum(times):.3g} ms"


def _missing(op: ops.Op) -> bool:
    try:
        return op.implementation("triton") is None
    except (ops.UnknownImplementation, ops.Unsupported):
        return True


def _cells(row: dict[str, Any]) -> str:
    """A line's cells: error, time, state."""
    error = "" if row["error"] is None else f"{row['error']:.1e}"
    widths = (("5em", error), ("7em", row["time"]), ("30em", row["state"]))
    style = "display:inline-block;vertical-align:top;line-height:1.4;padding-right:0.6em"
    spans = (f'<span style="{style};width:{width}">{html.escape(said)}</span>' for width, said in widths)
    return "".join(spans)
