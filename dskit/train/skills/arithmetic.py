"""Integer arithmetic with its steps: +, - and x of operands of up to three digits.

Idea
    The thinking part does what pupils do on paper, in columns of fixed width, lowest digit first, one small
    fact per step and every carry written out, so that each token follows from few others at fixed distances:

        347+085        347-085         347x85 (347 times 5, then 347 times 8 plus what was carried up)
        7+5+0=12       >               347x5+000
        4+8+1=13       347-085         7x5=35+0=35+0=35
        3+0+1=04       7-5-0=2b0       4x5=20+0=20+3=23
        0432           4-8-0=6b1       3x5=15+0=15+2=17
                       3-0-1=2b0       1735              (the last digit stays, 173 goes into the next row)
                       262             347x8+173 ... 2949, then the line 029495's digits: 2949 and 5

    The answer is the bare number.  With thinking off, sums and differences are answered at once and products
    show their steps in the answer.

Shapes
    `steps(a, op, b)` -> text; the result is its last line without leading zeros (and with its sign).

Errors
    ValueError for an operand outside 0..999 or an operator other than + - x.
"""

from __future__ import annotations

from random import Random

from dskit.train.skills.draw import held

PHRASES = {
    "+": (
        "What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "Compute {a} + {b}.", "What is {a} plus {b}?",
        "Add {a} and {b}.", "How much is {a} + {b}?", "{a} + {b} = ?", "Calculate {a} plus {b}.",
        "what is {a}+{b}?",
    ),
    "-": ("What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "Compute {a} - {b}.", "What is {a} minus {b}?",
          "How much is {a} - {b}?", "{a} - {b} = ?", "Calculate {a} minus {b}.", "what is {a}-{b}?"),
    "x": ("What is {a} x {b}?", "{a} x {b}", "{a}*{b}", "Compute {a} x {b}.", "What is {a} times {b}?",
          "Multiply {a} by {b}.", "How much is {a} x {b}?", "{a} * {b} = ?", "Calculate {a} times {b}.",
          "what is {a}*{b}?", "What is {a} × {b}?"),
}  # fmt: skip


def result(a: int, op: str, b: int) -> int:
    """The value of `a op b`."""
    if not (0 <= a <= 999 and 0 <= b <= 999) or op not in PHRASES:
        raise ValueError(f"{a} {op} {b}: operands must be in 0..999 and the operator one of {list(PHRASES)}")
    return {"+": a + b, "-": a - b, "x": a * b}[op]


def steps(a: int, op: str, b: int) -> str:
    """The written-out computation, ending in the line of result digits."""
    result(a, op, b)
    return {"+": _add, "-": _subtract, "x": _multiply}[op](a, b)


def _digits(value: int, width: int = 3) -> list[int]:
    return [int(c) for c in reversed(f"{value:0{width}d}")]


def _add(a: int, b: int) -> str:
    lines, carry = [f"{a:03d}+{b:03d}"], 0
    for x, y in zip(_digits(a), _digits(b), strict=True):
        total = x + y + carry
        lines.append(f"{x}+{y}+{carry}={total:02d}")
        carry = total // 10
    return "\n".join([*lines, f"{a + b:04d}"])


def _subtract(a: int, b: int) -> str:
    relation = ">" if a > b else "<" if a < b else "="
    big, small, borrow = max(a, b), min(a, b), 0
    lines = [f"{a:03d}-{b:03d}", relation, f"{big:03d}-{small:03d}"]
    for x, y in zip(_digits(big), _digits(small), strict=True):
        digit = x - y - borrow
        lines.append(f"{x}-{y}-{borrow}={digit % 10}b{int(digit < 0)}")
        borrow = int(digit < 0)
    return "\n".join([*lines, f"{'-' if a < b else ''}{big - small:03d}"])


def _multiply(a: int, b: int) -> str:
    lines, above, kept = [f"{a:03d}x{b:03d}"], 0, ""
    for y in _digits(b, len(str(b))):
        lines.append(f"{a:03d}x{y}+{above:03d}")
        carry = 0
        for x, up in zip(_digits(a), _digits(above), strict=True):
            total = x * y + up + carry
            lines.append(f"{x}x{y}={x * y:02d}+{up}={x * y + up:02d}+{carry}={total:02d}")
            carry = total // 10
        row = a * y + above
        lines.append(f"{row:04d}")
        above, kept = row // 10, f"{row % 10}{kept}"
    return "\n".join([*lines, f"{above:03d}{kept}"])


def problem(rng: Random, split: str) -> tuple[int, str, int]:
    """Operands of one to three digits, each length equally likely."""

    def make() -> tuple[int, str, int]:
        op = rng.choice("+-xx")
        sizes = rng.choice((1, 2, 3, 3)), rng.choice((1, 2, 3, 3))
        a, b = (rng.randrange(0 if size == 1 else 10 ** (size - 1), 10**size) for size in sizes)
        return a, op, b

    return held(rng, split, make)


def turn(rng: Random, split: str, thinking: bool) -> tuple[str, str, str, str]:
    """Question, thinking, answer, and the key of the problem."""
    a, op, b = problem(rng, split)
    question = rng.choice(PHRASES[op]).format(a=a, b=b)
    work, value = steps(a, op, b), str(result(a, op, b))
    answer = f"{work}\n{value}" if op == "x" and not thinking else value
    return question, work, answer, f"{a} {op} {b}"


def short_turn(rng: Random, split: str) -> tuple[str, str, str, str]:
    """A sum or difference: its answer is the bare number with thinking and without, as in history."""
    while True:
        made = turn(rng, split, True)
        if " x " not in made[3]:
            return made
