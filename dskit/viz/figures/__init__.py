"""Figures: pure functions from data to a picture that also says in words what it shows.

    page.py       Picture, themes, colours
    pieces.py     boxes, text, arrows
    model.py      the whole model
    mla.py        bytes of attention
    tokens.py     strips of tokens
    kernels.py    shares of the floor
    ablation.py   loss curves, what a missing mechanism costs

Shapes: `rows` are lists of dicts; every function names the keys that it reads.
Units: sizes in bytes.
Errors: ValueError for rows that are empty.
Try: notebooks/00_start.ipynb
"""

from dskit.viz.figures.ablation import ablation_effects, loss_curves
from dskit.viz.figures.kernels import floor_shares
from dskit.viz.figures.mla import memory_bars
from dskit.viz.figures.model import model_map
from dskit.viz.figures.page import THEMES, Picture, set_theme, theme
from dskit.viz.figures.tokens import token_strips

__all__ = [
    "THEMES",
    "Picture",
    "ablation_effects",
    "floor_shares",
    "loss_curves",
    "memory_bars",
    "model_map",
    "set_theme",
    "theme",
    "token_strips",
]
