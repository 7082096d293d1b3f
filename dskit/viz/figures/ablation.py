"""Ablations: loss curves with bands over seeds, and what each missing mechanism costs."""

from __future__ import annotations

from collections import defaultdict
from statistics import mean, stdev
from typing import Any

from matplotlib.axes import Axes

from dskit.viz.figures.page import SAND, SLATE, STONE, YELLOW, Picture, Rows, theme
from dskit.viz.figures.pieces import titled, write

# a hue (None: the ink), a dash and a mark each, so that no two lines are told apart by colour alone
STYLES = ((None, "-", "o"), (SAND, "--", "s"), (STONE, ":", "^"), (YELLOW, "-.", "D"), (SLATE, "--", "v"))


def loss_curves(rows: Rows, title: str = "Loss while training") -> Picture:
    """One line per model: the mean over its seeds, with a band of one standard error.

    Keys: "what", "seed", "step", "loss".
    """
    if not rows:
        raise ValueError("rows is empty; give at least one point")
    points: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        points[row["what"]][row["step"]].append(row["loss"])
    alt = f"{title}. " + "; ".join(_say_curve(what, curve) for what, curve in points.items())
    picture, page = titled(9.5, 4.4, title, alt)
    axes = _chart(picture, (0.075, 0.13, 0.6, 0.74))
    axes.set_xlabel("step")
    axes.set_ylabel("loss of answers, nats per token")
    for i, (what, curve) in enumerate(points.items()):
        hue, dash, mark = STYLES[i % len(STYLES)]
        hue = hue or theme().ink
        steps, middle = list(curve), [mean(values) for values in curve.values()]
        error = [stdev(v) / len(v) ** 0.5 if len(v) > 1 else 0.0 for v in curve.values()]
        low, high = ([m + sign * e for m, e in zip(middle, error, strict=True)] for sign in (-1, 1))
        axes.fill_between(steps, low, high, color=hue, alpha=0.3, linewidth=0)
        every = max(1, len(steps) // 8)
        axes.plot(steps, middle, color=hue, linestyle=dash, marker=mark, markevery=every, markersize=5,
                  markeredgecolor=theme().ink, markeredgewidth=0.5, label=what)
    legend = axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False, fontsize=9,
                         handlelength=3.2)
    for text in legend.get_texts():
        text.set_color(theme().ink)
    return picture


def _say_curve(what: str, curve: dict[int, list[float]]) -> str:
    first, last = min(curve), max(curve)
    seeds = len(curve[last])
    return (f"{what}: {mean(curve[first]):.2f} at step {first}, {mean(curve[last]):.2f} at step {last}, "
            f"{seeds} seed{'s' * (seeds > 1)}")


def ablation_effects(rows: Rows, title: str = "How much worse without one mechanism") -> Picture:
    """A mark per model with a bar of one standard error, beside the full model's line at zero.

    Keys: "what", "held"; "worse", "worse_se" (None: of one seed), in nats per answer token.
    """
    if not rows:
        raise ValueError("rows is empty; give at least one model")
    alt = f"{title}. " + "; ".join(map(_say_effect, rows))
    height = 1.25 + 0.5 * len(rows)
    picture, page = titled(10, height, title, alt)
    axes = _chart(picture, (0.43, 0.62 / height, 0.4, 1 - 1.25 / height))
    axes.axvline(0, color=theme().faint, linewidth=1)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks([])
    axes.set_xlabel("held-out loss minus that of the full model, nats per answer token")
    for i, row in enumerate(rows):
        error = row.get("worse_se")
        axes.errorbar([row.get("worse", 0.0)], [i], xerr=None if error is None else [error], fmt="D",
                      color=theme().ink, markerfacecolor=SAND, markersize=7, capsize=4, linewidth=1.2)
        y = axes.transData.transform((0, i))[1] / picture.dpi * 10
        write(page, 41, y + 1.0, row["what"], ha="right", fontsize=9)
        write(page, 41, y - 1.1, f"held: {row['held']}", ha="right", fontsize=6.8, color=theme().faint)
        write(page, 84.5, y, _figures(row), fontsize=8.5)
    return picture


def _figures(row: dict[str, Any]) -> str:
    error = row.get("worse_se")
    return f"{row.get('worse', 0.0):+.3f}" + ("" if error is None else f" ± {error:#.2g}")


def _say_effect(row: dict[str, Any]) -> str:
    error = row.get("worse_se")
    sure = "one seed, no standard error" if error is None else f"standard error {error:#.2g}"
    return f"{row['what']}: {row.get('worse', 0.0):+.3f} nats per answer token, {sure}; held {row['held']}"


def _chart(picture: Picture, place: tuple[float, float, float, float]) -> Axes:
    """Axes in the theme's ink, without a frame above and to the right."""
    axes = picture.add_axes(place, facecolor="none")
    axes.tick_params(colors=theme().ink, labelsize=8.5)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme().faint)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(theme().ink)
        label.set_fontsize(9)
    return axes
