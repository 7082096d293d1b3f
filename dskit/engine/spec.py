"""How many drafted tokens each request has verified: survival, step cost, and two schedulers.

Idea: a draft comes with confidences, the chance that each guess is accepted if those before it were. Their
running product is the chance that the token survives. Verifying one more row pays when the tokens that it is
expected to add outweigh the longer step:

    Theta(l) = (R + sum of the survivals of all admitted rows) / T(R + sum l)

A request's rows are admitted from the front, since survivals never rise. What decides must not look at the
token that it decides on, or the output's law changes: `early_stop` visits rows in falling survival and stops
at the first that does not pay; `capacity` looks globally, but only at the round before, and `allocate`
spends it on the live round.

Shapes: survivals [R][G], one list per request; lengths l [R] with 0 <= l <= G.
Units: step times in milliseconds; survivals are probabilities.
Errors: ValueError for confidences that are no numbers, temperatures of another block size, or an empty cost.
Source: dspark.md 4; DSpark paper, sections 3.2.1, 3.2.2 and 5.2, algorithm 1.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs

NEGLIGIBLE = 1e-6
GRID = tuple(10 ** (-1 + 2 * i / 40) for i in range(41))  # temperatures that calibration tries
BINS = 15
CALIBRATION = "dspark_calibration.json"  # beside a checkpoint


def cost_file(model: str, device: str) -> Path:
    """Where this machine keeps what steps of a model cost on one of its devices."""
    words = re.sub(r"[^A-Za-z0-9.]+", "-", f"{model} {device}").strip("-")
    return platformdirs.user_cache_path("dskit") / "step-cost" / f"{words}.json"


@dataclass(frozen=True)
class StepCost:
    """Time of a step by its rows: measured at some row counts; a batch pays for the next measured one."""

    rows: tuple[int, ...]
    time_ms: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.rows, self.rows[1:], strict=False))
        if not self.rows or len(self.rows) != len(self.time_ms) or not rising or min(self.time_ms) <= 0:
            raise ValueError("a step cost needs rising row counts, each with a time above 0; measure it with "
                             "`dskit bench spec --save`")

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> StepCost:
        """Read it back."""
        return cls(**{k: tuple(v) for k, v in json.loads(Path(path).read_text()).items()})

    def __call__(self, rows: int) -> float:
        """Milliseconds of a step of so many rows; beyond the table it goes on in proportion."""
        at = bisect_left(self.rows, rows)
        if at < len(self.rows):
            return self.time_ms[at]
        return self.time_ms[-1] * rows / self.rows[-1]


def survivals(confidence_logits: Sequence[float], temperatures: Sequence[float] | None = None) -> list[float]:
    """Running product of sigmoid(z_k / T_k); raises ValueError for a logit that is no number."""
    if temperatures is not None and len(temperatures) < len(confidence_logits):
        raise ValueError(f"{len(temperatures)} temperatures for a block of {len(confidence_logits)}; "
                         "calibrate with the block size that is served")
    alive, out = 1.0, []
    for k, z in enumerate(confidence_logits):
        if math.isnan(z):
            raise ValueError(f"confidence {k + 1} of a draft is not a number; check the draft's weights")
        alive *= _sigmoid(z / (temperatures[k] if temperatures else 1.0))
        out.append(alive)
    return out


def _sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z)) if z >= 0 else math.exp(z) / (1 + math.exp(z))


def _ranked(live: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """Every (survival, request, k) worth a thought, best first; ties: smaller k, then smaller request."""
    rows = [(a, i, k) for i, chain in enumerate(live) for k, a in enumerate(chain, 1) if a > NEGLIGIBLE]
    return sorted(rows, key=lambda row: (-row[0], row[2], row[1]))


def early_stop(live: Sequence[Sequence[float]], cost: StepCost) -> list[int]:
    """Lengths by algorithm 1: the break keeps the decision on a row blind to everything after it."""
    R = len(live)
    lengths, kept = [0] * R, [0] * R
    total, rows = float(R), R
    best = total / cost(rows) if R else 0.0
    for survival, request, k in _ranked(live):
        lengths[request], rows, total = k, rows + 1, total + survival
        if total / cost(rows) <= best:
            break
        best, kept = total / cost(rows), list(lengths)
    return kept


def capacity(before: Sequence[Sequence[float]], cost: StepCost) -> int:
    """How many drafted rows the coming step should hold, from the survivals of a round that is over."""
    R = len(before)
    total, best, count = float(R), float(R) / cost(R) if R else 0.0, 0
    for j, (survival, _, _) in enumerate(_ranked(before), 1):
        total += survival
        if total / cost(R + j) > best:
            best, count = total / cost(R + j), j
    return count


def allocate(live: Sequence[Sequence[float]], count: int) -> list[int]:
    """Spend `count` rows on the likeliest survivors: lengths whose sum is at most `count`."""
    lengths = [0] * len(live)
    for _, request, k in _ranked(live)[:count]:
        lengths[request] = k
    return lengths


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
