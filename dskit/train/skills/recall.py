"""Recall: facts told early in a long conversation, asked for later.

Idea
    The user tells facts ("The code of Mira is 4821."), talks about other things, tells more facts, asks for
    some of them on the way, and at the end asks for one.  Thinking and answer repeat the question's words
    before the value, so the value follows what it followed when it was told.

Shapes
    `conversation` -> (messages, thinking, answer, key): messages end with the user's last question.  `tokens`
    is the length aimed at, of the demo's tokenizer, good to about a tenth.

Errors
    None.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from dskit.train.skills import draw, talk

CHARACTERS_PER_TOKEN, TOKENS_PER_TURN = 3.9, 5
NUMBERS = {"code": 4, "locker": 3, "room": 3, "badge": 5, "seat": 2, "number": 6}
THINGS = {
    "color": draw.COLORS,
    "pet": draw.PETS,
    "drink": draw.DRINKS,
    "job": draw.JOBS,
    "hobby": draw.HOBBIES,
    "day": draw.DAYS,
}
TOLD = ("The {a} of {n} is {v}.", "{n}'s {a} is {v}.", "Remember: the {a} of {n} is {v}.",
        "Please remember that the {a} of {n} is {v}.", "Remember that {n}'s {a} is {v}.")  # fmt: skip
ASKED = (
    "What is the {a} of {n}?", "What is {n}'s {a}?", "What was the {a} of {n}?", "Tell me the {a} of {n}.",
    "Do you remember the {a} of {n}?", "what is the {a} of {n}?",
)  # fmt: skip
MY_TOLD, MY_ASKED = (
    ("My {a} is {v}.", "Remember: my {a} is {v}."),
    ("What is my {a}?", "Do you remember my {a}?", "what is my {a}?"),
)
NOTED, UNTOLD_UP_TO = "Noted.", 500


class Fact(NamedTuple):
    """One thing to remember; `name` is empty for facts about the user."""

    attribute: str
    name: str
    value: str

    def told(self, rng: Random) -> str:
        """A sentence that tells it."""
        return rng.choice(TOLD if self.name else MY_TOLD).format(a=self.attribute, n=self.name, v=self.value)

    def asked(self, rng: Random) -> str:
        """A question for it."""
        return rng.choice(ASKED if self.name else MY_ASKED).format(a=self.attribute, n=self.name)

    @property
    def subject(self) -> str:
        """What it is about, as the answer says it."""
        return f"the {self.attribute} of {self.name}" if self.name else f"your {self.attribute}"

    @property
    def answer(self) -> str:
        """The sentence that answers the question."""
        return f"{self.subject[0].upper()}{self.subject[1:]} is {self.value}."

    @property
    def untold(self) -> str:
        """The sentence that answers the question where nobody told it."""
        return f"You did not tell me {self.subject}."


def fact(rng: Random, split: str, known: list[Fact]) -> Fact:
    """A new fact, half of them numbers, some about people or attributes that occurred before."""
    while True:
        names = [f.name for f in known if f.name]
        name = rng.choice(names) if names and rng.random() < 0.25 else draw.person(rng, split)
        kind = rng.random()
        if kind < 0.55:
            attribute = rng.choice(list(NUMBERS))
            value = str(draw.number(rng, split, NUMBERS[attribute]))
        elif kind < 0.7:
            attribute, value = "city", draw.city(rng, split)
        else:
            attribute = rng.choice(list(THINGS))
            value = rng.choice(THINGS[attribute])
        if rng.random() < 0.12 and attribute not in THINGS:
            name, attribute, value = (
                ("", attribute, value) if rng.random() < 0.6 else ("", "name", draw.person(rng, split))
            )
        if all((f.attribute, f.name) != (attribute, name) for f in known):
            return Fact(attribute, name, value)


def aside(rng: Random, split: str) -> tuple[str, str]:
    """A turn about something else: question and answer."""
    kind = rng.random()
    if kind < 0.45:
        lines = [f"The {draw.noun(rng)} is {draw.adjective(rng)}." for _ in range(rng.randrange(1, 6))]
        lines += [draw.message(rng, split).capitalize() + "." for _ in range(rng.randrange(0, 3))]
        rng.shuffle(lines)
        return rng.choice(("Note: ", "A note: ", "")) + " ".join(lines), NOTED
    question, _, answer, _ = (talk.define if kind < 0.85 else talk.greet)(rng, split)
    return question, answer


def conversation(
    rng: Random, split: str, tokens: int, far: bool, told: bool
) -> tuple[list[dict], str, str, str]:
    """A conversation of about `tokens` tokens.

    With `far`, the last question asks for a fact of the first turn.  Unless `told`, short conversations
    sometimes end in a question for something that nobody told.
    """
    facts: list[Fact] = []
    messages: list[dict] = []
    size, early, limit = 30.0, 0, rng.choice((1, 2, 4, 8, 16))
    while size < tokens - 20 or not facts:
        if not facts or (rng.random() < 0.3 and len(facts) < limit):
            new = []
            for _ in range(min(rng.choice((1, 1, 2, 3, 5)), limit - len(facts))):
                new.append(fact(rng, split, facts))
                facts.append(new[-1])
            early = early or len(facts)
            asked, answer = " ".join(f.told(rng) for f in new), NOTED
        elif rng.random() < 0.2:
            old = rng.choice(facts)
            asked, answer = old.asked(rng), old.answer
        else:
            asked, answer = aside(rng, split)
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        size += (len(asked) + len(answer)) / CHARACTERS_PER_TOKEN + TOKENS_PER_TURN
    last = rng.choice(facts[:early] if far else facts)
    if not told and size < UNTOLD_UP_TO and rng.random() < 0.1:
        last = fact(rng, split, facts)
        messages.append({"role": "user", "content": last.asked(rng)})
        return messages, f"Recall: {last.subject}", last.untold, f"untold {last.subject}"
    messages.append({"role": "user", "content": last.asked(rng)})
    return messages, f"Recall: {last.subject}", last.answer, " ".join(f.answer for f in (last, *facts))
