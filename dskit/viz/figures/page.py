"""The page that figures are drawn on: colours, themes, and a picture that says in words what it shows.

Idea: a Picture is a matplotlib Figure with an `alt` text made from the same numbers. It displays itself in a
notebook as an image with that text, and needs no pyplot, no JavaScript and no font beyond matplotlib's own.

Errors: ValueError for an unknown theme.
Source: colours are samples of cividis, which colour-blind readers tell apart; labels repeat what they mean.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# cividis, dark to bright
BLUE, SLATE, STONE, SAND, YELLOW = "#123570", "#46536e", "#7c7b78", "#c5b56b", "#f3df55"


Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Theme:
    """Colours of everything that is not data; no `paper` means a transparent background."""

    ink: str
    faint: str
    paper: str | None = None


THEMES = {
    "auto": Theme("#1f2430", "#6a7080", "#ffffff"),  # a white card is legible on any page
    "light": Theme("#1f2430", "#6a7080"),
    "dark": Theme("#eceff4", "#a4acbb"),
}
_current = {"theme": "auto"}


def set_theme(name: str) -> None:
    """Choose the colours of all figures drawn from now on: "auto", "light" or "dark"."""
    if name not in THEMES:
        raise ValueError(f"theme is {name!r}; choose one of {', '.join(THEMES)}")
    _current["theme"] = name


def theme() -> Theme:
    """The colours in force."""
    return THEMES[_current["theme"]]


class Picture(Figure):
    """A figure with `alt`, the description that a screen reader speaks and a test can read."""

    alt = ""

    def bytes(self, format: str = "png") -> bytes:
        """The file contents as "png" or "svg", with the description inside."""
        out = io.BytesIO()
        key = "Title" if format == "svg" else "Description"
        self.savefig(out, format=format, dpi=160, metadata={key: self.alt})
        return out.getvalue()

    def html(self) -> str:
        """An <img> element with the picture and its description."""
        data, width = base64.b64encode(self.bytes()).decode(), round(96 * self.get_figwidth())
        style = f"width:{width}px;max-width:100%"
        return f'<img style="{style}" alt="{html.escape(self.alt)}" src="data:image/png;base64,{data}">'

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": self.alt, "text/html": self.html()}


def canvas(width: float, height: float, alt: str) -> tuple[Picture, Axes]:
    """An empty picture of so many inches, and axes in which one unit is a tenth of an inch."""
    paper = theme().paper
    picture = Picture(figsize=(width, height), facecolor=paper or "none")
    picture.alt = alt
    axes = picture.add_axes((0, 0, 1, 1), xlim=(0, 10 * width), ylim=(0, 10 * height))
    axes.set_axis_off()
    return picture, axes
