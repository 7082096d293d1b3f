"""Verification is lossless: whatever the draft, the text follows the full model, by reference and kernel."""

from __future__ import annotations

import pytest
import torch

from dskit import ops
from dskit.layers.dspark import accept, accept_block

V, M = 4, 2  # vocabulary and drafts of a toy: 64 possible continuations of three tokens
LIMIT = 112.3  # chi-square of 64 cells (63 degrees of freedom) at the 0.01 % level
FIRST_LIMIT = 21.1  # and of 4 cells


class Toy:
    """Tables p and q of the next token after every prefix, and the law of three tokens under p."""

    def __init__(self, seed: int, kind: str, temperature: float = 1.0):
        generator = torch.Generator().manual_seed(seed)

        def table(length: int) -> torch.Tensor:
            return torch.randn([V] * (length + 1), generator=generator) * 1.5

        self.temperature = temperature
        self.p = [table(length) for length in range(M + 1)]
        self.q = [p.clone() if kind == "equal" else table(length) for length, p in enumerate(self.p[:M])]
        if kind == "holes":  # q cannot draft what is most probable, p forbids what q likes
            for p, q in zip(self.p, self.q, strict=False):
                q.scatter_(-1, p.argmax(-1, keepdim=True), float("-inf"))
                p.scatter_(-1, q.argmax(-1, keepdim=True), float("-inf"))
        if kind == "sure":  # a greedy draft of a request that samples
            self.q = [torch.full_like(q, float("-inf")).scatter(-1, q.argmax(-1, keepdim=True), 0)
                      for q in self.q]
        chances = [(p.double() / temperature).softmax(-1) for p in self.p]
        self.law = (chances[0][:, None, None] * chances[1][:, :, None] * chances[2]).flatten()

    def blocks(self, runs: int, seed: int) -> tuple:
        """Arguments of `accept` for independent runs from the empty prefix, drafts drawn from q."""
        generator = torch.Generator().manual_seed(seed)
        tokens: list[torch.Tensor] = []
        draft = []
        for q in self.q:
            draft.append(q[tuple(tokens)] if tokens else q.expand(runs, V))
            chances = (draft[-1].double() / self.temperature).softmax(-1)
            tokens.append(torch.multinomial(chances, 1, replacement=True, generator=generator)[:, 0])
        target = [self.p[0].expand(runs, V)] + [self.p[n][tuple(tokens[:n])] for n in range(1, M + 1)]
        return (torch.stack(target, 1).flatten(0, 1), torch.stack(draft, 1), torch.stack(tokens, 1),
                torch.arange(runs) * (M + 1), torch.full((runs,), M),
                torch.full((runs,), self.temperature, dtype=torch.float64),
                torch.rand(runs, M + 1, generator=generator, dtype=torch.float64))

    def finish(self, token_BM: torch.Tensor, accepted_B: torch.Tensor, next_B: torch.Tensor, seed: int):
        """Three tokens per run: accepted drafts, the next one, and draws from p for what is still missing."""
        generator = torch.Generator().manual_seed(seed)
        text = []
        for n in range(M + 1):
            row = self.p[n][tuple(text)] if text else self.p[n].expand(len(next_B), V)
            chances = (row.double() / self.temperature).softmax(-1)
            own = torch.multinomial(chances, 1, replacement=True, generator=generator)[:, 0]
            drafted = token_BM[:, n] if n < M else own
            text.append(torch.where(n < accepted_B, drafted, torch.where(n == accepted_B, next_B, own)))
        return (text[0] * V + text[1]) * V + text[2]


def distance(codes: torch.Tensor, law: torch.Tensor) -> float:
    """Chi-square of counts against a law; cells that expect fewer than 5 are merged into one."""
    expected = law * len(codes)
    counts = codes.bincount(minlength=len(law)).double()
    assert not counts[law == 0].any()
    rare = expected < 5
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    return (((counts - expected) ** 2)[expected > 0] / expected[expected > 0]).sum().item()


KINDS = ("random", "equal", "holes", "sure")
RULES = {"rejection": accept.reference, "block": accept_block}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_follows_the_target(kind, rule):
    toy = Toy(1, kind, temperature=0.8)
    args = toy.blocks(20_000, seed=2)
    accepted, following = rule(*args)
    assert distance(toy.finish(args[2], accepted, following, seed=3), toy.law) < LIMIT
    if kind == "equal":
        assert (accepted == M).all()


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_follows_the_target_on_many_tables(kind, seed, rule):
    toy = Toy(seed, kind, temperature=(0.5, 1.0, 1.5)[seed % 3])
    args = toy.blocks(200_000, seed)
    assert distance(toy.finish(args[2], *rule(*args), 100 + seed), toy.law) < LIMIT


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_lengths_may_go_by_what_was_drafted_before(rule):
    """A second draft is verified only behind a first that is even; the law stays, for either rule."""
    toy = Toy(3, "random")
    args = list(toy.blocks(20_000, seed=4))
    args[4] = 1 + (args[2][:, 0] % 2 == 0).long()
    assert distance(toy.finish(args[2], *rule(*args), seed=5), toy.law) < LIMIT


def test_as_a_block_more_drafts_hold():
    for seed in range(4):
        args = Toy(seed, "random").blocks(20_000, seed)
        alone, together = (rule(*args)[0].double().mean() for rule in (accept.reference, accept_block))
        assert together > alone + 0.01


def test_a_wrong_rule_is_noticed():
    """The control: drawing from p instead of what q has left must fail, or the test above shows nothing."""
    toy = Toy(1, "random")
    args = toy.blocks(20_000, seed=2)
    accepted, following = accept.reference(*args)
    p = (args[0].view(-1, M + 1, V)[torch.arange(20_000), accepted].double()).softmax(-1)
    drawn = torch.multinomial(p, 1)[:, 0]
    assert distance(toy.finish(args[2], accepted, drawn, seed=3), toy.law) > 2 * LIMIT


@pytest.fixture
def kernel():
    """The Triton implementation, interpreted where there is no GPU."""
    return ops.find("dspark.accept").implementation("triton").function


def text_of(kernel, toy: Toy, runs: int, seed: int, device) -> torch.Tensor:
    """Codes of the texts that the kernel's choices lead to; but for rounding they are the reference's."""
    args = toy.blocks(runs, seed)
    accepted, following = (x.cpu() for x in kernel(*(a.to(device) for a in args)))
    others = accept.reference(*args)
    assert ((accepted != others[0]) | (following != others[1])).sum() <= runs / 10_000
    return toy.finish(args[2], accepted, following, seed)


def test_the_kernel_follows_the_target(kernel, device):
    """Few runs where they are interpreted, so the first token only."""
    toy, runs = Toy(1, "random"), 24 if device.type == "cpu" else 200_000
    text = text_of(kernel, toy, runs, 4, device)
    assert distance(text // V**2, toy.law.view(V, -1).sum(-1)) < FIRST_LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_follows_the_target_on_more_tables(kernel, kind, device):
    toy, runs = Toy(2, kind, temperature=0.8), 400 if device.type == "cpu" else 200_000
    assert distance(text_of(kernel, toy, runs, 5, device), toy.law) < LIMIT


def test_a_greedy_block_holds_while_it_is_the_targets_choice():
    target = torch.zeros(2 * 4, 5)
    target[[0, 1, 2, 3], [3, 1, 4, 2]] = 1.0
    target[[4, 5, 6, 7], [0, 0, 0, 0]] = 1.0
    token = torch.tensor([[3, 1, 0], [1, 0, 0]])
    args = (target, torch.zeros(2, 3, 5), token, torch.tensor([0, 4]), torch.tensor([3, 3]),
            torch.zeros(2, dtype=torch.float64), torch.rand(2, 4, dtype=torch.float64))
    for rule in (accept, accept_block):
        accepted, following = rule(*args)
        assert accepted.tolist() == [2, 0] and following.tolist() == [4, 0]


def test_of_equal_logits_the_first_is_the_greedy_choice():
    token, length = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, dtype=torch.long)
    accepted, following = accept(torch.zeros(2, 5), torch.zeros(1, 1, 5), token, length - 1, length,
                                 torch.zeros(1, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64))
    assert accepted.tolist() == [1] and following.tolist() == [0]


@pytest.mark.parametrize("rule", [accept, accept_block], ids=RULES)
@pytest.mark.parametrize("length", range(4))
def test_no_more_drafts_are_accepted_than_verified(length, rule):
    """Rows beyond `length` are not read: they may belong to the next request."""
    target = torch.full((6, 7), float("nan"))
    target[1 : 2 + length] = torch.randn(1 + length, 7)
    draft = torch.full((1, 3, 7), float("nan"))
    draft[0, :length] = target[1 : 1 + length]
    u = torch.rand(1, 4, dtype=torch.float64)
    args = (target, draft, torch.randint(7, (1, 3)), torch.tensor([1]), torch.tensor([length]),
            torch.ones(1, dtype=torch.float64), u)
    accepted, following = rule(*args)
    cdf = target[1 + length].double().softmax(-1).cumsum(-1)
    assert accepted.tolist() == [length]
    assert following.tolist() == [int((cdf <= u[0, 3]).sum())]
