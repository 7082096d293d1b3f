"""What figures are made of: boxes, text, arrows, lines, maps; one unit is a tenth of an inch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import FancyBboxPatch

from dskit.viz.figures.page import Picture, canvas, theme


def titled(width: float, height: float, title: str, alt: str) -> tuple[Picture, Axes]:
    """An empty picture with a title on top, and axes in which one unit is a tenth of an inch."""
    picture, axes = canvas(width, height, alt)
    write(axes, 2, 10 * height - 4, title, fontsize=12, fontweight="bold")
    return picture, axes


def on(fill: str) -> str:
    """Black or white, whichever reads better on a fill."""
    red, green, blue = (int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "#000000" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.42 else "#ffffff"


def shade(share: float) -> str:
    """The colour of a number between 0 and 1."""
    return to_hex(colormaps["cividis"](share))


def visible(token: str) -> str:
    """A token's text with its spaces and line ends to be seen."""
    return token.replace(" ", "\u2423").replace("\n", "\u21b5").replace("\uff5c", "|")


def box(
    axes: Axes, x: float, y: float, width: float, height: float, fill: str, label: str = "", **text: Any
) -> None:
    """A rounded box with its lower left corner at (x, y), and a label in the middle."""
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.7",
            facecolor=fill,
            linewidth=0,
            zorder=3,
        )
    )
    style = {
        "ha": "center",
        "va": "center_baseline",
        "fontsize": 8.5,
        "color": on(fill),
        "linespacing": 1.3,
    } | text
    axes.text(x + width / 2, y + height / 2 + 0.15, label, zorder=4, **style)


def write(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Text in the theme's ink."""
    axes.text(x, y, text, **({"color": theme().ink, "fontsize": 8.5, "va": "center", "zorder": 5} | style))


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """A thin arrow."""
    style = {"arrowstyle": "-|>", "color": theme().ink, "linewidth": 0.9, "mutation_scale": 8}
    axes.annotate("", end, start, arrowprops=style | {"shrinkA": 0, "shrinkB": 0}, zorder=4)


def streams(axes: Axes, start: float, end: float, y: float, count: int) -> None:
    """Parallel lines, one per residual stream, centred on y."""
    for i in range(count):
        axes.plot(
            [start, end], [y + 0.9 * (i - (count - 1) / 2)] * 2, color=theme().faint, linewidth=1.1, zorder=1
        )


def legend(axes: Axes, x: float, y: float, entries: Sequence[tuple[str | None, str]]) -> None:
    """Swatches and what they mean, side by side; one without a fill is a frame."""
    for fill, label in entries:
        edge = "none" if fill else theme().faint
        axes.bar([x], [1.6], 2.6, y - 0.8, align="edge", color=fill or "none", edgecolor=edge, linewidth=0.7)
        write(axes, x + 3.4, y, label, fontsize=8)
        x += 6 + 0.75 * len(label)


def heat(picture: Picture, place: tuple[float, float, float, float], values: np.ndarray, **look: Any) -> Axes:
    """A map of values at (left, bottom, width, height), row 0 on top; what is not a number stays empty."""
    wide, high = 10 * picture.get_figwidth(), 10 * picture.get_figheight()
    left, bottom, width, height = place
    axes = picture.add_axes((left / wide, bottom / high, width / wide, height / high), facecolor="none")
    axes.imshow(values, aspect="auto", interpolation="nearest", **({"cmap": "cividis"} | look))
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set(color=theme().faint, linewidth=0.6)
    return axes
