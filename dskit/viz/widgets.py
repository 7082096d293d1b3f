"""Panels: a picture with controls around it, and something to keep when the kernel is gone.

    panel = Panel(rows_of, figures.memory_bars, {"heads": (1, 128, 64), "precision": ["bf16", "fp8"]})
    panel            # sliders and picture
    panel.figure()   # the picture alone, which stays in a saved notebook

Idea: `compute(**values)` turns the values of the controls into rows, `draw(rows)` turns rows into a Picture.
A control is a slider for (low, high, start) and a choice for a list. With `button`, rows are computed when it
is pressed, and otherwise 150 ms after the last move.

State: `data` are the rows of the last picture; files go to ./dskit-out.
Errors: what `compute` raises is shown under the controls, and the picture stays as it was. ValueError for a
file type other than png, svg and csv.
Try: notebooks/01_mla.ipynb
"""

from __future__ import annotations

import asyncio
import csv
import html
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ipywidgets

from dskit.viz.figures import Picture

DELAY_S = 0.15
FOLDER = Path("dskit-out")
Rows = list[dict[str, Any]]
Control = tuple[int, int, int] | Sequence[str]


class Panel(ipywidgets.VBox):
    """Controls, a picture, the equivalent line of code, and buttons that save."""

    def __init__(
        self,
        compute: Callable[..., Rows],
        draw: Callable[[Rows], Picture],
        controls: dict[str, Control],
        *,
        button: str = "",
        tip: str = "",
    ):
        self._compute, self._draw, self._call = compute, draw, compute.__name__
        self._later: asyncio.TimerHandle | None = None
        self.controls = {name: _control(name, values, tip) for name, values in controls.items()}
        self._image, self._note = ipywidgets.HTML(), ipywidgets.HTML()
        for control in self.controls.values():
            control.observe(self._note_call if button else self._soon, names="value")
        saves = [
            _button(kind.upper(), f"save as {kind}", lambda _, kind=kind: self._save(kind))
            for kind in ("png", "svg", "csv")
        ]
        go = [_button(button, tip, lambda _: self.redraw())] if button else []
        super().__init__(
            [
                ipywidgets.HBox([*self.controls.values(), *go]),
                self._image,
                ipywidgets.HBox([*saves, self._note]),
            ]
        )
        self.data: Rows = []
        self.redraw()

    @property
    def values(self) -> dict[str, Any]:
        """The value of each control."""
        return {name: control.value for name, control in self.controls.items()}

    @property
    def code(self) -> str:
        """The line of code that gives the same rows."""
        return f"{self._call}({', '.join(f'{name}={value!r}' for name, value in self.values.items())})"

    def figure(self) -> Picture:
        """The picture of the current rows."""
        return self._draw(self.data)

    def redraw(self) -> None:
        """Compute the rows of the current values and show them."""
        try:
            self.data = list(self._compute(**self.values))
        except Exception as error:
            self._note.value = f"<b>{type(error).__name__}</b>: {html.escape(str(error))}"
            raise
        self._image.value = self.figure().html()
        self._note_call()

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
        self._note.value = f"saved to {html.escape(str(self.save(FOLDER / f'{self._call}.{kind}')))}"

    def _note_call(self, *_: Any) -> None:
        self._note.value = f"<code>{html.escape(self.code)}</code>"

    def _soon(self, *_: Any) -> None:
        """Redraw once the sliders have rested; at once where no event loop runs."""
        if self._later:
            self._later.cancel()
        try:
            self._later = asyncio.get_running_loop().call_later(DELAY_S, self.redraw)
        except RuntimeError:
            self.redraw()

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The live panel, and for a frontend without widgets its picture and a sentence."""
        bundle = super()._repr_mimebundle_(**kwargs)
        sentence = "<p>Controls need a notebook with ipywidgets; this is the panel's picture.</p>"
        return bundle | {"text/html": self.figure().html() + sentence, "text/plain": self.figure().alt}


def _control(name: str, values: Control, tip: str) -> ipywidgets.ValueWidget:
    if isinstance(values, tuple):
        low, high, start = values
        return ipywidgets.IntSlider(min=low, max=high, value=start, description=name, tooltip=tip or name)
    tips = [f"{name} {value}" for value in values]
    return ipywidgets.ToggleButtons(options=list(values), description=name, tooltips=tips)


def _button(label: str, tip: str, action: Callable) -> ipywidgets.Button:
    button = ipywidgets.Button(description=label, tooltip=tip, layout={"width": "auto"})
    button.on_click(action)
    return button
