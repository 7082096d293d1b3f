"""Panels: controls move rows, rows make the picture, and the picture stays."""

from __future__ import annotations

import asyncio
import csv

import pytest

from dskit.viz import figures, widgets

CONTROLS = {"heads": (1, 128, 64), "precision": ["bf16", "fp8"]}


def memory(heads, precision):
    """Two bars."""
    size = {"bf16": 2, "fp8": 1}[precision] * 512
    return [
        {"what": f"{heads} heads", "bytes": 2 * heads * size, "vectors": 2 * heads},
        {"what": "one vector", "bytes": size, "vectors": 1},
    ]


@pytest.fixture
def panel():
    return widgets.Panel(memory, figures.memory_bars, CONTROLS)


def test_a_panel_starts_with_rows_a_picture_and_its_line_of_code(panel):
    assert panel.data == memory(64, "bf16")
    assert panel.figure().alt in panel._image.value
    assert panel.code == "memory(heads=64, precision='bf16')"
    assert "memory(heads=64" in panel._note.value


def test_moving_a_control_redraws(panel):
    panel.controls["heads"].value = 8
    panel.controls["precision"].value = "fp8"
    assert panel.data == memory(8, "fp8") and "8 heads: 8,192 bytes" in panel._image.value


def test_in_a_running_kernel_it_waits_until_the_slider_rests(monkeypatch):
    calls = []

    def counted(heads):
        calls.append(heads)
        return memory(heads, "fp8")

    async def slide():
        panel = widgets.Panel(counted, figures.memory_bars, {"heads": (1, 128, 64)})
        for heads in range(1, 30):
            panel.controls["heads"].value = heads
        assert calls == [64]
        await asyncio.sleep(widgets.DELAY_S + 0.1)

    asyncio.run(slide())
    assert calls == [64, 29]


def test_with_a_button_rows_are_computed_when_it_is_pressed():
    panel = widgets.Panel(memory, figures.memory_bars, CONTROLS, button="Draw")
    panel.controls["heads"].value = 3
    assert panel.data == memory(64, "bf16") and "heads=3" in panel._note.value
    (draw,) = [child for child in panel.children[0].children if getattr(child, "description", "") == "Draw"]
    draw.click()
    assert panel.data == memory(3, "bf16")


def test_a_failing_computation_is_shown_and_the_picture_stays(panel):
    before = panel._image.value
    panel._compute = lambda **_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        panel.redraw()
    assert "ZeroDivisionError" in panel._note.value and panel._image.value == before


def test_save_writes_pictures_and_rows(panel, tmp_path):
    assert panel.save(tmp_path / "a" / "bars.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in panel.save(tmp_path / "bars.svg").read_text()
    rows = list(csv.DictReader(panel.save(tmp_path / "bars.csv").open()))
    assert rows[0] == {"what": "64 heads", "bytes": "131072", "vectors": "128"}
    with pytest.raises(ValueError, match=r"\.png, \.svg or \.csv"):
        panel.save(tmp_path / "bars.pdf")


def test_the_save_buttons_say_where_the_file_is(panel, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for button in panel.children[2].children[:3]:
        assert button.tooltip
        button.click()
    assert sorted(path.name for path in (tmp_path / "dskit-out").iterdir()) == [
        "memory.csv",
        "memory.png",
        "memory.svg",
    ]
    assert "saved to dskit-out/memory.csv" in panel._note.value


def test_without_widgets_the_picture_is_shown_with_a_sentence(panel):
    bundle = panel._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "<img " in bundle["text/html"] and "ipywidgets" in bundle["text/html"]
    assert bundle["text/plain"] == panel.figure().alt


def test_a_line_of_text_counts_once_it_is_entered():
    panel = widgets.Panel(said, figures.token_strips, {"text": "a b", "times": [1, 2]})
    control = panel.controls["text"]
    assert control.continuous_update is False and panel.data == [{"label": "1", "tokens": ["a", "b"]}]
    control.value = "c"
    panel.controls["times"].value = 2
    assert panel.data == [{"label": "2", "tokens": ["c", "c"]}]


def said(text, times):
    """Words, some times over."""
    return [{"label": str(times), "tokens": text.split() * times}]


def test_every_control_has_a_name(panel):
    assert all(control.description == name for name, control in panel.controls.items())


def test_several_values_can_be_chosen():
    def shown(parts):
        return [{"what": part, "bytes": 1, "vectors": 1} for part in parts]

    panel = widgets.Panel(shown, figures.memory_bars, {"parts": widgets.Several(["a", "b", "c"])})
    assert [row["what"] for row in panel.data] == ["a", "b", "c"]
    panel.controls["parts"].value = ("c",)
    assert panel.data == shown(("c",)) and panel.code == "shown(parts=('c',))"
