"""Token ids become text as they arrive.

Idea: a byte-level tokenizer may cut a character in two, so the end of the decoded text is held back while it
may still change; and a stop string may begin in one token and end in a later one, so a tail that could be its
beginning is held back too. What has been given out never changes.

Shapes: ids one at a time in, pieces of text out; the pieces joined are `text`.
State: one TextStream per request; `push` for every token, `finish` once at the end.
Errors: those of the tokenizer's `decode`.
Source: engine.md sections 4.6 and 10. Holds for byte-level tokenizers, where decode(a + b) = decode(a) +
decode(b) wherever a ends with a whole character.
"""

from __future__ import annotations

from collections.abc import Callable

BROKEN = "\ufffd"  # what decoding puts in place of bytes that make no character


class TextStream:
    """The text of one request: `decode` maps ids to text, `stop` are the strings that end it.

    `pieces`: texts of tokens that are whole characters, shared by many streams and filled by them.
    """

    __slots__ = ("_decode", "_given", "_held", "_ids", "_pieces", "_stop", "_taken")

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stop: tuple[str, ...] = (),
        pieces: dict[int, str] | None = None,
    ):
        self._given: list[str] = []
        self._decode, self._stop = decode, stop
        self._pieces = {} if pieces is None else pieces
        self._ids: list[int] = []  # since the last whole character
        self._taken = 0  # characters of decode(_ids) already taken
        self._held = ""  # decoded, but maybe the beginning of a stop string

    @property
    def text(self) -> str:
        """What was given out so far."""
        return "".join(self._given)

    def push(self, token_id: int) -> tuple[str, bool]:
        """Add a token; returns the text to give out now, and whether a stop string has ended it."""
        if not self._ids and not self._stop and (piece := self._pieces.get(token_id)) is not None:
            self._given.append(piece)
            return piece, False
        return self._give(self._characters(token_id))

    def finish(self) -> str:
        """No more tokens: give out what was held back, with half a character shown as U+FFFD."""
        rest = self._held + (self._decode(self._ids)[self._taken :] if self._ids else "")
        self._held, self._ids, self._taken = "", [], 0
        self._given.append(rest)
        return rest

    def _characters(self, token_id: int) -> str:
        """The characters that are certain after this token: all but a broken end."""
        self._ids.append(token_id)
        decoded = self._decode(self._ids)
        whole = len(decoded.rstrip(BROKEN))
        certain = max(whole, len(decoded) - 3, self._taken)  # a cut character is at most three bytes
        new, self._taken = decoded[self._taken : certain], certain
        if certain == len(decoded):
            if len(self._ids) == 1:
                self._pieces[token_id] = decoded
            self._ids, self._taken = [], 0
        return new

    def _give(self, new: str) -> tuple[str, bool]:
        """Cut at the earliest stop string, or hold back the longest tail that may become one."""
        if not self._stop:
            self._given.append(new)
            return new, False
        known = self._held + new
        found = [at for at in (known.find(s) for s in self._stop) if at >= 0]
        keep = min(found) if found else len(known) - _overlap(known, self._stop)
        self._held = "" if found else known[keep:]
        if found:
            self._ids, self._taken = [], 0  # what follows the stop string is not part of the text
        self._given.append(known[:keep])
        return known[:keep], bool(found)


def _overlap(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that is a proper beginning of a stop string."""
    longest = max(map(len, stops)) - 1
    return next(
        (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in stops)), 0
    )
