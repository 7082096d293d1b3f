"""Extract the demo's word list from the WordNet 3.0 database files, once.

Idea
    The demo model learns short definitions of common words.  A word enters the list with the first sense of
    the part of speech in which people tagged it most often, if that sense has a plain definition: no
    parentheses, not longer than `MAX_DEFINITION` characters, not built on the word itself.  Names, words
    about sex, slurs and words that serve to insult are left out.  The result is committed as `words.txt`, so
    training needs no WordNet.

Shapes
    words.txt: one line per word, `word<TAB>part of speech<TAB>definition`, most used words first.

Errors
    FileNotFoundError names the database file that is missing.

Source
    WordNet 3.0, Princeton University; the formats are `wndb(5)` and `cntlist(5)`.  Licence:
    `WORDNET-LICENSE.txt`.

Try
    apt-get install wordnet-base; python -m dskit.train.words /usr/share/wordnet
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

WORDS = Path(__file__).with_name("words.txt")
COUNT, MAX_DEFINITION = 3200, 58
POS = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}
SPOKEN = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}

# Words or definitions that contain one of these stems are left out: insults, sex, groups of people, cruelty.
UNWANTED = re.compile(
    r"\b(sex|genital|penis|vagina|breast|nipple|buttock|anus|anal|urin|urine|feces|fecal|defecat|excre|copulat|"
    r"coit|\w*castrat|orgas|erotic|prostitut|whore|slut|bitch|bastard|rape|porn|naked|nude|"
    r"nudity|lust|lewd|obscen|vulgar|slur|"
    r"offensive|derogat|disparag|contempt|insult|negro|black person|white person|jew|gypsy|savage|slave|"
    r"homosexual|"
    r"lesbian|gay|virgin|brothel|harlot|incest|semen|sperm|testic|menstru|abort|suicid|murder|kill|torture|"
    r"hitler|nazi|drug|cocaine|heroin|race|racial|ethnic|idiot|moron|imbecil|retard|crippl|fool|stupid|fuck|shit|"
    r"damn|arse|ass|piss|tit|cock|dick|screw|bang|hump|hooker|pimp|queer|fag|dyke|spic|chink|coon|cunt|fanny|"
    r"intercourse|pregnan|womb|mistress|seduc|flesh|homo|bugger|bum|pussy|knocker|boob)",
    re.IGNORECASE,
)
# Grammar words: their WordNet senses are rare homographs (`in`, the inch; `an`, the Associate in Nursing).
STOP = {
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "can", "did", "do", "does", "for", "from",
    "had", "has", "have", "he", "her", "here", "him", "his", "how", "i", "in", "is", "it", "its", "me",
    "my", "no", "nor", "not", "of", "off", "on", "or", "our", "out", "over", "she", "so", "some",
    "than", "that", "the", "their", "them", "then", "there", "these", "they", "this", "those", "to",
    "up", "us", "was", "we", "were", "what", "when", "where", "which", "while", "who", "whom", "why",
    "will", "with", "would", "you", "your", "may", "might", "must", "shall", "should", "could", "mean",
    "define", "word", "say",
}  # fmt: skip


class Word(NamedTuple):
    """One line of the list."""

    word: str
    pos: str  # noun, verb, adjective or adverb
    definition: str


@cache
def load(path: Path = WORDS) -> tuple[Word, ...]:
    """The committed list, most used words first."""
    return tuple(Word(*line.split("\t")) for line in path.read_text(encoding="utf-8").splitlines())


def tag_counts(folder: Path) -> dict[tuple[str, str], dict[int, int]]:
    """(word, part of speech) -> {sense number: times tagged} from cntlist.rev."""
    counts: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    for line in (folder / "cntlist.rev").read_text(encoding="latin-1").splitlines():
        key, sense, times = line.split()
        word, lexical = key.split("%")
        counts[word, POS[lexical[0]]][int(sense)] = int(times)
    return counts


def first_synsets(folder: Path, pos: str) -> dict[str, int]:
    """Word -> byte offset of its first sense in data.<pos>."""
    found = {}
    for line in (folder / f"index.{pos}").read_text(encoding="latin-1").splitlines():
        if not line.startswith(" "):
            field = line.split()
            found[field[0]] = int(field[-int(field[2])])
    return found


def gloss(data: bytes, offset: int, word: str) -> str | None:
    """The definition of the synset at `offset`; None if it is not plain or the word is spelled as a name."""
    head, _, text = data[offset : data.index(b"\n", offset)].decode("latin-1").partition(" | ")
    if word not in [spelling.split("(")[0] for spelling in head.split()]:
        return None
    text = re.split(r'[;"]', text)[0].strip().rstrip(".:,")
    plain = re.fullmatch(r"[A-Za-z][A-Za-z ,'-]*[a-z]", text) and not re.search(r"\b[A-Z]", text[1:])
    good = plain and 8 <= len(text) <= MAX_DEFINITION and word not in re.findall(r"[a-z]+", text.lower())
    return text if good and not UNWANTED.search(text) else None


def extract(folder: Path, count: int = COUNT) -> list[Word]:
    """The `count` most often tagged words that have a plain first definition."""
    counts = tag_counts(folder)
    best: dict[str, tuple[int, str]] = {}
    for (word, pos), senses in counts.items():
        best[word] = max(best.get(word, (0, "")), (sum(senses.values()), pos))
    data = {pos: (folder / f"data.{pos}").read_bytes() for pos in SPOKEN}
    first = {pos: first_synsets(folder, pos) for pos in SPOKEN}
    rows: list[Word] = []
    taken: set[str] = set()
    for word, (_, pos) in sorted(best.items(), key=lambda item: (-item[1][0], item[0])):
        usable = re.fullmatch(r"[a-z]{3,12}", word) and word not in STOP and not UNWANTED.search(word)
        text = gloss(data[pos], first[pos][word], word) if usable and word in first[pos] else None
        if text and text not in taken:
            taken.add(text)
            rows.append(Word(word, SPOKEN[pos], text))
    return rows[:count]


def main() -> None:
    """Write words.txt from the database folder named on the command line."""
    rows = extract(Path(sys.argv[1]))
    WORDS.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    sizes = sorted(len(row.definition) for row in rows)
    print(f"{len(rows)} words of {sizes[0]} to {sizes[-1]} characters, median {sizes[len(sizes) // 2]}")


if __name__ == "__main__":
    main()
