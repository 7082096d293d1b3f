"""Sampling against slow references; randomness that depends on seed and position alone."""

import math

import pytest
import torch

from dskit import ops
from dskit.engine.sampler import _filtered, _splitmix64, draw, inverse_cdf, sample, uniform
from dskit.engine.seq import Request, SamplingParams, Sequence

V = 50


def sequence(prompt=(3, 4, 5), new=(), seed=7, **params):
    """A sequence with resolved parameters and some generated tokens."""
    params = SamplingParams(seed=seed, **params).resolve({}, max_tokens=100)
    seq = Sequence(Request("r", list(prompt), params), text=None)
    seq.tokens += new
    return seq


def logits(rows=1, seed=0):
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def test_splitmix64_is_the_published_generator():
    assert _splitmix64(0) == 0xE220A8397B1DCDAF
    assert _splitmix64(1234567) == 6457827717110365317


def test_uniform_depends_on_seed_position_and_purpose():
    draws = {uniform(s, p, q) for s in (0, 1, 2**64 - 1) for p in range(50) for q in range(3)}
    assert len(draws) == 450 and all(0 <= u < 1 for u in draws)


def test_uniform_is_uniform():
    """Kolmogorov's distance over positions of one seed and over seeds of one position, 1 % level."""
    n = 4000
    for draws in ([uniform(9, p) for p in range(n)], [uniform(s, 9) for s in range(n)]):
        distance = max(abs((i + 0.5) / n - u) for i, u in enumerate(sorted(draws)))
        assert distance < 1.63 / math.sqrt(n)


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy_takes_the_largest(temperature):
    rows = logits(4)
    out = sample(rows, [sequence(temperature=temperature) for _ in range(4)])
    assert [one.token_id for one in out] == rows.argmax(-1).tolist()
    assert out[0].logprob is None and out[0].top is None


def test_a_draw_follows_the_distribution():
    """Chi-square of 5,000 draws at temperature 0.7 against the softmax, 0.1 % level."""
    row, n = logits()[:, :8], 5000
    expected = (row[0].double() / 0.7).softmax(-1) * n
    counts = torch.zeros(8)
    seqs = [sequence(seed=s, temperature=0.7) for s in range(n)]
    for one in sample(row.expand(n, -1), seqs):
        counts[one.token_id] += 1
    assert ((counts - expected) ** 2 / expected).sum() < 24.3


def test_draws_do_not_depend_on_the_batch():
    rows = logits(6)
    seqs = [
        sequence(seed=i, new=[1] * i, temperature=1.0, top_p=[1, 0.8][i % 2], top_k=[0, 5][i % 3 == 0])
        for i in range(6)
    ]
    alone = [sample(rows[i : i + 1], seqs[i : i + 1])[0].token_id for i in range(6)]
    order = [4, 2, 0, 5, 1, 3]
    together = sample(rows[order], [seqs[i] for i in order])
    assert [one.token_id for one in together] == [alone[i] for i in order]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1, 1, 0),
        (5, 1, 0),
        (0, 0.5, 0),
        (0, 1e-9, 0),
        (0, 1, 0.2),
        (7, 0.9, 0.05),
        (V + 9, 0.999, 0.001),
        (3, 0.3, 1),
    ],
)
def test_filters_against_a_slow_reference(top_k, top_p, min_p):
    """Only tokens that a plain loop keeps have probability, and it is theirs up to scale."""
    probs = logits(3, seed=top_k).double().softmax(-1)
    column = lambda x: torch.full((3,), x, dtype=torch.float64)  # noqa: E731
    got = _filtered(probs, column(top_k), column(top_p), column(min_p))
    for row, kept in zip(probs.tolist(), got, strict=True):
        want = filtered(row, top_k, top_p, min_p)
        assert (kept > 0).tolist() == [p > 0 for p in want]
        torch.testing.assert_close(kept / kept.sum(), torch.tensor(want, dtype=torch.float64) / sum(want))


def filtered(row, top_k, top_p, min_p):
    """top-k, then top-p of what is left, then min-p of the largest; the first token always stays."""
    order = sorted(range(len(row)), key=lambda i: -row[i])[: top_k or None]
    total, before, keep = sum(row[i] for i in order), 0.0, []
    for i in order:
        share = row[i] / total
        if i == order[0] or (before < top_p and share >= min_p * row[order[0]] / total):
            keep.append(i)
        before += share
    return [p if i in keep else 0.0 for i, p in enumerate(row)]


def test_inverse_cdf_never_picks_probability_zero():
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]], dtype=torch.float64)
    for u in (0.0, 0.3 - 1e-12, 0.3, 0.999999, 1 - 2**-53):
        assert inverse_cdf(probs, torch.tensor([[u]], dtype=torch.float64)).item() == (1 if u < 0.3 else 3)
    subnormal = torch.tensor([[1.0, 1e-300, 0.0]], dtype=torch.float64)
    assert inverse_cdf(subnormal, torch.tensor([[1 - 2**-53]], dtype=torch.float64)).item() == 0


def columns(n, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, device="cpu"):
    """The parameters of `draw` for n rows, and a u from the middle of each n-th part of [0, 1)."""
    values = (temperature, top_p, min_p)
    temperature, top_p, min_p = (torch.full((n,), v, dtype=torch.float64, device=device) for v in values)
    u = (torch.arange(n, dtype=torch.float64, device=device) + 0.5) / n
    return temperature, torch.full((n,), top_k, device=device), top_p, min_p, u


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_each_token_has_its_share_of_the_unit_interval(implementation, device):
    """Evenly spread u give every kept token the count that its probability says, within one at each end."""
    interpreted = implementation == "triton" and device.type == "cpu"
    n = 8 if interpreted else 5000
    row = logits()[:, :20]
    want = torch.tensor(filtered((row[0].double() / 1.3).softmax(-1).tolist(), 6, 0.9, 0.02))
    run = ops.find("sampler.draw").implementation(implementation).function
    rows = row.expand(n, -1).contiguous().to(device)
    ids = run(rows, *columns(n, 1.3, 6, 0.9, 0.02, device=device)).cpu()
    assert (ids.diff() >= 0).all()
    counts = ids.bincount(minlength=20)
    assert not counts[want == 0].any()
    assert ((counts - n * want / want.sum()).abs() <= 1).all()


def test_greedy_rows_and_forbidden_tokens_of_a_batch():
    rows = logits(3)
    rows[:, 10:] = -math.inf
    rows[2, 3] = rows[2, 7] = rows[2].max() + 1
    temperature, *rest = columns(3, top_k=40, top_p=0.99)
    temperature[1:] = 0
    ids = draw(rows, temperature, *rest)
    assert ids[0] < 10 and ids[1] == rows[1].argmax() and ids[2] == 3


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_a_row_without_a_distribution_gives_an_id_that_exists(implementation, value, device):
    rows = torch.full((1, 70), value, device=device)
    ids = ops.find("sampler.draw").implementation(implementation).function(
        rows, *columns(1, top_k=3, top_p=0.9, device=device)
    )
    assert 0 <= ids.item() < 70


def test_the_engine_may_draw_by_the_kernel(device):
    """The same requests, penalties among them, under either implementation."""
    rows = logits(3)
    seqs = [sequence(seed=5, temperature=0.8, top_p=0.9), sequence(temperature=0.0, logit_bias={7: 50}),
            sequence(seed=6, new=[8, 9, 9], temperature=1.0, top_k=4, frequency_penalty=0.7)]
    want = [one.token_id for one in sample(rows, seqs)]
    with ops.use({"sampler.draw": "triton"}):
        assert [one.token_id for one in sample(rows.to(device), seqs)] == want


def test_penalties_and_bias_in_order():
    """Bias first, then repetition over prompt and output, then presence and frequency over the output."""
    row = logits()
    seq = sequence(
        prompt=[3, 4],
        new=[5, 5, 6],
        temperature=0.0,
        logit_bias={3: 4.0, 9: -1.5},
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    want = row[0].double().clone()
    want[3] += 4.0
    want[9] -= 1.5
    for i in (3, 4, 5, 6):
        want[i] = want[i] / 1.3 if want[i] > 0 else want[i] * 1.3
    want[5] -= 0.5 + 2 * 0.25
    want[6] -= 0.5 + 0.25
    edited = row.double().clone()
    from dskit.engine.sampler import _edit

    _edit(edited[0], seq)
    torch.testing.assert_close(edited[0], want)
    assert sample(row, [seq])[0].token_id == want.argmax().item()


def test_bias_can_force_and_forbid():
    row = logits()
    assert sample(row, [sequence(temperature=1.0, logit_bias={11: 100})])[0].token_id == 11
    best = row.argmax().item()
    assert sample(row, [sequence(temperature=0.0, logit_bias={best: -100})])[0].token_id != best


def test_logprobs_are_of_the_model_itself():
    row = logits()
    want = row[0].double().log_softmax(-1)
    one = sample(row, [sequence(temperature=0.5, top_k=2, logit_bias={20: 100}, logprobs=3)])[0]
    assert one.token_id == 20
    assert one.logprob == pytest.approx(want[20].item())
    assert [i for i, _ in one.top] == want.argsort(descending=True)[:3].tolist()
    assert [p for _, p in one.top] == pytest.approx(want.sort(descending=True).values[:3].tolist())
    assert sample(row, [sequence(temperature=0.0, logprobs=0)])[0].top == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_ends_only_its_own_sequence(value, temperature):
    rows = logits(3)
    rows[1, 17] = value
    out = sample(rows, [sequence(temperature=temperature, logprobs=1) for _ in range(3)])
    assert "not finite" in out[1].error and out[1].token_id is None
    clean = sample(rows[[0, 2]], [sequence(temperature=temperature, logprobs=1) for _ in range(2)])
    assert [out[0], out[2]] == clean
