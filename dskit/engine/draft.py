"""One round with a draft: which guesses of the last round hold, and what is guessed next.

Idea: a step's rows of a sequence are its newest token and the guesses behind it, so the model's logits judge
every guess at once. Those that hold and the token after them are the round's; then the draft, which has seen
the taps of these rows, proposes a block for the next one; on a GPU it begins before the host has looked.
Nothing is undone where a guess falls: rows are written by position, and the next step writes those positions
again before anything reads them.

    rejection   a guess x holds with chance min(1, p(x) / q(x)); where one falls, the next token comes from
                max(p - q, 0). The text follows p, and no exact draft could have more accepted.
    block       the same law, but a guess that would fall alone may be carried by those before it: more hold.
    coupled     draft and model draw with one and the same random number; a guess holds while they agree. The
                text is that of the same seed without a draft, token for token.

Randomness: (seed, position, purpose) as everywhere (sampler.uniform); what the draft and the coins draw also
depends on the round, so that a proposal made again is a new one.
Shapes: proposals have G = dspark_block_size tokens; q [slots, G, V] float32 are the logits they came from.
State: q, but for coupled draws, overwritten by each round of its slot.
Errors: none of its own; a row of logits that are not finite ends its request.
Source: dspark.md 3.2, 3.3, 5.3; model.md 3.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from dskit.engine import sampler
from dskit.engine.host import Fetch, send
from dskit.engine.sampler import Drawn
from dskit.engine.seq import Ahead, Chunk, Proposal, Round, Sampled, Sequence
from dskit.layers.dspark import accept, accept_block, likeliest

MODEL, DRAFT, COIN = range(3)  # purposes of a random number
ODD = 0xD1B54A32D192ED03  # keeps the rounds of a seed apart


class Drafter:
    """Judges and proposes for one runner; `rule` is "rejection", "block" or "coupled".

    joint: the draft's experts lie on several ranks, so every step has one round of all, whoever is in it.
    """

    def __init__(self, runner, rule: str, joint: bool = False):
        self.runner, self.coupled, self.joint = runner, rule == "coupled", joint
        self.accept = accept_block if rule == "block" else accept
        self.q: Tensor | None = None

    def rounds(self, chunks: list[Chunk], logits_TV: Tensor) -> list[Round]:
        """The rounds of chunks that sample; rows 1 + drafts of each, in their order."""
        rows = [Ahead(c.seq, list(c.drafts[:j])) for c in chunks for j in range(1 + len(c.drafts))]
        ids = None if self.coupled or len(rows) == len(chunks) else self._judge(chunks, logits_TV, rows)
        drawn = sampler.start(logits_TV, rows, ids) if rows else None
        ahead = self._ahead([c for c in chunks if c.guess], chunks, drawn)
        sampled = iter(drawn.read() if drawn else ())
        found = [Round(_held([next(sampled) for _ in range(1 + len(c.drafts))], c)) for c in chunks]
        live = [(c, r) for c, r in zip(chunks, found, strict=True) if c.guess and _goes_on(c, r)]
        if ahead is None:
            self._propose(live)
        else:
            told = dict(zip((c.seq.slot for c in chunks if c.guess), ahead(), strict=True))
            for chunk, round in live:
                round.proposal = told[chunk.seq.slot]
        return found

    def _ahead(self, guess: list[Chunk], chunks: list[Chunk], drawn: Drawn | None
               ) -> Callable[[], Iterator[Proposal]] | None:
        """Let the draft guess before the host has seen what held; None where it has to see it.

        The function that comes back reads a proposal of each, for those too that this round ends.
        """
        if not (guess and self.runner.asynchronous and _plainly_greedy(c.seq for c in guess)):
            return None
        G, rows, at = self.runner.config.dspark_block_size, [], 0
        for chunk in chunks:
            if chunk.guess:
                slots = (chunk.origin or chunk).seq.slot, chunk.seq.slot
                none = [-1] * (G - len(chunk.drafts))
                rows.append([*slots, chunk.seq.position, at, *chunk.drafts, *none])
            at += 1 + len(chunk.drafts)
        told = send(torch.tensor(rows), drawn.ids_R.device)
        slot, own, position, first = told[:, :4].T
        place = (first[:, None] + torch.arange(G, device=told.device)).clamp_max(at - 1)
        held = (drawn.ids_R[place] == told[:, 4:]).long().cumprod(-1).sum(-1)
        newest = drawn.ids_R[first + held]
        tokens, logits, confidence = self.runner.draft(torch.stack((slot, position + held, newest)))
        if not self.coupled:
            self._q(logits[:, 0])[own] = logits
        fetch = Fetch([tokens, confidence])
        return lambda: (Proposal(*one) for one in zip(*(p.tolist() for p in fetch.wait()), strict=True))

    def _judge(self, chunks: list[Chunk], logits_TV: Tensor, rows: list[Ahead]) -> Tensor:
        """Not coupled: per row the draft where it holds, then the token that follows; what is behind, any."""
        device, G = logits_TV.device, self.runner.config.dspark_block_size
        lengths = torch.tensor([len(c.drafts) for c in chunks])
        first = (lengths + 1).cumsum(0) - lengths - 1
        tokens = torch.tensor([[*c.drafts, *[0] * (G - len(c.drafts))] for c in chunks])
        at = [(c.seq, c.seq.position) for c in chunks]
        u = torch.tensor([[*(_uniform(seq, n - 1, n + j, COIN) for j in range(G)),
                           _uniform(seq, n - 1, n, MODEL)] for seq, n in at], dtype=torch.float64)
        temperature = torch.tensor([c.seq.params.temperature for c in chunks], dtype=torch.float64)
        first, lengths, tokens, u, temperature = (
            send(t, device) for t in (first, lengths, tokens, u, temperature))
        slots = send(torch.tensor([c.seq.slot for c in chunks]), device)
        held, after = self.accept(sampler.allowed(logits_TV, rows), self._q(logits_TV)[slots], tokens, first,
                                  lengths, temperature, u)
        after = after.clamp_max(logits_TV.shape[-1] - 1)  # a row of NaN: some id
        place = torch.arange(G + 1, device=device)
        tokens = torch.nn.functional.pad(tokens, (0, 1))
        ids = torch.where(place < held[:, None], tokens, after[:, None])
        rows = [i * (G + 1) + j for i, c in enumerate(chunks) for j in range(1 + len(c.drafts))]
        return ids.flatten()[send(torch.tensor(rows), device)]

    def _propose(self, live: list[tuple[Chunk, Round]]) -> None:
        """Let the draft guess what follows each round."""
        if not live and not self.joint:
            return
        seqs = [c.seq for c, _ in live]
        rows = [Ahead(c.seq, [one.token_id for one in round.sampled]) for c, round in live]
        starts, newest = [row.position - 1 for row in rows], [row.more[-1] for row in rows]
        edits = any(seq.params.edits_logits for seq in seqs)
        kept: list[Tensor] = []

        def draw(logits_BV: Tensor) -> Tensor:
            if self.coupled:
                picked = sampler.choose(logits_BV, rows)
            else:
                kept.append(sampler.allowed(logits_BV, rows))
                u = [_uniform(row, start, row.position, DRAFT)
                     for row, start in zip(rows, starts, strict=True)]
                picked = sampler.choose_allowed(kept[-1], rows, u)
            told = picked.tolist() if edits else [0] * len(rows)  # else which ones they are does not matter
            for row, token in zip(rows, told, strict=True):
                row.more.append(token)
            return picked

        slots = [(c.origin or c).seq.slot for c, _ in live]  # a fork's own slot is not filled yet
        pick = likeliest if _plainly_greedy(seqs) else draw
        tokens, logits, confidence = self.runner.propose(slots, starts, newest, pick)
        if live and not self.coupled:
            own = send(torch.tensor([seq.slot for seq in seqs]), tokens.device)
            logits = torch.stack(kept, dim=1) if kept else logits
            self._q(logits[:, 0])[own] = logits
        told = (part.tolist() for part in Fetch([tokens, confidence]).wait())
        for (_, round), *proposal in zip(live, *told, strict=True):
            round.proposal = Proposal(*proposal)

    def _q(self, like_TV: Tensor) -> Tensor:
        """Logits of the proposals, made when the first one is: [slots, G, V]."""
        if self.q is None:
            G, slots = self.runner.config.dspark_block_size, self.runner.num_slots + 1
            self.q = like_TV.new_zeros(slots, G, like_TV.shape[-1])
        return self.q


def _plainly_greedy(seqs: Iterable[Sequence]) -> bool:
    """Whether each takes the model's likeliest token as it is."""
    return all(seq.params.greedy and not seq.params.edits_logits for seq in seqs)


def _uniform(seq: Sequence | Ahead, start: int, position: int, purpose: int) -> float:
    """The number of a round, named by where its newest token stands: no two rounds share one."""
    return sampler.uniform(seq.seed + ODD * (start + 1), position, purpose)


def _held(sampled: list[Sampled], chunk: Chunk) -> list[Sampled]:
    """The tokens of a round: as long as they are the guesses, and the one after; none behind the last one."""
    for i, one in enumerate(sampled):
        guess = chunk.drafts[i] if i < len(chunk.drafts) else None
        if one.error or one.token_id != guess or one.token_id in chunk.seq.ends:
            return sampled[: i + 1]
    raise AssertionError("the row behind the last guess has no guess to agree with")


def _goes_on(chunk: Chunk, round: Round) -> bool:
    """False for a sequence that this round ends, as far as its tokens say."""
    seq, last = chunk.seq, round.sampled[-1]
    return not (last.error or last.token_id in seq.ends or seq.position + len(round.sampled) >= seq.limit)
