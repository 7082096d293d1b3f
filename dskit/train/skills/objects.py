"""JSON answers: an object with the fields that the question names, values copied from the question.

Idea
    Either the fields are listed (`name "Mira", age 34`) or told in a sentence that the object must summarise.
    The answer is `json.dumps` of the object, in the order of the question.

Shapes
    `turn` -> (question, thinking, answer, key), all text.

Errors
    None.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from dskit.train.skills import draw

FIELDS: dict[str, Callable[[Random, str], Any]] = {
    "name": draw.person,
    "city": draw.city,
    "title": draw.title,
    "owner": draw.person,
    "note": draw.message,
    "code": lambda rng, split: draw.number(rng, split, 4),
    "price": lambda rng, split: draw.number(rng, split, 3),
    "age": lambda rng, split: rng.randrange(1, 99),
    "count": lambda rng, split: draw.number(rng, split, 2),
    "color": lambda rng, split: rng.choice(draw.COLORS),
    "day": lambda rng, split: rng.choice(draw.DAYS),
    "time": lambda rng, split: draw.clock(rng),
    "active": lambda rng, split: rng.random() < 0.5,
    "urgent": lambda rng, split: rng.random() < 0.5,
}
HELD = ("name", "city", "title", "owner", "note", "code")  # at least one of these makes an object new
ASK = (
    "Give me a JSON object with {f}.", "Write JSON with {f}.", "Answer in JSON: {f}.",
    "Return a JSON object: {f}.", "I need JSON with {f}.", "Make a JSON object with {f}.", "As JSON: {f}",
    "JSON with {f}, please.",
)  # fmt: skip
SENTENCES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("{name} is {age} years old and lives in {city}.", ("name", "age", "city")),
    ("{name} lives in {city} and likes {color}.", ("name", "city", "color")),
    ("{owner} sells a {title} for {price}.", ("owner", "title", "price")),
    ("The {title} is on {day} at {time} in {city}.", ("title", "day", "time", "city")),
    ("{name} meets {owner} on {day} at {time}.", ("name", "owner", "day", "time")),
    ("{name} has the code {code}.", ("name", "code")),
    ("{name} ordered {count} of the {title}.", ("name", "count", "title")),
)


def turn(rng: Random, split: str) -> tuple[str, str, str, str]:
    """A question for an object, and the object."""
    if rng.random() < 0.35:
        sentence, keys = rng.choice(SENTENCES)
        value = {key: FIELDS[key](rng, split) for key in keys}
        lead = rng.choice(
            ("Write this as JSON with {k}: ", "Extract {k} as JSON: ", "Turn this into JSON with {k}: ")
        )
        question = lead.format(k=_join(list(keys))) + sentence.format(**value)
    else:
        first = rng.choice(HELD)
        keys = [first, *rng.sample([key for key in FIELDS if key != first], rng.randrange(1, 4))]
        if split == "train" and rng.random() < 0.6:
            keys.append("item")  # so that every noun is copied to where no space precedes it
        rng.shuffle(keys)
        value = {key: draw.any_noun(rng) if key == "item" else FIELDS[key](rng, split) for key in keys}
        quoted = rng.random() < 0.5
        question = rng.choice(ASK).format(f=_join([f"{key} {_show(value[key], quoted)}" for key in keys]))
    return question, "Fields: " + ", ".join(value), json.dumps(value), json.dumps(value, sort_keys=True)


def _show(value: Any, quoted: bool) -> str:
    return json.dumps(value) if quoted or isinstance(value, bool) else str(value)


def _join(parts: list[str]) -> str:
    return ", ".join(parts[:-1]) + " and " + parts[-1]
