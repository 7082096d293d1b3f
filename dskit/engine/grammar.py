"""Structured output: which tokens may come next, so that a text follows a schema, a pattern or a grammar.

Idea: xgrammar compiles a constraint against the spellings of all tokens. A State walks along with one text;
before a token is drawn it writes one bit for each token that may follow, and the sampler gives the others a
probability of 0. Behind guesses of a draft it walks ahead and comes back, so that the row behind each guess
has a mask of its own: a guess that breaks the grammar has probability 0 and ends the round. A State reads the
tokens that it has not seen when it is asked, so preemption, forks and overlap need nothing of it.

While a prompt leaves the model thinking, the grammar is free text up to `</think>` and the constraint behind
it. Control tokens have no spelling here and so never come, except those of thinking and of tool calls.

JSON: objects list their properties in the schema's order, and those that name any hold no others. A schema is
checked first: what xgrammar would not hold to is refused by name rather than left out.

Shapes: masks int32 [rows, ceil(V / 32)], bit v % 32 of word v // 32 for token v.
Units: bytes and seconds.
State: one Grammars per engine, with a cache of what it compiled; one State per sequence.
Errors: RequestError before a request is admitted: too long, malformed, not enforceable, not compiled in time,
xgrammar not installed. Later a State notes its `error`, which ends its request alone.
Source: engine.md section 19; xgrammar 0.2 (structural tags); JSON Schema 2020-12.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dskit.chat import DSML, THINK, THINK_END, Tokenizer
from dskit.engine.seq import Constraint, RequestError

MAX_BYTES = {"json": 1 << 16, "choice": 1 << 16, "tool_call": 1 << 16, "tool_call_required": 1 << 16,
             "grammar": 1 << 14, "regex": 1 << 11}
MAX_DEPTH = 64  # of a schema; xgrammar's time grows with the cube
TIMEOUT = 20.0
CACHE = 256 << 20
WORKERS = 2
SLOWEST_MASK = 0.1
WHITESPACE = 32  # characters between two elements of JSON, so that no text is blank for ever
SPELLED = (THINK, THINK_END, DSML)  # control tokens that may come


class Grammars:
    """Compiles constraints for one tokenizer; tokens of `stop_ids` end a text. Usable from any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Iterable[int], family: str = "v4.1"):
        self.tokenizer, self.vocab_size, self.stop_ids = tokenizer, vocab_size, list(stop_ids)
        self.family = {"v4.1": "deepseek_v4_1", "v4": "deepseek_v4"}[family]  # of tool calls, xgrammar's name
        self._pool = ThreadPoolExecutor(WORKERS, "dskit-grammar")

    def state(self, constraint: Constraint, start: int) -> State:
        """A text that follows a constraint from token `start` on; waits until that is compiled. Raises
        RequestError."""
        size, most = len(constraint.text.encode()), MAX_BYTES[constraint.kind]
        if size > most:
            raise _refusal(constraint, f"is {size} bytes long; at most {most} are compiled")
        tag, compiler = json.dumps(self._tag(constraint)), self._compiler
        work = self._pool.submit(self._compile, compiler, tag)
        try:
            compiled, mask_s = work.result(TIMEOUT)
        except TimeoutError:
            if work.cancel():  # it had not begun
                raise RequestError("grammars of other requests are being compiled; try again later",
                                   param=constraint.field, code="grammar_timeout", status=503) from None
            raise _refusal(constraint, f"could not be compiled within {TIMEOUT:g} s; make it simpler",
                           "grammar_timeout") from None
        except (RuntimeError, ValueError) as error:
            words = re.sub(r"^\[[\d:]+\] \S+: ", "", str(error)).strip()  # without xgrammar's file and line
            raise _refusal(constraint, f"can't be compiled: {words}") from None
        if mask_s is None:
            raise _refusal(constraint, "lets no text begin")
        if mask_s > SLOWEST_MASK:
            raise _refusal(constraint, f"takes {mask_s:.2f} s a token, which others would wait for; make it "
                           "simpler", "grammar_timeout")
        return State(compiled, start)

    def close(self) -> None:
        """Compile nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _compiler(self) -> Any:
        try:
            import xgrammar
        except ModuleNotFoundError:
            raise RequestError('structured output needs xgrammar: pip install "dskit-llm[grammar]"',
                               code="unsupported_parameter") from None
        spellings = [self.tokenizer.spelling(i) or "" for i in range(self.vocab_size)]
        for special, i in self.tokenizer.specials.items():
            if special not in SPELLED and i is not None:
                spellings[i] = ""
        info = xgrammar.TokenizerInfo(spellings, xgrammar.VocabType.BYTE_LEVEL, vocab_size=self.vocab_size,
                                      stop_token_ids=self.stop_ids)
        threads = min(4, os.cpu_count() or 1)
        return xgrammar.GrammarCompiler(info, max_threads=threads, cache_limit_bytes=CACHE)

    def _compile(self, compiler: Any, tag: str) -> tuple[Any, float | None]:
        """What was compiled, and the seconds of its first mask; None where that lets nothing through."""
        compiled, times = compiler.compile_structural_tag(tag), []
        for _ in range(3):
            state, bits, begin = State(compiled), blank(1, self.vocab_size), time.monotonic()
            state.fill(bits, 0, ())
            times.append(time.monotonic() - begin)
        return compiled, min(times) if state.error is None else None

    def _tag(self, c: Constraint) -> dict[str, Any]:
        """A constraint in xgrammar's words."""
        form = self._tools(c) if c.kind.startswith("tool_call") else _form(c)
        if c.thinking:
            free = {"type": "any_text", "excludes": [THINK, THINK_END]}
            thought = {"type": "tag", "begin": "", "content": free, "end": THINK_END}
            form = {"type": "sequence", "elements": [thought, form]}
        return {"type": "structural_tag", "format": form}

    def _tools(self, c: Constraint) -> dict[str, Any]:
        """Calls of the tools as this family writes them; where one is required the prompt has begun them."""
        tools, required = json.loads(c.text), c.kind == "tool_call_required"
        for tool in tools:
            function = tool["function"]
            if function.get("strict") or (required and function.get("strict") is None):
                prepare(function.get("parameters") or {}, c, f"the parameters of {function['name']}")
            else:
                function["strict"] = False
        self._compiler  # noqa: B018  (says what to install)
        import xgrammar

        choice = "required" if required else "auto"
        tag = xgrammar.get_model_structural_tag(self.family, tools=tools, tool_choice=choice,
                                                reasoning="disabled")
        form = tag.model_dump(mode="json", exclude_none=True)["format"]
        return {**form, "elements": form["elements"][1:]} if required else form


class State:
    """Where a text stands in its grammar, which begins at token `start`; `error` says why it can't go on."""

    def __init__(self, compiled: Any, start: int = 0):
        import xgrammar

        self._matcher, self._read = xgrammar.GrammarMatcher(compiled), start
        self.error: str | None = None

    def fill(self, bits_RW: Tensor, row: int, tokens: Sequence[int], guesses: Sequence[int] = ()) -> None:
        """Write which tokens may follow `tokens`, prompt included, and some guesses; any, behind an end or a
        break.

        A text goes on from call to call: `tokens` begins with those of the call before.
        """
        if self.error is None:
            try:
                self._follow(tokens)
                self._fill(bits_RW[row : row + 1], guesses)
            except RuntimeError as error:
                self.error = f"the grammar failed: {error}"

    def _follow(self, tokens: Sequence[int]) -> None:
        for token in tokens[self._read :]:
            if not self._matcher.is_terminated() and not self._matcher.accept_token(token):
                raise RuntimeError(f"token {token} does not follow it")
        self._read = len(tokens)

    def _fill(self, bits_1W: Tensor, guesses: Sequence[int]) -> None:
        matcher, taken = self._matcher, 0
        while taken < len(guesses) and not matcher.is_terminated() and matcher.accept_token(guesses[taken]):
            taken += 1
        if taken == len(guesses) and not matcher.is_terminated():
            matcher.fill_next_token_bitmask(bits_1W)
            if not bits_1W.any():
                bits_1W.fill_(-1)
                self.error = None if guesses else "the grammar lets no token follow"
        if taken:
            matcher.rollback(taken)


def blank(rows: int, vocab_size: int) -> Tensor:
    """Masks that let every token through."""
    return torch.full((rows, -(-vocab_size // 32)), -1, dtype=torch.int32)


def unpack(bits_RW: Tensor, vocab_size: int) -> Tensor:
    """Masks as bool [rows, V]."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits_RW.device)
    return (bits_RW[..., None] >> shifts & 1).bool().flatten(1)[:, :vocab_size]


def _refusal(c: Constraint, words: str, code: str = "invalid_grammar") -> RequestError:
    what = {"json": "the JSON schema", "regex": "the pattern", "choice": "the choice"}
    name = what.get(c.kind, "the grammar" if c.kind == "grammar" else "the grammar of the tools")
    return RequestError(f"{name} {words}", param=c.field, code=code)


def _form(c: Constraint) -> dict[str, Any]:
    if c.kind == "regex":
        return {"type": "regex", "pattern": c.text}
    if c.kind == "grammar":
        return {"type": "grammar", "grammar": c.text}
    if c.kind == "choice":
        texts = [{"type": "const_string", "value": text} for text in json.loads(c.text)]
        return {"type": "or", "elements": texts}
    schema = json.loads(c.text)
    prepare(schema, c)
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": WHITESPACE}


# ---- what of JSON Schema is held to ------------------------------------------------------------------------

_NUMBER = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
BY_TYPE = {
    "integer": {*_NUMBER, "multipleOf"}, "number": _NUMBER, "boolean": set(), "null": set(),
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties",
               "patternProperties", "propertyNames"},
}  # fmt: skip
LEADERS = ("$ref", "enum", "const", "anyOf", "allOf")  # each alone, but for what only describes
ASSERTS = {"type", *LEADERS, *set().union(*BY_TYPE.values())} | {
    "oneOf", "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains",
    "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties",
    "additionalItems", "$dynamicRef", "$recursiveRef", "$id",
}  # fmt: skip
CLASHES = [("pattern", "minLength"), ("pattern", "maxLength"), ("format", "minLength"),
           ("format", "maxLength"), ("format", "pattern"), ("propertyNames", "properties"),
           ("minProperties", "additionalProperties"), ("minProperties", "patternProperties"),
           ("minProperties", "propertyNames"), *(("multipleOf", bound) for bound in sorted(_NUMBER))]
UNQUOTABLE = re.compile(r'["\x00-\x1f]|\\(?:[\\ntrfv0"c]|x[01]|x22|x5c|u00[01]|u0022|u005c)', re.IGNORECASE)
CHARACTER = "([ !#-\\[\\]-\ud7ff]|[\ue000-\U0010ffff])"  # that JSON need not escape
INSTEAD = {"oneOf": "; use anyOf"}
TYPES = {"string": str, "boolean": bool, "integer": int, "number": (int, float), "array": list,
         "object": dict, "null": type(None)}


def prepare(schema: Any, c: Constraint, at: str = "the schema", depth: int = 0) -> None:
    """Raises RequestError for what a text would not be held to, or what would take for ever.

    Lengths of strings become patterns, in place: xgrammar lets control characters and halves of surrogate
    pairs into strings that it counts.
    """

    def refuse(words: str) -> None:
        raise RequestError(f"{at} {words}", param=c.field, code="invalid_grammar")

    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        refuse("is neither an object nor true or false")
    if depth > MAX_DEPTH:
        refuse(f"is nested deeper than {MAX_DEPTH}")
    found, leader = ASSERTS & set(schema), next((name for name in LEADERS if name in schema), None)
    types = schema.get("type", "object" if "properties" in found else "array" if "items" in found else [])
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or ("type" in schema and not types) or not BY_TYPE.keys() >= {*types}:
        refuse(f"has type {schema['type']!r}; there are {', '.join(BY_TYPE)}")
    known = {"type"}.union(*(BY_TYPE[name] for name in types)) if leader is None else {leader}
    if leader in ("enum", "const"):
        _check_values(schema, leader, types, refuse)
        known |= {"type"}
    if bad := sorted(found - known):
        typed = not types and any(bad[0] in names for names in BY_TYPE.values())
        where = f" beside {leader}" if leader else " without a type" if typed else ""
        refuse(f"has {bad[0]}, which can't be enforced{where}{INSTEAD.get(bad[0], '')}")
    if clash := next((pair for pair in CLASHES if {*pair} <= found), None):
        refuse(f"has {clash[0]} and {clash[1]}, which can't be enforced together")
    if leader == "allOf" and len(schema["allOf"]) != 1:
        refuse("has allOf of several schemas, which can't be enforced; write them as one")
    if leader == "anyOf" and not schema["anyOf"]:
        refuse("has an empty anyOf")
    if leader == "$ref" and not str(schema["$ref"]).startswith("#"):
        refuse(f"refers to {schema['$ref']!r}; only references inside the schema (#/...) are followed")
    required, properties = schema.get("required", []), schema.get("properties", {})
    if not isinstance(required, list) or not isinstance(properties, dict):
        refuse("needs a list as required and an object as properties")
    if missing := [name for name in required if not isinstance(name, str) or name not in properties]:
        refuse(f"requires {missing[0]!r}, which is none of its properties")
    patterns = [schema.get("pattern", ""), *_dict(schema, "patternProperties")]
    if max(len(str(pattern)) for pattern in patterns) > MAX_BYTES["regex"]:
        refuse(f"has a pattern longer than {MAX_BYTES['regex']} characters")
    if bad := next(filter(UNQUOTABLE.search, map(str, patterns)), None):
        refuse(f"has the pattern {bad!r}; quotes, backslashes and control characters can't be enforced there")
    if {"minLength", "maxLength"} & found:
        schema["pattern"] = f"^{CHARACTER}{{{schema.pop('minLength', 0)},{schema.pop('maxLength', '')}}}$"
    for name, part in _parts(schema):
        prepare(part, c, f"{at}, {name}", depth + 1)


def _check_values(schema: dict[str, Any], leader: str, types: list[str], refuse: Any) -> None:
    values = schema["enum"] if leader == "enum" else [schema["const"]]
    for value in values if isinstance(values, list) and types else ():
        fits = [isinstance(value, TYPES[t]) and (isinstance(value, bool) == (t == "boolean")) for t in types]
        if not any(fits):
            refuse(f"has the value {value!r}, which is no {' or '.join(types)}")


def _parts(schema: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """The schemas inside a schema, with their places."""
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        yield from ((f"{name} {key!r}", part) for key, part in _dict(schema, name).items())
    for name in ("anyOf", "allOf", "prefixItems"):
        part = schema.get(name)
        yield from ((f"{name} {i}", one) for i, one in enumerate(part if isinstance(part, list) else ()))
    yield from ((name, schema[name]) for name in ("items", "additionalProperties", "propertyNames")
                if name in schema)


def _dict(schema: dict[str, Any], name: str) -> dict[str, Any]:
    return schema[name] if isinstance(schema.get(name), dict) else {}
