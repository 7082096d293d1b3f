"""Rows written straight into the memory of peers, beside what travels by torch.distributed.

Here the ranks are windows of one process, which write and wait one after the other.
"""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton")

from dskit import cli, ops
from dskit.engine import exchange
from dskit.engine.exchange import Peers
from dskit.engine.window import Window, measured
from dskit.kernels import exchange as kernels
from dskit.kernels.common import trial
from dskit.layers.linear import quantize
from dskit.layers.moe import combine as add_up
from tests.engine.threads import on_ranks

SLOTS = 3  # on each rank
MOST = 4  # rows of any rank in any step


def windows(size: int, width: int, choices: int, dtype: torch.dtype, each: bool) -> list[Peers]:
    """Ranks whose memory is this process'."""
    at, nbytes = measured(size, MOST, width, choices, dtype, each)
    held = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(size)]
    address = torch.tensor([own.data_ptr() for own in held])
    return [Peers(rank, size, window=Window(own, address, at, MOST)) for rank, own in enumerate(held)]


def answers_of(x: torch.Tensor, slot: torch.Tensor, rank: int, each: bool) -> torch.Tensor:
    """What the experts of a rank say: so much of a row as its slot's number tells; of no row, a NaN."""
    share = torch.where(slot >= 0, 1.0 + slot + SLOTS * rank, torch.nan if each else 0.0)
    said = (share[:, :, None] * x[:, None].float()).to(x.dtype)
    if each:
        return said.flatten(0, 1)
    return torch.where((slot >= 0).any(1)[:, None], said.float().sum(1), torch.nan).to(x.dtype)


def by_torch(size, x, slot, weight, fmt, each, monkeypatch):
    def work(peers):
        k = peers.rank
        load = torch.ones(SLOTS, dtype=torch.int64)
        rows, share, trip = exchange.dispatch(x[k], slot[k], weight[k], SLOTS, fmt, peers, load_P=load)
        y = answers_of(rows, trip.slot_RJ, k, each)
        total = add_up(*exchange.combine(y, trip, each, peers), None, x[k].dtype)
        return rows, share, trip.slot_RJ, load, total

    return on_ranks(size, work, monkeypatch)


def by_halves(monkeypatch, launch, work):
    """What `work` gives of each rank, when everyone has sent before anyone receives."""
    launched, real = [], getattr(kernels, launch)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, launch, lambda *args: launched.append(args))
        found = work()
    for half in ({"receive": False}, {"send": False}):
        for args in launched:
            real(*args, **half)
    return found


def by_kernels(ranks, x, slot, weight, fmt, each, rows, monkeypatch):
    loads = [torch.ones(SLOTS, dtype=torch.int64) for _ in ranks]
    came = by_halves(monkeypatch, "_there", lambda: [
        kernels.dispatch(x[p.rank], slot[p.rank], weight[p.rank], SLOTS, fmt, p, rows, loads[p.rank])
        for p in ranks])
    y = [answers_of(rows, trip.slot_RJ, k, each) for k, (rows, _, trip) in enumerate(came)]
    back = by_halves(monkeypatch, "_back", lambda: [
        kernels.combine(y[p.rank], came[p.rank][2], each, p) for p in ranks])
    found = []
    for (rows, share, trip), load, answers in zip(came, loads, back, strict=True):
        here = (trip.slot_RJ >= 0).any(dim=1)
        total = add_up(*answers, None, rows.dtype)
        found.append((rows[here], share[here], trip.slot_RJ[here], load, total))
    return found


def drawn(counts: list[int], width: int, choices: int, kind: str, dtype: torch.dtype) -> tuple[list, ...]:
    random, size = torch.Generator().manual_seed(sum(counts) + width), len(counts)
    x = [torch.randn(n, width, generator=random) * 4.0 ** torch.arange(n)[:, None] for n in counts]
    weight = [torch.rand(n, choices, generator=random) for n in counts]
    any_slot = [torch.rand(n, size * SLOTS, generator=random).argsort(1)[:, :choices] for n in counts]
    slot = {"any": lambda s: s, "one rank": lambda s: s % SLOTS + SLOTS * (size - 1),
            "some": lambda s: s.where(s % 2 == 0, -1), "none": lambda s: torch.full_like(s, -1)}[kind]
    x = [quantize(one, "fp8_32", torch.float32).to(dtype) for one in x]
    return x, [slot(one) for one in any_slot], weight


CASES = [([3, 2], 96, 2, "any"), ([0, 1], 80, 3, "any"), ([3, 0, 2], 33, 2, "one rank"),
         ([1, 1], 1088, 2, "any"), ([0, 0], 64, 1, "any"), ([2, 1, 1, 2], 64, 5, "some"),
         ([2, 1], 64, 2, "none")]
FEW = [([2, 1], 33, 2, "some", "fp8_32", False), ([0, 1], 40, 2, "any", None, True)]
ALL = [(*case, fmt, each) for case in CASES for fmt in (None, "fp8_32") for each in (False, True)]


@pytest.mark.parametrize(("counts", "width", "choices", "kind", "fmt", "each"), [
    *FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL)], ids=str)
def test_what_arrives_is_what_travels_by_torch(counts, width, choices, kind, fmt, each, monkeypatch):
    dtype = torch.bfloat16 if fmt else torch.float32
    ranks = windows(len(counts), width, choices, dtype, each)
    cut = kernels._cut(32, 2, 3, 4, turn=1)  # programs with several items, in several turns
    with trial(dict.fromkeys(kernels.CONFIGS, cut)):
        for rows in (max(counts), max(counts) + 1):  # the same windows twice, other places in them
            x, slot, weight = drawn(counts, width, choices, kind, dtype)
            want = by_torch(len(counts), x, slot, weight, fmt, each, monkeypatch)
            if rows > max(counts):  # as in a graph, whose rows are not all live
                x, slot, weight = ([torch.cat((one, one.new_ones(rows - len(one), one.shape[1])))
                                    for one in part] for part in (x, slot, weight))
                for peers, count in zip(ranks, counts, strict=True):
                    peers.live = torch.tensor([count])
            found = by_kernels(ranks, x, slot, weight, fmt, each, rows, monkeypatch)
            found = [(*one[:-1], one[-1][:count]) for one, count in zip(found, counts, strict=True)]
            for one, two in zip(want, found, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_nobody_else_takes_part_in_what_is_captured():
    mine, other = windows(2, 64, 1, torch.bfloat16, False)
    x, slot, weight = drawn([2, 2], 64, 1, "any", torch.bfloat16)
    mine.window.part("slots", torch.int64, 4, 1)[2:] = 99  # of another layer with more slots
    mine.window.live.fill_(2)
    seen = other.window.own.clone(), mine.window.seen.clone()
    with mine.captured():
        rows, _, trip = kernels.dispatch(x[0], slot[0], weight[0], SLOTS, "fp8_32", mine, 2)
        kernels.combine(rows, trip, False, mine)
    assert torch.equal(trip.slot_RJ, torch.cat((slot[0].where(slot[0] < SLOTS, -1), torch.full((2, 1), -1))))
    assert torch.equal(other.window.own, seen[0]) and torch.equal(mine.window.seen, seen[1])
    assert not mine.window.alone and mine.live is None


def test_nobody_waits_for_peers_that_are_gone():
    mine, _ = windows(2, 64, 1, torch.bfloat16, False)
    x, slot, weight = drawn([2, 2], 64, 1, "any", torch.bfloat16)
    mine.window.end()
    rows, _, trip = kernels.dispatch(x[0], slot[0], weight[0], SLOTS, "fp8_32", mine, 2)
    kernels.combine(rows, trip, False, mine)


def dispatched(**changed):
    given = {"x_TD": torch.ones(2, 64, dtype=torch.bfloat16), "slot_TJ": torch.zeros(2, 1).long(),
             "weight_TJ": torch.ones(2, 1), "slots": SLOTS, "fmt": "fp8_32",
             "peers": windows(2, 64, 1, torch.bfloat16, False)[0], "rows": 2} | changed
    with ops.use({"exchange.dispatch": "triton"}):
        return exchange.dispatch(*given.values())


@pytest.mark.parametrize(("changed", "why"), [
    ({"peers": Peers(apart="the group is spread over 2 nodes")}, "spread over 2 nodes"),
    ({"rows": None}, "not agreed"), ({"rows": MOST + 1}, f"has room for {MOST}"),
    ({"fmt": "fp4_32"}, "fp4_32"), ({"x_TD": torch.ones(2, 64, dtype=torch.float64)}, "float64")], ids=str)
def test_what_cannot_be_written_directly_is_refused(changed, why):
    with pytest.raises(ops.Unsupported, match=why):
        dispatched(**changed)


def test_more_rows_than_were_agreed_on_are_refused():
    with pytest.raises(ValueError, match="2 rows, 1 were"):
        dispatched(rows=1)


def test_answers_go_back_the_way_that_rows_came():
    with pytest.raises(ValueError, match="another implementation"):
        exchange.combine.reference(torch.ones(2, 64), kernels.Trip(None, None, 1, 1), False, Peers())
    refused = pytest.raises(ops.Unsupported, match="another implementation")
    with ops.use({"exchange.combine": "triton"}), refused:
        exchange.combine(torch.ones(2, 64), None, False, Peers())


@pytest.mark.gpu
def test_two_gpus_write_what_nccl_brings(capsys):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here, an exchange needs two")
    assert cli.main(["bench", "exchange", "--rows", "1", "33", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["right"] for row in rows if row["way"] == "triton"] == [True, True]
