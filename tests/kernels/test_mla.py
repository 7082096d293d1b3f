"""Attention over caches beyond its case table: configurations, the epilogue, orders, splits, refusals."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import dskit.model  # noqa: F401 - registers the ops
from dskit import ops
from dskit.kernels import common, mla
from dskit.layers.linear import quantize
from dskit.testing import Maker, all_cases, assert_close

NAME = "mla.attend_cached"
CASES = all_cases()[NAME]
SHAPE = {"rows": 1, "heads": 2, "width": 64, "turned": 20, "window": 20, "chosen": 40, "size": 50}
REAL = CASES.frozen[0] | {"size": 4096}  # what hopper.py takes, and as numbers hopper_numbers.py
SHAPES = {c["BLOCK"]: c for c in mla.CANDIDATES[NAME]}  # warps and stages mean nothing here


@pytest.fixture
def args(device):
    return list(CASES.make(SHAPE, Maker(device)))


def test_every_configuration_is_right(args):
    want = CASES.oracle(tuple(args))
    for config in SHAPES.values():
        with common.trial({NAME: config}):
            assert_close(mla.attend_cached(*args), want, "A", f"{config}")


def test_the_epilogue_quantises_what_it_would_have_stored(args):
    plain = mla.attend_cached(*args)
    quantised = mla.attend_cached(*args, fmt="fp8_32")
    assert_close(quantised, quantize(plain, "fp8_32", plain.dtype), "X", "fp8_32")
    assert not torch.equal(plain, quantised)


def test_a_missing_entry_reads_nothing_that_is_not_read_anyway(args):
    want = mla.attend_cached(*args)
    args[2], args[4] = args[2].clone(), args[4].clone()
    args[2][0], args[4][0] = 0x7F, 0x7F  # NaN in codes and scales of the reserved rows
    assert torch.equal(mla.attend_cached(*args), want)


def test_the_order_of_entries_hardly_matters(args):
    want = mla.attend_cached(*args)
    args[5] = args[5].flip(1).contiguous()
    assert_close(mla.attend_cached(*args), want, "A", "reversed")


def test_a_row_alone_has_the_bits_it_has_beside_others_where_that_is_asked_for(device):
    args = list(CASES.make(SHAPE | {"rows": 2}, Maker(device)))
    both = mla.attend_cached(*args, steady=True)
    for i in (0, 1, 3, 5):  # what has a row per token
        args[i] = args[i][1:]
    assert torch.equal(mla.attend_cached(*args, steady=True), both[1:])


def test_the_compiler_makes_one_program_of_attention_however_many_blocks_its_rows_take(monkeypatch):
    args = CASES.make(SHAPE | {"rows": 5}, Maker("cpu"))
    want, graphs = ops.find(NAME).reference(*args), []
    monkeypatch.setattr("dskit.layers.mla.GATHER_ELEMENTS", 1)
    with ops.use("torch"):
        assert torch.equal(ops.find(NAME).reference(*args), want)
        torch._dynamo.reset()
        run = ops.compiled(ops.find(NAME), backend=lambda graph, _: graphs.append(graph) or graph.forward)
        assert_close(run(*args), want, "A", "compiled")
    products = [node for graph in graphs for node in graph.graph.nodes if "matmul" in str(node.target)]
    assert len(products) == 2, "of queries and keys, of weights and values"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [{"rows": 3}, {"rows": 140, "sinks": 1}, {"rows": 2, "chosen": 0},
                                   {"rows": 300, "chosen": 200, "seen": 70, "fits": 100},
                                   {"rows": 9, "seen": 1, "fits": 0}, {"rows": 5, "seen": 0, "fits": 0},
                                   {"rows": 300, "numbers": 1}, {"rows": 2, "chosen": 0, "numbers": 1},
                                   {"rows": 140, "seen": 70, "fits": 100, "sinks": 1, "numbers": 1},
                                   {"rows": 140, "seen": 0, "fits": 0, "numbers": 1}])
def test_rows_of_the_released_widths_are_right_split_and_whole(device, shape):
    args = CASES.make(REAL | shape, Maker(device))
    want = CASES.oracle(args)
    for steady in (False, True):
        assert_close(mla.attend_cached(*args, steady=steady), want, "A", f"{shape}, steady {steady}")


def test_no_entry_and_no_sink_gives_zeros(args):
    args[3], args[5], args[6] = (torch.full_like(args[3], -1), torch.full_like(args[5], -1),
                                 torch.full_like(args[6], float("-inf")))
    assert not mla.attend_cached(*args).any()


def test_what_it_cannot_do_it_says(args):
    when = lambda **changed: mla._cannot(*(changed.get(str(i), a) for i, a in enumerate(args)))  # noqa: E731
    assert when() is None
    assert "bfloat16" in when(**{"0": args[0].float()})
    assert "float32" in when(**{"2": torch.zeros(4, 64)})
    assert "fp4" in mla._cannot(*args, fmt="fp4_32")
    with pytest.raises(ValueError, match="turn_T"):
        mla.attend_cached(args[0], args[1][:0], *args[2:])
    with pytest.raises(ValueError, match="sink_A"):
        mla.attend_cached(*args[:6], args[6][:1], *args[7:])
    with pytest.raises(ValueError, match="window_SH"):
        mla.attend_cached(*args[:2], args[2][:, :-1], *args[3:])
