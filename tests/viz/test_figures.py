"""Figures from fixed data: what they say, what they show, and whether it can be read in every theme."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from matplotlib import image
from matplotlib.colors import to_rgb

from dskit.config import PRESETS, preset
from dskit.viz import figures
from dskit.viz.figures import page, pieces

BARS = [
    {"what": "64 heads", "bytes": 131072, "vectors": 128},
    {"what": "one vector", "bytes": 1024, "vectors": 1},
]
STRIPS = [
    {"label": "seed 1", "tokens": [" a", "\n", "lamp"]},
    {"label": "seed 2", "tokens": [" other"] * 40},
    {"label": "seed 1", "tokens": [" a", "\n", "lamp"]},
]
SHARES = [
    {"what": "norm.rms", "shape": "rows 4096", "share": 0.5, "us": 39.0, "peer": "lib", "peer_share": 0.25},
    {"what": "moe.gate", "shape": "rows 128", "share": None, "us": None, "peer": None, "peer_share": None},
    {"what": "mhc.read", "shape": "rows 1", "share": 1.6, "us": 2.0, "peer": None, "peer_share": None},
]
CURVES = [
    {"what": what, "seed": seed, "step": step, "loss": 8.0 - step / 10 + seed / 10 + (what == "plain") / 5}
    for what in ("full", "plain")
    for seed in (0, 1)
    for step in (1, 10, 20)
]
EFFECTS = [
    {"what": "no Engram", "held": "all parameters", "worse": 0.12, "worse_se": 0.02},
    {"what": "plain residual", "held": "widths", "worse": -0.01, "worse_se": None},
]
ROUNDS = [
    {"drafted": [*" a\nb", "lamp"], "held": held, "next": " light", "chance": [0.9, 0.8, 0.5, 0.3, 0.1]}
    for held in [5, 0, 2, 5] * 4
]
STAGES = [
    {"what": "chat page", "where": "serve/ui.py", "thread": "the browser"},
    {"what": "scheduler", "where": "engine/scheduler.py", "thread": "the engine's thread"},
    {"what": "op", "where": "ops.py", "thread": "the engine's thread"},
]
FLOW = [
    {"token": " lamp", "experts": [1, 3], "weights": [0.75, 0.25]},
    {"token": "?", "experts": [3, 0], "weights": [0.5, 0.5]},
]
LOADS = [
    {"layer": 2, "loads": [0, 9, 3], "ideal": 4.0, "max_over_mean": 2.25, "entropy": 0.51},
    {"layer": 3, "loads": [4, 4, 4], "ideal": 4.0, "max_over_mean": 1.0, "entropy": 1.0},
]
SWAPS = [
    {"group": "norm", "choice": "triton", "state": "triton in use", "error": 2e-3, "time": "interpreted"},
    {"group": "cache", "choice": "torch", "state": "torch in use", "error": 0.0, "time": "0.4 ms"},
    {"group": "mine", "choice": "torch", "state": "refused: no GPU", "error": None, "time": ""},
]
OWN = [
    {"label": "mla.attend[torch]", "ms": 6.0, "share": 0.75},
    {"label": "(outside ops)", "ms": 2.0, "share": 0.25},
    {"label": "compiling, in all", "ms": 40.0, "share": None},
]
LINE = [
    {"lane": lane, "op": op, "start_ms": 2.0 * i, "ms": 1.0, "lit": op == "norm.rms"}
    for lane, count in (("before", 4), ("after", 2))
    for i, op in enumerate(["norm.rms", "moe.plan"] * count)
]
BLOCKS = [
    {"block": 1, "requests": ["ask"], "cached": False},
    {"block": 2, "requests": ["ask", "tell"], "cached": True},
    {"block": 3, "requests": [], "cached": True},
    *({"block": n, "requests": [], "cached": False} for n in range(4, 40)),
]
LIVES = [
    {"request": "ask", "step": step, "kind": kind, "blocks": 0 if kind in ("waiting", "preempted") else 2}
    for step, kind in enumerate(["waiting", "prefill", "decode", "decode", "preempted", "prefill", "decode"])
]
REACH = [
    {"what": "layer 0", "position": 9, "window": 4, "ratio": 0, "chosen": [], "block": 4},
    {"what": "layer 2", "position": 9, "window": 20, "ratio": 2, "chosen": [1, 4], "block": 4},
]
MASK = [
    {"window": max(0, t - 2), "chosen": [e for e in (0, t // 2 - 1) if 0 <= e < (t + 1) // 2], "ratio": 2}
    for t in range(8)
]
WEIGHTS = [
    row
    | {"sink": 0.25, "weights": [0.25 / (t - row["window"] + 1)] * (t - row["window"] + 1)}
    | {"entries": [0.5 / len(row["chosen"]) for _ in row["chosen"]]}
    for t, row in enumerate(MASK)
]
STREAMS = [
    {"read": 0.2, "write": 0.7, "mix": [0.9, 0.1, 0]},
    {"read": 1, "write": 0.1, "mix": [0.1, 0.4, 0.5]},
    {"read": 0, "write": 1.5, "mix": [0, 0.5, 0.5]},
]
MIXES = [
    {"what": "logits", "matrix": [[3, -1.5], [0.25, -2]], "sums": False},
    {"what": "mixed", "matrix": [[0.75, 0.25], [0.2, 0.8]], "sums": True},
]
LOOKUPS = [
    {"gram": gram, "row": row, "twin": twin, "bytes": 33, "gates": [0.25, 0.875]}
    for gram, row, twin in (
        (["a", " b"], 7, " c d"),
        (["a", " b"], 4012, ""),
        (["\n", "a", " b"], 9, ""),
        (["\n", "a", " b"], 12, ""),
    )
]
GATES = [
    {"token": f" token{i}", "gates": [0.02 * i, 1 - 0.02 * i, 0.5]} for i in range(30)
]  # more than fit
DRAWN = {
    "acceptance": lambda: figures.acceptance(ROUNDS),
    "request_path": lambda: figures.request_path(STAGES),
    "loss_curves": lambda: figures.loss_curves(CURVES),
    "ablation_effects": lambda: figures.ablation_effects(EFFECTS),
    "expert_flow": lambda: figures.expert_flow(FLOW, 4),
    "expert_load": lambda: figures.expert_load(LOADS, top=12),
    "swap_board": lambda: figures.swap_board(SWAPS),
    "op_bars": lambda: figures.op_bars(OWN, [8.0, 9.0, 8.5]),
    "op_timeline": lambda: figures.op_timeline(LINE),
    "cache_map": lambda: figures.cache_map(BLOCKS, {"window": 4096}),
    "request_lives": lambda: figures.request_lives(LIVES),
    "model_map": lambda: figures.model_map(preset("demo"), "demo"),
    "memory_bars": lambda: figures.memory_bars(BARS),
    "token_strips": lambda: figures.token_strips(STRIPS),
    "floor_shares": lambda: figures.floor_shares(SHARES),
    "query_reach": lambda: figures.query_reach(REACH),
    "selection_mask": lambda: figures.selection_mask(MASK),
    "attention_map": lambda: figures.attention_map(WEIGHTS),
    "stream_flow": lambda: figures.stream_flow(STREAMS, inside="attention"),
    "mixing_matrices": lambda: figures.mixing_matrices(MIXES),
    "ngram_lookup": lambda: figures.ngram_lookup(LOOKUPS),
    "gate_map": lambda: figures.gate_map(GATES),
}


@pytest.fixture(autouse=True)
def theme():
    yield
    figures.set_theme("auto")


def pixels(picture: figures.Picture) -> np.ndarray:
    """The picture as coarse pixels, [height, width, RGBA], 0 to 1."""
    out = io.BytesIO()
    picture.savefig(out, format="png", dpi=50)
    return image.imread(io.BytesIO(out.getvalue()))


def luminance(colour) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def contrast(one, other) -> float:
    dark, bright = sorted((luminance(one), luminance(other)))
    return (bright + 0.05) / (dark + 0.05)


# ---- every figure, every theme ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", figures.THEMES)
@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_background_follows_the_theme_and_something_is_drawn(draw, name):
    figures.set_theme(name)
    seen = pixels(draw())
    assert seen[0, 0, 3] == (1 if name == "auto" else 0)
    marked = (seen[..., 3] > 0.5) & (np.abs(seen[..., :3] - seen[0, 0, :3]).sum(-1) > 0.3)
    assert 0.005 < marked.mean() < 0.7  # lines take less than boxes


@pytest.mark.parametrize("name", figures.THEMES)
def test_ink_reads_on_the_page(name):
    chosen = figures.THEMES[name]
    behind = "#111111" if name == "dark" else "#ffffff"
    assert contrast(chosen.ink, behind) > 7 and contrast(chosen.faint, behind) > 4.5


@pytest.mark.parametrize("fill", ["BLUE", "SLATE", "STONE", "SAND", "YELLOW"])
def test_labels_read_on_their_boxes(fill):
    colour = getattr(page, fill)
    assert contrast(pieces.on(colour), colour) > 4.5


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_the_description_travels_with_the_picture(draw):
    picture = draw()
    assert len(picture.alt) > 60
    bundle = picture._repr_mimebundle_()
    assert bundle["text/plain"] == picture.alt and 'src="data:image/png;base64,' in bundle["text/html"]
    assert picture.alt.split("'")[0].split(";")[0] in bundle["text/html"]
    assert picture.alt[:40] in picture.bytes("svg").decode()


def test_an_unknown_theme_is_refused():
    with pytest.raises(ValueError, match="auto, light, dark"):
        figures.set_theme("drak")


# ---- drafts and ablations ----------------------------------------------------------------------------------


def test_acceptance_counts_the_models_own_token_and_every_round():
    picture = figures.acceptance(ROUNDS)
    assert "4.00 tokens per round over 16 rounds" in picture.alt
    assert "guess 1 kept in 75%, expected 90%" in picture.alt and "guess 5 kept in 50%" in picture.alt
    texts = [text.get_text() for text in picture.axes[0].texts]
    assert "and 6 rounds more" in texts and texts.count("\u2423light") == 10


def test_curves_average_over_seeds_and_effects_say_what_is_held():
    assert "full: 7.95 at step 1, 6.05 at step 20, 2 seeds" in figures.loss_curves(CURVES).alt
    alt = figures.ablation_effects(EFFECTS).alt
    assert "no Engram: +0.120 nats per answer token, standard error 0.020; held all parameters" in alt
    assert "plain residual: -0.010 nats per answer token, one seed, no standard error" in alt


# ---- the model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "slice:N"])
def test_the_map_of_every_preset_stays_on_the_page(name):
    config = preset(name)
    picture = figures.model_map(config, name)
    picture.draw_without_rendering()
    box, (axes,) = picture.bbox, picture.axes
    texts = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert all(
        box.x0 <= t.x0 and t.x1 <= box.x1 and box.y0 <= t.y0 and t.y1 <= box.y1 for t in texts.values()
    )
    assert {str(layer) for layer in range(config.num_hidden_layers)} <= set(texts)
    assert f"[T, {config.vocab_size}]" in texts and f"[T, {config.hidden_size}]" in texts


def test_labels_of_the_map_fit_their_bars():
    for name in ("demo", "flash", "v4-flash"):
        picture = figures.model_map(preset(name), name)
        picture.draw_without_rendering()
        (axes,) = picture.axes
        boxes = [patch.get_window_extent() for patch in axes.patches]
        for text in (t for t in axes.texts if t.get_zorder() == 4 and t.get_text().strip()):
            extent, (x, y) = text.get_window_extent(), axes.transData.transform(text.get_position())
            owner = min((b for b in boxes if b.contains(x, y)), key=lambda b: b.width)
            assert extent.width < owner.width, f"{name}: {text.get_text()!r}"


def test_the_map_says_who_shares_a_memory():
    alt = figures.model_map(preset("demo"), "demo").alt
    assert "Layer 2 writes a memory, one entry per 2 tokens, read up to layer 3." in alt
    assert "Layer 4 writes a memory, one entry per token, read up to layer 7." in alt
    assert "Engram layers: 1, 3" in alt and "last 64 tokens" in alt


# ---- bars and strips -------------------------------------------------------------------------------------


def test_bars_are_to_scale_and_divided_into_vectors():
    picture = figures.memory_bars(BARS)
    (axes,) = picture.axes
    many, one = axes.containers
    ends = [max(p.get_x() + p.get_width() for p in bar) - bar[0].get_x() for bar in (many, one)]
    assert len(many) == 128 and len(one) == 1
    assert ends[0] / ends[1] == pytest.approx(128, rel=0.01)
    assert "131,072 bytes in 128 vectors; one vector: 1,024 bytes in 1 vector" in picture.alt
    assert any("128 times less" in text.get_text() for text in axes.texts)


def test_equal_strips_say_so_and_long_ones_end_in_dots():
    picture = figures.token_strips(STRIPS)
    texts = [text.get_text() for text in picture.axes[0].texts]
    assert texts.count(" = row 1") == 1 and texts.count("…") == 1
    assert "␣a" in texts and "↵" in texts  # spaces and line ends can be seen
    assert picture.alt.endswith("3, seed 1: ' a\\nlamp' = row 1")


def test_shares_are_to_scale_and_what_was_not_measured_has_no_bar():
    (axes,) = figures.floor_shares(SHARES).axes
    ours, beyond = (bar[0] for bar in axes.containers)
    scale = {text.get_text(): text.get_position()[0] for text in axes.texts if text.get_text().endswith(" %")}
    assert ours.get_x() == scale["0 %"] and ours.get_x() + ours.get_width() == pytest.approx(scale["50 %"])
    assert scale["100 %"] < beyond.get_x() + beyond.get_width() < max(axes.get_xlim())
    marks = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "D"]
    assert scale["25 %"] in marks and len(marks) == 2  # one on a bar, one in the legend
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("not measured") == 1 and "39.0 us, 50%" in texts and "lib 25%" in texts


def test_shares_in_words_name_numbers_only_where_they_were_measured():
    alt = figures.floor_shares(SHARES).alt
    assert "norm.rms at rows 4096: 39.0 microseconds, 50% of its floor, lib 25%" in alt
    assert "moe.gate at rows 128: not measured; mhc.read" in alt


def bars_of(picture: figures.Picture) -> list:
    """Every rectangle that stands for data."""
    return [bar for group in picture.axes[0].containers for bar in group]


def test_blocks_say_who_holds_them_by_letter_and_hatch():
    picture = figures.cache_map(BLOCKS)
    assert "39 blocks, 1 held, 1 shared, 1 cached, 36 free. A is ask, 2 blocks; B is tell, 1" in picture.alt
    texts = [text.get_text() for text in picture.axes[0].texts]
    assert {"A", "A+B", "c", "ask: 2 blocks"} <= set(texts)
    assert sum(bool(bar.get_hatch()) for bar in bars_of(picture)) == 1


def test_a_life_is_told_in_order_and_a_preemption_is_hatched():
    picture = figures.request_lives(LIVES)
    order = ["waiting for 1", "prefill for 1", "decode for 2", "preempted for 1", "prefill for 1",
             "decode for 1"]
    assert re.findall(r"\w+ for \d+", picture.alt) == order and picture.alt.endswith("; 2 blocks at most")
    assert sum(bool(bar.get_hatch()) for bar in bars_of(picture)) == 2  # the step, and the legend


def test_loads_are_on_a_scale_that_can_be_fixed():
    assert "max 2.2 times the mean at layer 2, expert 1" in figures.expert_load(LOADS).alt
    fixed, free = figures.expert_load(LOADS, top=90), figures.expert_load(LOADS)
    assert bars_of(fixed)[1].get_facecolor() != bars_of(free)[1].get_facecolor()
    assert any(text.get_text() == "90 tokens" for text in fixed.axes[0].texts)


def test_thick_lines_are_large_weights():
    widths = [line.get_linewidth() for line in figures.expert_flow(FLOW, 4).axes[0].lines]
    assert widths[0] > widths[2] == widths[3] > widths[1]


def test_errors_stand_on_their_scale_and_none_where_nothing_was_measured():
    picture = figures.swap_board(SWAPS)
    marks = [line.get_xdata()[0] for line in picture.axes[0].lines if line.get_marker() == "D"]
    at = {text.get_text(): text.get_position()[0] for text in picture.axes[0].texts}
    assert at["1e-3"] < marks[0] < at["1e-2"] and marks[1] == at["1e-8"] and len(marks) == 2
    assert "mine = torch, refused: no GPU, not measured, no time" in picture.alt


def test_compiling_is_hatched_and_no_share():
    picture = figures.op_bars(OWN, [8.0, 9.0])
    assert [bool(bar.get_hatch()) for bar in bars_of(picture)] == [False, False, True]
    assert "compiling, in all: 40.00 ms, compiling. The last 2 steps took 8.0 to 9.0 ms." in picture.alt
    assert len(picture.axes[0].lines[0].get_xdata()) == 2


def test_lanes_share_one_axis():
    assert "before: 8 op calls in 15.00 ms, of which norm.rms 4.00 ms" in figures.op_timeline(LINE).alt
    assert len(bars_of(figures.op_timeline(LINE))) == len(LINE)


# ---- attention -------------------------------------------------------------------------------------------


def test_the_reach_of_a_query_is_to_scale():
    picture = figures.query_reach(REACH)
    (axes,) = picture.axes
    slate, yellow = (to_rgb(colour) for colour in (page.SLATE, page.YELLOW))
    filled = {colour: [] for colour in (slate, yellow)}
    for cell in (p for bar in axes.containers for p in bar if p.get_height() == 2):
        filled.get(cell.get_facecolor()[:3], []).append(cell)
    assert len(filled[slate]) == 4 + 10 and len(filled[yellow]) == 2
    token, entry = filled[slate][0], filled[yellow][0]
    assert entry.get_width() == pytest.approx(2 * token.get_width())
    left = min(cell.get_x() for cell in filled[slate])  # token 0, which the longer window shows
    assert entry.get_x() == pytest.approx(left + 2 * token.get_width())
    assert "the window holds 4 of 10 tokens, no global memory" in picture.alt
    assert "2 of 5 entries are chosen, from 2 cache blocks, the oldest at token 2" in picture.alt


def test_the_mask_tells_window_choice_and_both_apart_and_nothing_from_the_future():
    picture = figures.selection_mask(MASK)
    shown = picture.axes[1].images[0].get_array()
    # the last query: window from token 5, entries 0 (tokens 0, 1) and 2 (tokens 4, 5)
    assert shown[7].tolist() == [2, 2, 0, 0, 2, 3, 1, 1]
    assert all(np.isnan(shown[t, t + 1 :].filled(np.nan)).all() for t in range(8))
    assert "3 tokens in its window and 2 chosen entries of 2 tokens each" in picture.alt
    assert "together they cover 6 of 8 tokens" in picture.alt


def test_the_attention_map_has_the_square_roots_of_the_shares():
    picture = figures.attention_map(WEIGHTS)
    window, memory, sink = (axes.images[0].get_array().filled(np.nan) for axes in picture.axes[1:4])
    assert window[7, 5:] == pytest.approx([(0.25 / 3) ** 0.5] * 3) and np.isnan(window[7, :5]).all()
    assert memory[7, [0, 1, 4, 5]] == pytest.approx(0.5) and np.isnan(memory[7, [2, 3, 6, 7]]).all()
    assert sink == pytest.approx(0.5)
    assert "25% to the window, 50% to the global memory, 25% to the sink" in picture.alt
    assert "most, 25%, to entry 2" in picture.alt


@pytest.mark.parametrize(("tokens", "cells"), [(512, 512), (513, 257), (1300, 434)])
def test_long_maps_are_drawn_in_groups_and_say_so(tokens, cells):
    rows = [{"window": max(0, t - 2), "chosen": [], "ratio": 1} for t in range(tokens)]
    page_axes, inner = figures.selection_mask(rows).axes
    assert inner.images[0].get_array().shape == (cells, cells)
    said = [text.get_text() for text in page_axes.texts if text.get_text().startswith("tokens 0 to")]
    group = -(-tokens // 512)
    assert said == [f"tokens 0 to {tokens - 1}" + (f", {group} to a cell" if group > 1 else "")]


# ---- streams ---------------------------------------------------------------------------------------------


def test_flows_are_as_wide_as_their_weights():
    picture = figures.stream_flow(STREAMS, inside="attention")
    widths = sorted(line.get_linewidth() for line in picture.axes[0].lines)
    weights = [w for row in STREAMS for w in (row["read"], row["write"], *row["mix"]) if w]
    assert widths == pytest.approx(sorted(5 * weight for weight in weights))
    assert "attention reads them with 0.20, 1.00, 0.00, writes with 0.70, 0.10, 1.50" in picture.alt


def test_matrices_show_values_and_how_far_sums_are_from_one():
    picture = figures.mixing_matrices(MIXES)
    page_axes, logits, mixed = picture.axes
    assert [text.get_text() for text in mixed.texts] == ["0.75", "0.25", "0.20", "0.80"]
    assert [text.get_text() for text in logits.texts] == ["3.00", "-1.50", "0.25", "-2.00"]
    texts = [text.get_text() for text in page_axes.texts]
    assert texts.count("1.00") == 2 and {"0.95", "1.05", "off by 0.05"} <= set(texts)
    assert "sums off by 0.05 at most" in picture.alt and "logits: 2 by 2, from -2.00 to 3.00;" in picture.alt


def test_large_matrices_have_colours_only():
    (_, inner) = figures.mixing_matrices([{"what": "9", "matrix": np.eye(9).tolist(), "sums": True}]).axes
    assert not inner.texts


# ---- n-grams ---------------------------------------------------------------------------------------------


def test_lookups_name_rows_and_who_shares_them():
    picture = figures.ngram_lookup(LOOKUPS)
    texts = [text.get_text() for text in picture.axes[0].texts]
    assert {"row 7", "row 4,012", "2-gram", "3-gram", "also of ␣c␣d", "↵"} <= set(texts)
    assert "'a b' reads row 7 also of ' c d', row 4,012; '\\na b' reads" in picture.alt
    assert "4 rows, 132 bytes are read. Gates: 0.25, 0.88." in picture.alt


def test_gates_that_do_not_fit_end_in_dots():
    texts = [text.get_text() for text in figures.gate_map(GATES).axes[0].texts]
    assert texts.count("…") == 1 and "1.00" in texts and "␣token0" in texts and "␣token29" not in texts


DRAWN_FROM_ROWS = [
    *(figures.memory_bars, figures.token_strips, figures.floor_shares, figures.expert_load),
    *(figures.swap_board, figures.op_bars, figures.op_timeline, figures.cache_map, figures.request_lives),
    *(figures.query_reach, figures.selection_mask, figures.attention_map, figures.stream_flow),
    *(figures.mixing_matrices, figures.ngram_lookup, figures.gate_map),
    *(figures.acceptance, figures.request_path, figures.loss_curves),
]


@pytest.mark.parametrize("draw", DRAWN_FROM_ROWS)
def test_no_rows_are_refused(draw):
    with pytest.raises(ValueError, match="at least one"):
        draw([])
