"""The schedulers of verification: best where the best is known, blind to what they decide on, calibrated."""

import itertools
import math
from random import Random

import pytest

from dskit.engine.spec import (
    MARGIN,
    NEGLIGIBLE,
    Calibration,
    Outlook,
    StepCost,
    allocate,
    calibrate,
    capacity,
    pays,
    rising,
    survivals,
)

SMOOTH = StepCost(tuple(range(1, 40)), tuple(10 + 0.8 * r for r in range(1, 40)))
CLIFF = StepCost((4, 5, 8, 9, 16, 17, 40), (10.0, 11.0, 11.0, 18.0, 18.0, 60.0, 60.0))
DRAFTED = StepCost((1, 40), (10.0, 60.0), (1, 3), (8.0, 12.0))


def theta(live, lengths, cost):
    gained = sum(sum(chain[:l]) for chain, l in zip(live, lengths, strict=True))
    return (len(live) + gained) / cost(len(live) + sum(lengths), len(live))


def chains(rng, R, G):
    return [survivals([rng.gauss(1, 2) for _ in range(G)]) for _ in range(R)]


def early_stop(live, cost):
    """The paper's algorithm 1, the oracle: rows in falling survival until one does not pay."""
    kept, best = 0, theta(live, [0] * len(live), cost)
    for count in range(1, 1 + sum(map(len, live))):
        rate = theta(live, allocate(live, count), cost)
        if rate <= best:
            break
        kept, best = count, rate
    return allocate(live, kept)


@pytest.mark.parametrize("cost", [SMOOTH, CLIFF, DRAFTED])
def test_capacity_is_the_global_optimum_even_over_a_cliff_or_everything_where_that_is_as_good(cost):
    rng, some = Random(1), 0
    for _ in range(60):
        live = chains(rng, rng.randint(1, 3), 3)
        best = max(theta(live, l, cost) for l in itertools.product(range(4), repeat=len(live)))
        count, alive = capacity(live, cost), sum(a > NEGLIGIBLE for chain in live for a in chain)
        if count == alive:
            assert MARGIN * theta(live, allocate(live, count), cost) >= 0.999 * best
            continue
        some += 1
        assert MARGIN * theta(live, allocate(live, alive), cost) < best
        assert theta(live, allocate(live, count), cost) == pytest.approx(best)
        if cost is SMOOTH:
            assert early_stop(live, cost) == allocate(live, count)
    assert 5 < some < 60


def test_drafting_pays_when_some_lengths_beat_a_step_without_a_draft():
    rng, told = Random(4), set()
    for _ in range(100):
        live = chains(rng, rng.randint(1, 3), 3)
        best = max(theta(live, l, DRAFTED) for l in itertools.product(range(4), repeat=len(live)))
        told.add(worth := best > len(live) / DRAFTED(len(live)))
        assert pays(live, DRAFTED) == worth
    assert told == {True, False}


def test_times_that_fall_are_put_right_and_others_left_alone():
    assert rising([3.0, 1.0, 2.0, 5.0]) == (2.0, 2.0, 2.0, 5.0)
    assert rising([1.0, 2.0, 2.0]) == (1.0, 2.0, 2.0) and rising([]) == ()
    rng = Random(5)
    for _ in range(50):
        times = [rng.uniform(1, 9) for _ in range(12)]
        made = rising(times)
        assert list(made) == sorted(made) and sum(made) == pytest.approx(sum(times))
        level = [rng.uniform(1, 9)] * 12  # no other rising times lie nearer: not the flat ones, say
        assert math.dist(made, times) <= math.dist(level, times) + 1e-9


def test_a_cost_between_two_counts_lies_between_theirs():
    cost = StepCost((1, 4, 8), (10.0, 16.0, 24.0), (1, 3), (2.0, 6.0))
    assert [cost(n) for n in (1, 2, 4, 7, 8, 16)] == [10, 12, 16, 22, 24, 48]
    assert [cost(4, n) for n in (0, 1, 2, 3, 6)] == [16, 18, 20, 22, 28]
    assert StepCost((1,), (1.0,))(1, 5) == 1.0  # nothing is known of the draft
    graphs = StepCost((1, 8, 16), (10.0, 17.0, 25.0), (1, 4), (2.0, 5.0), padded=True)
    assert [graphs(n) for n in (1, 3, 4, 5, 8, 9, 16)] == [10, 13, 13, 17, 17, 25, 25]
    assert [graphs(8, n) for n in (0, 1, 3, 4)] == [17, 19, 22, 22]


def test_the_budget_is_spent_and_never_overspent():
    rng = Random(2)
    for count in range(12):
        live = chains(rng, 3, 3)
        assert sum(allocate(live, count)) == min(count, 9)


def test_ties_go_to_the_smaller_k_and_then_to_the_smaller_request():
    live = [[0.5, 0.5], [0.5, 0.5]]
    assert [allocate(live, n) for n in range(5)] == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2]]


def law(lengths_of):
    """P(first token = A) when the draft says A or B evenly and the model A with 0.7 (dspark.md 4.4)."""
    p, q, total = {"A": 0.7, "B": 0.3}, {"A": 0.5, "B": 0.5}, 0.0
    for draft in "AB":
        if lengths_of(draft) == 0:
            total += q[draft] * p["A"]
            continue
        accept = min(1.0, p[draft] / q[draft])
        total += q[draft] * accept * (draft == "A")
        total += q[draft] * (1 - accept) * 1.0  # the residual max(p - q, 0) is A alone
    return total


def test_a_scheduler_that_looks_at_what_it_decides_on_changes_the_law_and_ours_do_not():
    cost = StepCost((1, 2, 3), (1.0, 2.0, 1 / 0.45))
    live = {"A": [[0.8, 0.8 * 0.9]], "B": [[0.8, 0.0]]}
    assert law(lambda d: early_stop(live[d], cost)[0]) == pytest.approx(0.7)
    lagged = capacity([[0.9, 0.8]], cost)
    assert law(lambda d: allocate(live[d], lagged)[0]) == pytest.approx(0.7)
    peeks = law(lambda d: allocate(live[d], capacity(live[d], cost))[0])
    assert peeks == pytest.approx(0.85)


def test_guesses_are_worth_what_became_of_them_and_unjudged_ones_what_they_say():
    said, outlook = [0.9, 0.45, 0.09], Outlook(weight=0)
    rounds = [(0, 0), (1, 0), (1, 1), (3, 1), (3, 3)]
    found = [own for own, _ in outlook.learn([(said, *round) for round in rounds])]
    want = [said, [0, 0, 0], [1, 0.5, 0.1], [1, 0, 0], [1, 1, 1]]
    assert [a for own in found for a in own] == pytest.approx([a for own in want for a in own])
    assert outlook.hopes == pytest.approx([sum(each) / 5 for each in zip(*want, strict=True)])
    assert outlook.expect([[]], 3) == [pytest.approx(outlook.hopes)]
    assert min(outlook.expect([found[4]] * 100, 3)[0]) > 0.9
    for _ in range(60):
        outlook.learn([])
    outlook.learn([(said, 3, 3)])
    assert outlook.hopes == pytest.approx([1, 1, 1], abs=0.01)


@pytest.mark.parametrize("error", [-2, 0, 2])
@pytest.mark.parametrize("requests", [1, 100])
def test_the_bias_becomes_what_confidences_lack(requests, error):
    """Any number of rows may be judged, and any of them behind one that fell: it is not led astray."""
    rng, outlook, told = Random(7), Outlook(), []
    for _ in range(2000 // requests):
        rounds = []
        for _ in range(requests):
            z = [rng.gauss(1, 1) for _ in range(4)]
            u, judged, true = rng.random(), rng.randint(0, 4), survivals(z, bias=error)
            rounds.append((survivals(z, bias=outlook.bias), judged, min(judged, sum(a > u for a in true))))
        outlook.learn(rounds)
        told.append(outlook.bias)
    late = told[len(told) // 2 :]
    assert sum(late) / len(late) == pytest.approx(error, abs=0.2)
    assert max(late) - min(late) < 2


def test_calibration_finds_the_temperature_that_made_the_confidences_too_sure():
    rng, true = Random(3), 2.5
    rounds, accepted = [], []
    for _ in range(4000):
        z = [rng.gauss(1, 3) for _ in range(3)]
        hits = [rng.random() < 1 / (1 + math.exp(-v / true)) for v in z]
        rounds.append(z)
        accepted.append(next((k for k, hit in enumerate(hits) if not hit), 3))
    found = calibrate(rounds, accepted, "synthetic")
    assert found.temperatures[0] == pytest.approx(true, rel=0.3)
    assert all(a <= b for a, b in zip(found.ece_after, found.ece_before, strict=True))
    assert sum(found.ece_after) < 0.5 * sum(found.ece_before)


def test_a_calibration_is_read_back_and_refused_for_another_block(tmp_path):
    made = calibrate([[1.0, 2.0]] * 10, [1] * 10, "one")
    made.save(tmp_path / "sts.json")
    assert Calibration.load(tmp_path / "sts.json", 2) == made
    with pytest.raises(ValueError, match="block has 5"):
        Calibration.load(tmp_path / "sts.json", 5)


def test_what_is_no_number_is_refused():
    with pytest.raises(ValueError, match="not a number"):
        survivals([0.0, math.nan])
    with pytest.raises(ValueError, match="temperatures"):
        survivals([0.0, 1.0], [1.0])
    with pytest.raises(ValueError, match="rising"):
        StepCost((2, 1), (1.0, 1.0))
    with pytest.raises(ValueError, match="above 0"):
        StepCost((1,), (1.0,), (1, 2), (1.0, 0.0))


def test_no_requests_no_lengths():
    for live in [], [[], []]:
        assert capacity(live, SMOOTH) == 0 and allocate(live, 3) == [0] * len(live)
        assert not pays(live, DRAFTED)
