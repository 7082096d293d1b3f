"""The first cell, source text, taps and tables."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import dskit
from dskit import ops
from dskit.layers import mla, norm
from dskit.viz import figures
from dskit.viz.notebook import Table

IDS = [3, 4, 5, 6, 7]


# ---- notebook and shapes ---------------------------------------------------------------------------------


def test_the_first_cell_prints_one_line_and_seeds_everything(capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    draws = []
    for _ in range(2):
        dskit.notebook(seed=5)
        draws.append((random.random(), np.random.rand(), torch.rand(()).item()))
    first, second = capsys.readouterr().out.splitlines()
    assert first == second and "seed 5, theme auto" in first and dskit.__version__ in first
    assert draws[0] == draws[1]


def test_the_theme_is_passed_on():
    dskit.notebook(theme="dark")
    assert figures.theme() is figures.THEMES["dark"]
    dskit.notebook()
    assert figures.theme() is figures.THEMES["auto"]
    with pytest.raises(ValueError, match="choose one of"):
        dskit.notebook(theme="blue")


def test_shapes_say_what_their_times_are_worth(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    small = dskit.shapes()
    assert small.device == "cpu" and "compare shapes, not machines" in str(small)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    large = dskit.shapes()
    assert large.prefill_tokens > small.prefill_tokens and "not machines" not in str(large)


# ---- show ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thing", "where", "first"),
    [
        (mla, "dskit/layers/mla.py", '"""MLA:'),
        (mla.Attention, "dskit/layers/mla.py, line ", "class Attention"),
        (mla.Attention.output, "dskit/layers/mla.py, line ", "def output"),
        (norm.rms, "dskit/layers/norm.py, line ", '@ops.op("norm.rms")'),
        (norm.RMSNorm(4, 1e-6, torch.float32), "dskit/layers/norm.py, line ", "class RMSNorm"),
    ],
    ids=["module", "class", "method", "op", "instance"],
)
def test_show_gives_the_source_that_runs(thing, where, first):
    shown = dskit.show(thing)
    assert shown.where.startswith(where) and shown.text.startswith(first)
    assert repr(shown).startswith(f"# {shown.where}\n") and "<pre" in shown._repr_html_()


def test_show_refuses_what_has_no_source():
    with pytest.raises(TypeError, match="no Python source"):
        dskit.show(torch.ones(2).sum)


# ---- tap -------------------------------------------------------------------------------------------------


def test_tap_records_under_the_modules_own_names(tiny):
    with dskit.tap(tiny, "layers.*.ffn.gate", "layers.0.attn.wkv") as seen:
        tiny.logits(IDS)
    layers, k = tiny.config.num_hidden_layers, tiny.config.num_experts_per_tok
    assert [f"layers.{i}.ffn.gate" for i in range(layers)] + ["layers.0.attn.wkv"] == list(seen)
    ((experts_TJ, weights_TJ),) = seen["layers.0.ffn.gate"]
    assert experts_TJ.shape == weights_TJ.shape == (len(IDS), k)
    assert seen["layers.0.attn.wkv"][0].shape == (len(IDS), tiny.config.head_dim)


def test_tap_records_what_an_op_is_given_and_gives_in_the_module_that_calls_it(tiny):
    config = tiny.config
    with dskit.tap(tiny, "layers.*:mhc.sinkhorn", "layers.1.engram:engram.gate", "layers.1") as seen:
        tiny.logits(IDS)
    layers = range(config.num_hidden_layers)
    assert seen.keys() == {f"layers.{i}:mhc.sinkhorn" for i in layers} | {
        "layers.1.engram:engram.gate",
        "layers.1",
    }
    attention, experts = seen["layers.1:mhc.sinkhorn"]
    found = ops.find("mhc.sinkhorn").reference(attention["B_TNN"], attention["iters"], attention["eps"])
    assert torch.equal(attention["result"], found)
    state, _ = seen["layers.1"][0]  # the block hands one object on, which the next layers change
    assert torch.equal(state.C, experts["result"])
    (call,) = seen["layers.1.engram:engram.gate"]
    assert call["X_TND"].shape == call["result"].shape and not torch.equal(call["X_TND"], call["result"])


def test_tap_sees_the_selection_of_each_index_source(tiny):
    config = tiny.config
    with dskit.tap(tiny, "*:indexer.topk", "*:mla.attend_cached") as seen:
        tiny.logits(list(range(3, 43)))
    assert [f"layers.{i}.attn:indexer.topk" for i in config.index_source_layer_ids] == [
        name for name in seen if name.endswith("topk")
    ]
    source, reader = (seen[f"layers.{i}.attn:mla.attend_cached"][0]["chosen_TK"] for i in (4, 5))
    assert torch.equal(source, reader)  # layer 5 reuses the selection of layer 4


def test_tap_refuses_an_unknown_op_with_the_nearest(tiny):
    with pytest.raises(ValueError, match="no op is called 'mhc.sinkhron'; nearest: mhc.sinkhorn"):
        dskit.tap(tiny, "layers.1:mhc.sinkhron")
    with pytest.raises(ValueError, match="no module is called"):
        dskit.tap(tiny, "layers.99:mhc.sinkhorn")


def test_tap_says_when_an_op_runs_elsewhere(tiny):
    with pytest.raises(RuntimeError, match="finds"), dskit.tap(tiny, "layers.6.attn.indexer:indexer.topk"):
        tiny.logits(IDS)


def test_tap_leaves_nothing_behind_and_changes_nothing(tiny):
    before = tiny.logits(IDS)
    with dskit.tap(tiny.model, "*", "*:*") as seen:
        assert torch.equal(tiny.logits(IDS), before)
    counts = {name: len(values) for name, values in seen.items()}
    tiny.logits(IDS)
    assert counts == {name: len(values) for name, values in seen.items()}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in tiny.model.modules())
    assert not ops._state.watchers


def test_tap_holds_copies():
    layer = torch.nn.Identity()
    with dskit.tap(layer, "") as seen:
        value = layer(torch.ones(2))
        value.zero_()
    assert seen[""][0].tolist() == [1, 1]


def test_tap_refuses_unknown_names_with_the_nearest(tiny):
    with pytest.raises(ValueError, match=r"nearest: .*layers\.0\.ffn\.gate"):
        dskit.tap(tiny, "layers.0.ffn.gaet")


def test_tap_says_when_nothing_ran(tiny):
    with pytest.raises(RuntimeError, match="tap the parent"), dskit.tap(tiny, "layers.0.attn.wo_a"):
        tiny.logits(IDS)


def test_an_error_inside_a_tap_is_not_hidden(tiny):
    with pytest.raises(KeyError, match="mine"), dskit.tap(tiny, "layers.0.ffn.gate"):
        raise KeyError("mine")


# ---- tables ----------------------------------------------------------------------------------------------


def test_a_table_displays_rows_with_missing_cells():
    table = Table([{"op": "a<b", "ms": 1.23456}, {"op": "c", "count": 4096, "ok": True}], "two & two")
    assert table.columns == ["op", "ms", "count", "ok"]
    assert repr(table).splitlines() == [
        "two & two",
        "op   ms    count  ok",
        "a<b  1.23",
        "c          4,096  True",
    ]
    page = table._repr_html_()
    assert "a&lt;b" in page and "two &amp; two" in page and page.count("<tr>") == 3
