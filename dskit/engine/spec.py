"""How many drafted tokens each request has verified, and whether drafting pays: survival, cost, schedule.

Idea: a draft comes with confidences, the chance that each guess is accepted if those before it were. Their
running product is the chance that the token survives. All choices are for the most tokens in a millisecond:

    Theta(l) = (R + sum of the survivals of all admitted rows) / (T(R + sum l) + Tdraft(R))

How many rows to verify is about the guesses at hand, whose survivals are known. Whether to guess again is
about guesses that nobody has seen, so it goes by what they have been worth lately (`Outlook`). To verify all
of them, and none, are among the choices, so the best is never expected to be slower than either. What became
of guesses corrects the confidences of those to come. Around its best Theta is flat, which forgives tables and
confidences that are a little wrong; only what a cut costs by itself, since requests that add unequally many
rows take longer together, has to be gained first (MARGIN). Where to verify all is best by far (`plainly_all`)
the scheduler spends no time on the question for some steps.

A request's rows are admitted from the front, since survivals never rise. What decides must not look at the
token that it decides on, or the output's law changes: `capacity` looks globally, but only at rounds that are
over, and `allocate` spends it on the live round, where a row's rank depends on what came before it alone.
(Where the text does not depend on lengths at all, in coupled acceptance, `capacity` may look at the live
round.)

Shapes: survivals [R][G], one list per request, empty without a draft; lengths l [R] with 0 <= l <= G.
Units: step times in milliseconds; survivals are probabilities; a bias is added to the logits of confidences.
State: an Outlook per scheduler; what it says of a request is kept by that request.
Errors: ValueError for confidences that are no numbers, temperatures of another block size, or an empty cost.
Source: dspark.md 4; DSpark paper, sections 3.2.1, 3.2.2 and 5.2. The bias is that of a logistic regression,
which takes a damped Newton step every round.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise, repeat
from operator import mul, truediv
from pathlib import Path

import platformdirs

NEGLIGIBLE = 1e-6
MARGIN = 1.01  # how much more a choice has to promise than verifying every guess
LONG = 8  # rounds that are remembered, and requests that know as much
OPTIMISM = 1 / 4  # as many rounds in which every guess held are thought to have been before the first
OWN, ALL = 2, 10  # how slowly the bias of a request's confidences, and of everybody's, follow what became
GRID = tuple(10 ** (-1 + 2 * i / 40) for i in range(41))  # temperatures that calibration tries
BINS = 15
CALIBRATION = "dspark_calibration.json"  # beside a checkpoint


def cost_file(model: str, device: str) -> Path:
    """Where this machine keeps what steps of a model cost on one of its devices."""
    words = re.sub(r"[^A-Za-z0-9.]+", "-", f"{model} {device}").strip("-")
    return platformdirs.user_cache_path("dskit") / "step-cost" / f"{words}.json"


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of a decode step: the model's by its rows, and the draft's by the requests it guesses for.

    Measured at some counts, in proportion between two of them and beyond the last. Without draft times the
    others hold the draft's. padded: steps are CUDA graphs, and take what the next larger one takes.
    """

    rows: tuple[int, ...]
    time_ms: tuple[float, ...]
    requests: tuple[int, ...] = ()
    draft_ms: tuple[float, ...] = ()
    padded: bool = False

    def __post_init__(self) -> None:
        draft = not self.requests or _is_curve(self.requests, self.draft_ms)
        if not (_is_curve(self.rows, self.time_ms) and draft):
            raise ValueError("a step cost needs rising counts, each with a time above 0; measure it with "
                             "`dskit bench spec --save`")

    @classmethod
    def fit(cls, model: dict[int, float], draft: dict[int, float], padded: bool = False) -> StepCost:
        """A cost from times by count, made to rise: no step is shorter for having more to do."""
        return cls(tuple(model), rising(list(model.values())), tuple(draft), rising(list(draft.values())),
                   padded)

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> StepCost:
        """Read it back."""
        found = json.loads(Path(path).read_text())
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in found.items()})

    def __call__(self, rows: int, drafted: int = 0) -> float:
        """Of a step of so many rows, after which so many requests are drafted for."""
        if self.padded:
            rows, drafted = padded(rows), drafted and padded(drafted)
        draft = _between(self.requests, self.draft_ms, drafted) if drafted and self.requests else 0.0
        return _between(self.rows, self.time_ms, rows) + draft


def padded(rows: int) -> int:
    """The rows of the CUDA graph that repeats a step of so many."""
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8


def _is_curve(counts: Sequence[int], times: Sequence[float]) -> bool:
    up = all(a < b for a, b in zip(counts, counts[1:], strict=False))
    return bool(counts) and len(counts) == len(times) and up and counts[0] > 0 and min(times) > 0


def _between(counts: Sequence[int], times: Sequence[float], count: int) -> float:
    at = bisect_left(counts, count)
    if at == len(counts):
        return times[-1] * count / counts[-1]
    if at == 0 or counts[at] == count:
        return times[at]
    share = (count - counts[at - 1]) / (counts[at] - counts[at - 1])
    return times[at - 1] + share * (times[at] - times[at - 1])


def rising(times: Sequence[float]) -> tuple[float, ...]:
    """The nearest times that never fall (least squares): neighbours that do are both given their mean."""
    runs: list[tuple[float, int]] = []  # (mean, how many)
    for time in times:
        runs.append((time, 1))
        while len(runs) > 1 and runs[-2][0] > runs[-1][0]:
            (a, n), (b, m) = runs[-2:]
            runs[-2:] = [((a * n + b * m) / (n + m), n + m)]
    return tuple(mean for mean, n in runs for _ in range(n))


def survivals(confidence_logits: Sequence[float], temperatures: Sequence[float] | None = None,
              bias: float = 0.0) -> list[float]:
    """Running product of sigmoid(z_k / T_k + bias); raises ValueError for a logit that is no number."""
    if temperatures is not None and len(temperatures) < len(confidence_logits):
        raise ValueError(f"{len(temperatures)} temperatures for a block of {len(confidence_logits)}; "
                         "calibrate with the block size that is served")
    alive, out = 1.0, []
    for z, T in zip(confidence_logits, temperatures or repeat(1.0)):  # noqa: B905  there may be more of the latter
        alive *= 0.5 + 0.5 * math.tanh(0.5 * (z / T + bias))  # the sigmoid, without overflow
        out.append(alive)
    if math.isnan(alive):
        k = next(k for k, a in enumerate(out, 1) if math.isnan(a))
        raise ValueError(f"confidence {k} of a draft is not a number; check the draft's weights")
    return out


def _sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z)) if z >= 0 else math.exp(z) / (1 + math.exp(z))


def _ranked(live: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """Every (survival, request, k) worth a thought, best first; ties: smaller k, then smaller request."""
    rows = [(a, i, k) for i, chain in enumerate(live) for k, a in enumerate(chain, 1) if a > NEGLIGIBLE]
    return sorted(rows, key=lambda row: (-row[0], row[2], row[1]))


@lru_cache(maxsize=1024)
def _times(cost: StepCost, requests: int, drafts: int) -> tuple[float, ...]:
    """Of a round of so many requests with 0, 1, ... drafted rows."""
    return tuple(cost(requests + rows, requests) for rows in range(1 + drafts))


def _rates(hopes: Sequence[Sequence[float]], cost: StepCost) -> list[float]:
    """Tokens per millisecond that these survivals promise, with 0, 1, ... of the likeliest verified."""
    R, alive = len(hopes), sorted((a for chain in hopes for a in chain if a > NEGLIGIBLE), reverse=True)
    return list(map(truediv, accumulate([R, *alive]), _times(cost, R, sum(map(len, hopes)))))


def capacity(hopes: Sequence[Sequence[float]], cost: StepCost) -> int:
    """How many drafted rows the coming step should hold, from the survivals of rounds that are over."""
    rates = _rates(hopes, cost)
    best = max(rates)
    return len(rates) - 1 if MARGIN * rates[-1] >= best else rates.index(best)


def pays(hopes: Sequence[Sequence[float]], cost: StepCost) -> bool:
    """Whether a draft for these requests promises more tokens a second than a step without one."""
    return max(_rates(hopes, cost)) > len(hopes) / cost(len(hopes))


def plainly_all(hopes: Sequence[Sequence[float]], cost: StepCost) -> bool:
    """Whether the least likely guess would be worth a row's mean time with half its chance."""
    R, alive = len(hopes), [a for chain in hopes for a in chain]
    tokens, (least, *_, most) = R + sum(alive), _times(cost, R, max(1, len(alive)))
    return bool(alive) and min(alive) / 2 * len(alive) / tokens >= (most - least) / most


def allocate(live: Sequence[Sequence[float]], count: int) -> list[int]:
    """Spend `count` rows on the likeliest survivors: lengths whose sum is at most `count`."""
    lengths = [len(chain) if chain and chain[-1] > NEGLIGIBLE else sum(a > NEGLIGIBLE for a in chain)
               for chain in live]
    if sum(lengths) <= count:
        return lengths
    lengths = [0] * len(live)
    for _, request, k in _ranked(live)[:count]:
        lengths[request] = k
    return lengths


@dataclass
class Outlook:
    """What is expected of guesses that are not made yet, from what became of those before.

    hopes: mean survivals by position, of `weight` rounds (empty: nothing was guessed yet); bias: what is
    added to everybody's confidences.
    """

    hopes: list[float] = field(default_factory=list)
    weight: float = OPTIMISM
    bias: float = 0.0

    def learn(self, rounds: Iterable[tuple[Sequence[float], int, int]]) -> list[tuple[list[float], float]]:
        """Count in what became of a step's guesses, given as (survivals, judged, held) of each request: what
        survived in fact, and what the bias of its own confidences gains.

        Biases follow how many more held than promised, among those that were judged and stood behind guesses
        that held. What nobody judged is believed.
        """
        told, surprises, doubts = [], 0.0, 0.0
        self.weight *= 1 - 1 / LONG
        for alive, judged, held in rounds:
            chances = [b / a if a else 0.0 for a, b in pairwise([1.0, *alive])]
            seen = chances[: min(held + 1, judged)]
            surprise, doubt = held - sum(seen), sum(c - c * c for c in seen)
            surprises, doubts = surprises + surprise, doubts + doubt
            if held < judged:
                chances[held] = 0.0
            found = [1.0] * held + list(accumulate(chances[held:], mul))
            told.append((found, surprise / (OWN + doubt)))
            hopes, w = self.hopes or [1.0] * len(found), self.weight
            self.hopes = [(w * h + f) / (w + 1) for h, f in zip(hopes, found, strict=True)]
            self.weight = w + 1
        self.bias += surprises / (ALL + doubts)
        return told

    def expect(self, last: Sequence[Sequence[float]], G: int) -> list[list[float]]:
        """Survivals of the next G guesses, from what survived last of each request's (empty: none were made).

        What many requests say of a round is a guide, what a few say an accident.
        """
        hopes, share = self.hopes or [1.0] * G, len(last) / (len(last) + LONG)
        return [[share * a + (1 - share) * h for a, h in zip(own or hopes, hopes, strict=True)]
                for own in last]


# ---- calibration -------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Calibration:
    """Temperatures of the confidences by position, and how well they told the truth before and after."""

    temperatures: tuple[float, ...]
    dataset: str
    num_samples: int
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path, block_size: int) -> Calibration:
        """Read it back; raises ValueError when it was fitted for another block size."""
        found = json.loads(Path(path).read_text())
        if len(found["temperatures"]) != block_size:
            raise ValueError(f"{path} holds {len(found['temperatures'])} temperatures, the block has "
                             f"{block_size}; fit it again with `dskit bench spec`")
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in found.items()})


def ece(chances: Sequence[float], happened: Sequence[bool]) -> float:
    """Expected calibration error: how far mean chance and share lie apart, over bins of equal width."""
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for chance, hit in zip(chances, happened, strict=True):
        bins[min(int(chance * BINS), BINS - 1)].append((chance, hit))
    gaps = (abs(sum(c for c, _ in b) - sum(h for _, h in b)) for b in bins if b)
    return sum(gaps) / max(1, len(chances))


def calibrate(logits: Sequence[Sequence[float]], accepted: Sequence[int], dataset: str) -> Calibration:
    """Sequential temperature scaling of rounds [n][G] with how many drafts each had accepted.

    Position by position, the temperature whose running product fits best what survived; those before it are
    frozen by then. Scaling is monotone: it never reorders the tokens of a position.
    """
    if not logits:
        raise ValueError("no rounds to calibrate on")
    G, alive, raw = len(logits[0]), [1.0] * len(logits), [1.0] * len(logits)
    temperatures, before, after = [], [], []
    for k in range(G):
        survived = [a > k for a in accepted]
        raw = [p * _sigmoid(z[k]) for p, z in zip(raw, logits, strict=True)]
        before.append(ece(raw, survived))
        tried = {t: [p * _sigmoid(z[k] / t) for p, z in zip(alive, logits, strict=True)]
                 for t in (1.0, *GRID)}
        error = {t: ece(chances, survived) for t, chances in tried.items()}
        best = min(error, key=error.get)
        alive = tried[best]
        temperatures.append(best)
        after.append(error[best])
    return Calibration(tuple(temperatures), dataset, len(logits), tuple(before), tuple(after))
