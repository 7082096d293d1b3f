"""Random pieces of conversations: names, numbers, things; and which of them evaluation alone may use.

Idea
    A value belongs to evaluation if its hash says so (`split_of`), one in `HELD_OUT`.  Generators draw names,
    codes, amounts, titles and texts through `held`, so training never sees a value of the evaluation, in any
    skill.

Shapes
    Every function takes a `random.Random` and returns text or numbers.

Errors
    ValueError for a split other than "train" and "eval".

Source
    The hash is CRC-32 of the value's text, the same on every machine.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from random import Random
from typing import TypeVar

from dskit.train.words import Word, load

T = TypeVar("T")
HELD_OUT = 12
SPLITS = ("train", "eval")

PEOPLE = [
    "Alice", "Amara", "Anna", "Ben", "Bruno", "Carla", "Chen", "Clara", "Daniel", "David", "Diego",
    "Elena", "Emil", "Emma", "Eva", "Farid", "Felix", "Fiona", "Grace", "Hana", "Hugo", "Ida", "Igor",
    "Ines", "Ivan", "Jack", "James", "Jana", "Jonas", "Julia", "Kai", "Karim", "Kofi", "Lars", "Laura",
    "Lea", "Leo", "Lina", "Liam", "Lucas", "Lucy", "Maria", "Marco", "Mark", "Mary", "Maya", "Mei", "Mia",
    "Mila", "Mira", "Nadia", "Nils", "Nina", "Noah", "Nora", "Olga", "Oliver", "Omar", "Oscar", "Paul",
    "Peter", "Priya", "Rosa", "Sam", "Sara", "Sofia", "Tara", "Theo", "Tom", "Vera", "Victor", "Yara",
    "Yuki", "Zoe", "Adam", "Alex", "Ali", "Andrea", "Anton", "Ada", "Bella", "Bob", "Chloe", "Erik",
    "Frank", "George", "Helen", "Henry", "Ivy", "Jane", "Joe", "John", "Kate", "Lily", "Max", "Nick",
    "Rita", "Robin", "Ruth", "Simon", "Tina", "Will",
]  # fmt: skip
CITIES = [
    "Amsterdam", "Athens", "Bergen", "Berlin", "Bern", "Bogota", "Boston", "Brussels", "Cairo", "Chicago",
    "Copenhagen", "Dakar", "Delhi", "Dublin", "Geneva", "Hamburg", "Hanoi", "Helsinki", "Istanbul",
    "Jakarta", "Kyoto", "Lagos", "Lima", "Lisbon", "London", "Lyon", "Madrid", "Manila", "Milan",
    "Montreal", "Moscow", "Munich", "Nairobi", "Naples", "Osaka", "Oslo", "Paris", "Porto", "Prague",
    "Quito", "Riga", "Rome", "Seattle", "Seoul", "Shanghai", "Singapore", "Sofia", "Stockholm", "Sydney",
    "Tallinn", "Tokyo", "Toronto", "Turin", "Valencia", "Vienna", "Vilnius", "Warsaw", "Zagreb", "Zurich",
    "Denver", "Austin", "Beijing", "Dubai", "Havana", "Houston", "Miami", "Mumbai", "Nice", "Perth",
    "Tunis",
]  # fmt: skip
COLORS = [
    "red", "blue", "green", "yellow", "purple", "orange", "white", "black", "brown", "pink", "silver",
    "gray", "golden", "turquoise",
]  # fmt: skip
PETS = ["dog", "cat", "rabbit", "parrot", "turtle", "hamster", "pony", "goldfish", "ferret", "canary"]
DRINKS = ["tea", "coffee", "water", "milk", "juice", "cocoa", "lemonade", "cider"]
JOBS = [
    "teacher", "nurse", "baker", "pilot", "farmer", "painter", "writer", "singer", "lawyer", "carpenter",
    "doctor", "gardener", "plumber", "dancer",
]  # fmt: skip
HOBBIES = [
    "chess", "hiking", "sailing", "cooking", "painting", "running", "reading", "fishing", "dancing",
    "swimming", "cycling", "gardening",
]  # fmt: skip
CURRENCIES = ["EUR", "USD", "GBP", "JPY", "CHF", "SEK", "NOK", "CAD", "AUD", "CNY", "INR", "BRL"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
ONSETS = [
    "b", "br", "d", "dr", "f", "g", "gr", "h", "j", "k", "kr", "l", "m", "n", "p", "r", "s", "st", "t",
    "tr", "v", "z", "sh", "th", "w",
]  # fmt: skip
VOWELS = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "u", "a", "e", "i", "o", "u", "ai", "ou"]
CODAS = ["", "", "", "n", "r", "l", "s", "k", "m"]


def split_of(value: object) -> str:
    """The split that owns a value: "eval" for one value in `HELD_OUT`."""
    return "eval" if zlib.crc32(str(value).encode()) % HELD_OUT == 0 else "train"


def held(rng: Random, split: str, make: Callable[[], T]) -> T:
    """Draw with `make` until the value belongs to `split`."""
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, must be one of {SPLITS}")
    while True:
        value = make()
        if split_of(value) == split:
            return value


def coined(rng: Random) -> str:
    """A made-up name of two syllables, rarely three, such as Toles or Branik."""
    syllables = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(3 if rng.random() < 0.1 else 2)]
    return ("".join(syllables) + rng.choice(CODAS)).capitalize()


def blended(rng: Random) -> str:
    """A made-up name from the beginning of one listed word and the end of another, such as Umbait.

    Coined names use few of the tokenizer's pieces; these use them all, so that copying works for any name.
    """
    first, second = (rng.choice(load()).word for _ in range(2))
    letters = first[: rng.randrange(2, 5)] + second[-rng.randrange(2, 5) :]
    return letters.replace(" ", "").replace("-", "").lower().capitalize()


def name(rng: Random, split: str, known: list[str], share: float) -> str:
    """A known name with this probability, else a made-up one; training also meets blended ones."""
    if rng.random() < share:
        return rng.choice(known)
    return blended(rng) if split == "train" and rng.random() < 0.5 else coined(rng)


def person(rng: Random, split: str) -> str:
    """A first name, real or made up."""
    return held(rng, split, lambda: name(rng, split, PEOPLE, 0.4))


def city(rng: Random, split: str) -> str:
    """A city, real or made up."""
    return held(rng, split, lambda: name(rng, split, CITIES, 0.5))


def number(rng: Random, split: str, digits: int) -> int:
    """A number of exactly `digits` digits."""
    return held(rng, split, lambda: rng.randrange(10 ** (digits - 1), 10**digits))


@cache
def words_of(pos: str) -> tuple[Word, ...]:
    """The listed words of one part of speech that are short enough to be used as things."""
    return tuple(word for word in load() if word.pos == pos and 3 <= len(word.word) <= 9)


def noun(rng: Random) -> str:
    """A listed noun, common ones more often."""
    nouns = words_of("noun")
    return nouns[int(len(nouns) * rng.random() ** 1.5)].word


def any_noun(rng: Random) -> str:
    """A listed noun, each as often as any other."""
    return rng.choice(words_of("noun")).word


def adjective(rng: Random) -> str:
    """A listed adjective, common ones more often."""
    adjectives = words_of("adjective")
    return adjectives[int(len(adjectives) * rng.random() ** 1.5)].word


def title(rng: Random, split: str) -> str:
    """A short title of two words, such as "slow train"."""
    return held(rng, split, lambda: f"{adjective(rng)} {noun(rng)}")


def message(rng: Random, split: str) -> str:
    """A short sentence that somebody could send."""
    forms = (
        lambda: f"please bring the {noun(rng)} and the {noun(rng)}",
        lambda: f"the {noun(rng)} is {adjective(rng)} today",
        lambda: f"I will be {rng.randrange(2, 60)} minutes late for the {noun(rng)}",
        lambda: f"see you at the {noun(rng)} on {rng.choice(DAYS)}",
        lambda: f"do not forget the {adjective(rng)} {noun(rng)}",
        lambda: f"thank you for the {adjective(rng)} {noun(rng)}",
    )
    return held(rng, split, lambda: rng.choice(forms)())


def clock(rng: Random) -> str:
    """A time of day, such as 09:30."""
    return f"{rng.randrange(6, 23):02d}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"
