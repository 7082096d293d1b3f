"""Figures from fixed data: what they say, what they show, and whether it can be read in every theme."""

from __future__ import annotations

import io

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
DRAWN = {
    "loss_curves": lambda: figures.loss_curves(CURVES),
    "ablation_effects": lambda: figures.ablation_effects(EFFECTS),
    "model_map": lambda: figures.model_map(preset("demo"), "demo"),
    "memory_bars": lambda: figures.memory_bars(BARS),
    "token_strips": lambda: figures.token_strips(STRIPS),
    "floor_shares": lambda: figures.floor_shares(SHARES),
}


@pytest.fixture(autouse=True)
def theme():
    yield
    figures.set_theme("auto")


def pixels(picture: figures.Picture) -> np.ndarray:
    """The PNG, [height, width, RGBA], 0 to 1."""
    return image.imread(io.BytesIO(picture.bytes("png")))


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


@pytest.mark.parametrize("draw", [figures.memory_bars, figures.token_strips, figures.floor_shares])
def test_no_rows_are_refused(draw):
    with pytest.raises(ValueError, match="at least one"):
        draw([])
