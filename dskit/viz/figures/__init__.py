"""Figures: pure functions from data to a picture that also says in words what it shows.

    page.py       Picture, themes, colours
    pieces.py     boxes, text, arrows
    model.py      the whole model
    mla.py        bytes of attention
    swa.py        what attention looks at
    engram.py     lookups and gates of the n-gram memory
    mhc.py        residual streams and their mixing
    tokens.py     strips of tokens
    dspark.py     guesses kept and thrown away
    serving.py    the way of a request
    ablation.py   loss curves, what a missing mechanism costs
    kernels.py    shares of the floor; a swap, a step's time
    moe.py        tokens to experts, loads
    engine.py     cache blocks, the lives of requests

Shapes: `rows` are lists of dicts; every function names the keys that it reads.
Units: sizes in bytes.
Errors: ValueError for rows that are empty.
Try: notebooks/00_start.ipynb
"""

from dskit.viz.figures.ablation import ablation_effects, loss_curves
from dskit.viz.figures.dspark import acceptance
from dskit.viz.figures.engine import cache_map, request_lives
from dskit.viz.figures.engram import gate_map, ngram_lookup
from dskit.viz.figures.kernels import floor_shares, op_bars, op_timeline, swap_board
from dskit.viz.figures.mhc import mixing_matrices, stream_flow
from dskit.viz.figures.mla import memory_bars
from dskit.viz.figures.model import model_map
from dskit.viz.figures.moe import expert_flow, expert_load
from dskit.viz.figures.page import THEMES, Picture, set_theme, theme
from dskit.viz.figures.serving import request_path
from dskit.viz.figures.swa import attention_map, query_reach, selection_mask
from dskit.viz.figures.tokens import token_strips

__all__ = [
    "Picture",
    "THEMES",
    "ablation_effects",
    "acceptance",
    "attention_map",
    "cache_map",
    "expert_flow",
    "expert_load",
    "floor_shares",
    "gate_map",
    "loss_curves",
    "memory_bars",
    "mixing_matrices",
    "model_map",
    "ngram_lookup",
    "op_bars",
    "op_timeline",
    "query_reach",
    "request_lives",
    "request_path",
    "selection_mask",
    "set_theme",
    "stream_flow",
    "swap_board",
    "theme",
    "token_strips",
]
