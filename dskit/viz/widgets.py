"""Panels: a picture with controls around it, and something to keep when the kernel is gone.

    panel = Panel(rows_of, figures.memory_bars, {"heads": (1, 128, 64), "precision": ["bf16", "fp8"]})
    panel            # sliders and picture
    panel.figure()   # the picture alone, which stays in a saved notebook

Idea: `compute(**values)` turns the values of the controls into rows, `draw(rows)` turns rows into a Picture.
A control is a slider for (low, high, start), a choice for a list, any number of choices for Several, and a
line of text for a string, which counts once it is entered. With `button`, rows are computed when it is
pressed, and otherwise 150 ms after the last move.

State: a Board is what every panel here is made of: `data` are the rows of the last picture, and files go to
./dskit-out.
Errors: what `compute` raises is shown under the controls, and the picture stays as it was. ValueError for a
file type other than png, svg and csv.
Try: notebooks/01_mla.ipynb
"""

from __future__ import annotations

import asyncio
import csv
import html
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import ipywidgets

from dskit.viz.figures import Picture

DELAY_S = 0.15
FOLDER = Path("dskit-out")
Rows = list[dict[str, Any]]
Control = tuple[int, int, int] | str | Sequence[Any]


class Several(list):
    """Values of which any number may be chosen; all of them at first."""


class Board(ipywidgets.VBox):
    """Controls, the picture of some rows, a line of code or a message, and buttons that save.

    `name` is that of the files in ./dskit-out; a subclass says in `code` which line does what was clicked.
    """

    code = ""

    def __init__(self, name: str, draw: Callable[[Rows], Picture], controls: Sequence[ipywidgets.Widget]):
        self.name, self._draw = name, draw
        self.data: Rows = []
        self._image, self._note = ipywidgets.HTML(), ipywidgets.HTML()
        saves = [
            push_button(kind.upper(), f"save as {kind}", lambda _, kind=kind: self._save(kind))
            for kind in ("png", "svg", "csv")
        ]
        super().__init__([*controls, self._image, ipywidgets.HBox([*saves, self._note])])

    def figure(self) -> Picture:
        """The picture of the current rows."""
        return self._draw(self.data)

    def present(self, rows: Iterable[dict[str, Any]]) -> None:
        """Make these the current rows, draw them, and show the line of code."""
        self.data = list(rows)
        self._image.value = self.figure().html()
        self.say_code()

    def say_code(self, *_: Any) -> None:
        """Show the line of code."""
        self._note.value = f"<code>{html.escape(self.code)}</code>"

    def say(self, message: str | Exception) -> None:
        """Show a message instead; the picture stays."""
        kind = f"<b>{type(message).__name__}</b>: " if isinstance(message, Exception) else ""
        self._note.value = kind + html.escape(str(message))

    def save(self, path: str | Path) -> Path:
        """Write the picture (.png, .svg) or the rows (.csv); gives the path."""
        path = Path(path)
        kind = path.suffix.lstrip(".")
        if kind not in ("png", "svg", "csv"):
            raise ValueError(f"cannot save {path.name!r}; the ending must be .png, .svg or .csv")
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(dict.fromkeys(key for row in self.data for key in row)))
                writer.writeheader()
                writer.writerows(self.data)
        else:
            path.write_bytes(self.figure().bytes(kind))
        return path

    def _save(self, kind: str) -> None:
        self.say(f"saved to {self.save(FOLDER / f'{self.name}.{kind}')}")

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The live board, and for a frontend without widgets its picture and a sentence."""
        bundle = super()._repr_mimebundle_(**kwargs)
        sentence = "<p>Controls need a notebook with ipywidgets; this is the panel's picture.</p>"
        return bundle | {"text/html": self.figure().html() + sentence, "text/plain": self.figure().alt}


class Panel(Board):
    """A board whose rows follow from the values of its controls."""

    def __init__(
        self,
        compute: Callable[..., Rows],
        draw: Callable[[Rows], Picture],
        controls: dict[str, Control],
        *,
        button: str = "",
        tip: str = "",
    ):
        self._compute = compute
        self._later: asyncio.TimerHandle | None = None
        self.controls = {name: _control(name, values, tip) for name, values in controls.items()}
        go = [push_button(button, tip, lambda _: self.redraw())] if button else []
        super().__init__(compute.__name__, draw, [ipywidgets.HBox([*self.controls.values(), *go])])
        for control in self.controls.values():
            control.observe(self.say_code if button else self._soon, names="value")
        self.redraw()

    @property
    def values(self) -> dict[str, Any]:
        """The value of each control."""
        return {name: control.value for name, control in self.controls.items()}

    @property
    def code(self) -> str:
        """The line of code that gives the same rows."""
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.values.items())})"

    def redraw(self) -> None:
        """Compute the rows of the current values and show them."""
        try:
            self.present(self._compute(**self.values))
        except Exception as error:
            self.say(error)
            raise

    def _soon(self, *_: Any) -> None:
        """Redraw once the sliders have rested; at once where no event loop runs."""
        if self._later:
            self._later.cancel()
        try:
            self._later = asyncio.get_running_loop().call_later(DELAY_S, self.redraw)
        except RuntimeError:
            self.redraw()


def _control(name: str, values: Control, tip: str) -> ipywidgets.ValueWidget:
    if isinstance(values, tuple):
        low, high, start = values
        return ipywidgets.IntSlider(min=low, max=high, value=start, description=name, tooltip=tip or name)
    if isinstance(values, str):
        return ipywidgets.Text(values, description=name, tooltip=tip or name, continuous_update=False)
    if isinstance(values, Several):
        return ipywidgets.SelectMultiple(options=list(values), value=values, rows=len(values),
                                         description=name, tooltip=tip or name)
    tips = [f"{name} {value}" for value in values]
    return ipywidgets.ToggleButtons(options=list(values), description=name, tooltips=tips)


def push_button(label: str, tip: str, action: Callable) -> ipywidgets.Button:
    """A button as wide as its label."""
    button = ipywidgets.Button(description=label, tooltip=tip, layout={"width": "auto"})
    button.on_click(action)
    return button
