"""The words of the engine: what is asked for, what is planned, what comes back.

Shapes: token ids are Python ints; scores are tensors `[rows, vocab]`, float32; everything else is plain data.
Units: times are seconds of `time.perf_counter`; positions count from 0; probabilities are natural logarithms.
Errors: RequestError, which names the field (`param`) and carries the HTTP status a server should answer with.
Source: engine.md sections 4.1, 10, 20.
"""

from __future__ import annotations

import itertools
import json
import math
import secrets
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property
from typing import Any

FINISH_REASONS = ("stop", "length", "tool_calls", "abort", "error")
MAX_LOGPROBS = 1000
GREEDY_BELOW = 1e-5
STRUCTURES = ("json", "json_object", "regex", "choice", "grammar")


class RequestError(ValueError):
    """A request that can't be served: the message says why and how to repair it.

    `param` is the field at fault (None if no single one is), `code` a word for programs, `status` the HTTP
    status.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_value", status: int = 400
    ):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True)
class Constraint:
    """What a text has to follow (grammar.py), by `kind`: a JSON schema (json), a pattern that all of it
    matches (regex), one of a JSON list of texts (choice), an EBNF whose first rule is `root` (grammar), or a
    JSON list of tools that it may (tool_call) or has to call (tool_call_required).

    With `thinking` it begins behind `</think>`. `field` is what asked for it.
    """

    kind: str
    text: str
    thinking: bool = False
    field: str = field(default="structured_outputs", compare=False)


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. None means: from the checkpoint's generation_config.json, else the neutral
    value.

    temperature         0 to 2; below 1e-5 the most probable token is taken
    top_p, top_k, min_p filters, applied in the order top_k, top_p, min_p; 1, 0 (or -1) and 0 turn them off
    seed                64 bits; the same seed, prompt and parameters give the same tokens; None draws one
    max_tokens          at most so many new tokens; None means up to the context limit
    stop                strings that end the text, not part of it; they may lie across tokens
    stop_token_ids      ids that end the text
    logprobs            None: none; k >= 0: of the chosen token and of the k most probable ones
    ignore_eos          go on after the end-of-sequence token
    frequency_penalty, presence_penalty (-2 to 2), repetition_penalty (> 0), logit_bias (id -> -100 to 100)
    structured_outputs  a Constraint, or one of {"json": schema}, {"json_object": True}, {"regex": pattern},
                        {"choice": texts}, {"grammar": EBNF}; needs the extra [grammar]
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | Seq[str] | None = None
    stop_token_ids: Seq[int] | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    structured_outputs: Constraint | Mapping[str, Any] | None = None

    def __post_init__(self):
        _number(self, "temperature", 0, 2)
        _number(self, "top_p", 0, 1, above=True)
        _number(self, "top_k", -1, math.inf, kind=int)
        _number(self, "min_p", 0, 1)
        _number(self, "seed", -(2**63), 2**64 - 1, kind=int)
        _number(self, "max_tokens", 1, math.inf, kind=int)
        if isinstance(self.logprobs, bool):
            object.__setattr__(self, "logprobs", 0 if self.logprobs else None)
        _number(self, "logprobs", 0, MAX_LOGPROBS, kind=int)
        _number(self, "frequency_penalty", -2, 2)
        _number(self, "presence_penalty", -2, 2)
        _number(self, "repetition_penalty", 0, math.inf, above=True)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(
                f"ignore_eos is {self.ignore_eos!r}; it must be true or false", param="ignore_eos"
            )
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        object.__setattr__(self, "structured_outputs", _constraint(self.structured_outputs))
        if self.structured_outputs and self.ignore_eos:
            raise RequestError(
                "ignore_eos can't go with structured output, which says where a text ends", param="ignore_eos"
            )

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> SamplingParams:
        """The sampling fields of an OpenAI request body; other fields are left to others."""
        values = {f.name: body[f.name] for f in fields(cls) if body.get(f.name) is not None}
        if body.get("max_completion_tokens") is not None:
            values["max_tokens"] = body["max_completion_tokens"]
        if isinstance(body.get("logprobs"), bool) and body.get("top_logprobs") is not None:
            if not body["logprobs"]:
                raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
            values["logprobs"] = body["top_logprobs"]
        return cls(**values | {"structured_outputs": constraint(body)})

    def given(self) -> dict[str, Any]:
        """The fields that say something, as keyword arguments; 0 does, None, False and empty ones do not."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: v for k, v in values.items() if v is not None and v is not False and v != () and v != {}}

    def resolve(self, defaults: Mapping[str, Any], max_tokens: int) -> SamplingParams:
        """Fill every None: from `defaults` (the keys of generation_config.json), then from the neutral
        values.

        `max_tokens` is what the context still holds; a limit of the checkpoint above it is lowered to it.
        """
        known = NEUTRAL | {k: defaults[k] for k in FROM_CHECKPOINT if defaults.get(k) is not None}
        known["max_tokens"] = min(max_tokens, defaults.get("max_new_tokens") or max_tokens)
        if defaults.get("do_sample") is False:
            known["temperature"] = 0.0
        return replace(self, **{k: v for k, v in known.items() if getattr(self, k) is None})

    def fork(self, index: int) -> SamplingParams:
        """The parameters of choice number `index` when one request asks for several: seed + index."""
        return self if self.seed is None else replace(self, seed=(self.seed + index) % 2**64)

    @cached_property
    def greedy(self) -> bool:
        """True when the most probable token is taken."""
        return self.temperature < GREEDY_BELOW

    @cached_property
    def edits_logits(self) -> bool:
        """True when scores change before sampling, so that the plain arg-max would be wrong."""
        penalties = self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1
        return bool(penalties or self.logit_bias or self.structured_outputs)

    @cached_property
    def filters(self) -> bool:
        """True when top-k, top-p or min-p takes tokens away."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
FROM_CHECKPOINT = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Request:
    """A prompt with its resolved parameters; `scoring` asks for the logits of all rows instead.

    Requests with another `cache_salt` share no cached prefix with this one. Those of a lower `priority` are
    admitted first. Without an end after `timeout` seconds it is ended.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    scoring: bool = False
    cache_salt: str = ""
    priority: int = 0
    timeout: float | None = None

    @cached_property
    def prompt_key(self) -> int:
        """Equal for requests whose prompts are computed once for all of them."""
        return hash((self.cache_salt, *self.prompt_ids))


class Status(Enum):
    """Where a sequence is: queued (also between two chunks of its prompt), decoding, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


_seq_ids = itertools.count(1)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """A request being served: its tokens, how many of them are in the caches, and what it holds there.

    Invariant between steps: `num_computed <= len(tokens)`, and `blocks` cover at least `num_computed`
    positions. Slot 0 means none. The newest token is not in the caches yet: its row is computed by the next
    decode step. `path` are the tree's nodes of the first blocks, `keys` what they are found by.
    """

    request: Request
    text: Any  # text.TextStream
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    slot: int = 0
    keys: list[bytes] = field(default_factory=list)
    path: list = field(default_factory=list)  # tree.Node
    epoch: int = 0  # the tree's, when the first row was planned
    border: int = 0  # number of computed tokens at which the next whole block goes into the tree
    replay: int = 0  # rows before num_computed whose windows the next chunk has to rebuild
    marks: list[int] = field(default_factory=list)  # positions of the prompt to take a snapshot at
    trail: Any = None  # the node with the newest snapshot of the answer
    cached_tokens: int = 0  # of the prompt, found in the tree when it was first admitted
    status: Status = Status.WAITING
    inflight: int = 0  # steps on their way that hold rows of this sequence
    grammar: Any = None  # grammar.State, where the text is to follow something
    proposal: Proposal | None = None  # what the draft says comes next
    alive: list[float] = field(default_factory=list)  # survivals of the proposal that is verified
    hopes: list[float] = field(default_factory=list)  # what survived of the one before
    rounds: int = 0  # steps that verified drafts of it
    drafted: int = 0  # drafts verified
    accepted: int = 0  # drafts that held
    bias: float = 0.0  # what the confidences of its drafts lack, as logits
    finish_reason: str | None = None
    error: str | None = None
    preemptions: int = 0
    seed: int = 0
    sampled: list[Sampled] = field(default_factory=list)  # kept when log-probabilities were asked for
    logits: list = field(default_factory=list)  # scoring only: one tensor [rows, vocab] per chunk
    arrived: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    limit: int = 0  # most tokens, prompt included
    ends: frozenset[int] = frozenset()  # ids that end it
    seq_id: int = field(default_factory=_seq_ids.__next__)
    request_id: str = field(init=False)
    params: SamplingParams = field(init=False)
    prompt_len: int = field(init=False)

    def __post_init__(self):
        self.request_id = self.request.request_id
        self.tokens = list(self.request.prompt_ids)
        self.prompt_len = len(self.tokens)
        self.params = self.request.params
        self.seed = secrets.randbits(64) if self.params.seed is None else self.params.seed % 2**64
        self.arrived = time.perf_counter()

    @property
    def generated(self) -> int:
        """Number of tokens produced so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def position(self) -> int:
        """Where the next token stands."""
        return len(self.tokens)

    def usage(self) -> Usage:
        """Counts and times so far."""
        n, span = self.generated, self.last_token - self.first_token
        return Usage(
            self.prompt_len,
            n,
            self.cached_tokens,
            self.first_token - self.arrived if n else None,
            (n - 1) / span if n > 1 and span > 0 else None,
            self.rounds,
            self.drafted,
            self.accepted,
        )

    def result(self) -> Result:
        """Everything about the finished request."""
        logprobs = self.sampled if self.params.logprobs is not None else None
        return Result(
            self.request.request_id,
            self.text.text,
            self.tokens[self.prompt_len :],
            self.finish_reason,
            self.usage(),
            self.seed,
            logprobs,
            self.error,
        )


@dataclass(slots=True)
class Ahead:
    """A sequence as it will be if some tokens follow: what a row behind drafts is sampled with."""

    seq: Sequence
    more: list[int]

    @property
    def tokens(self) -> list[int]:
        """All of them."""
        return self.seq.tokens + self.more

    @property
    def position(self) -> int:
        """Where the next token stands."""
        return len(self.seq.tokens) + len(self.more)

    def __getattr__(self, name: str) -> Any:  # params, seed, prompt_len, grammar
        return getattr(self.seq, name)


@dataclass(slots=True)
class Proposal:
    """A draft's guesses of the next tokens, and the logit of its confidence in each."""

    tokens: list[int]
    confidence: list[float]


@dataclass(slots=True, eq=False)
class Chunk:
    """Rows `start` to `stop` (absolute positions) of one sequence in one step.

    The last rows may be `drafts`, tokens that are guessed: all rows from the newest token on are then judged.
    `want` says which of them need logits: "last" (a token is sampled), "all" (scoring), "none" (more chunks
    follow). Rows before `fresh` are there to rebuild windows: their global entries are cached already.
    `saves`: (position, slot) pairs; the state as it is at that position is kept in that slot too. With
    `unknown` the token of the last row is still on the device. A fork has no rows: it samples from the last
    row of its `origin`, and afterwards gets copies of the origin's (slot, last block). `guess`: a draft
    proposes what comes next.
    """

    seq: Sequence
    start: int
    stop: int
    want: str
    fresh: int
    saves: Seq[tuple[int, int]] = ()
    unknown: bool = False
    origin: Chunk | None = None
    source: tuple[int, int] = (0, 0)
    drafts: Seq[int] = ()
    guess: bool = True

    @property
    def rows_wanted(self) -> int:
        """How many rows of logits it asks the model for."""
        if self.want == "none" or self.origin is not None:
            return 0
        return 1 + len(self.drafts) if self.want == "last" else self.stop - self.start

    @property
    def tokens(self) -> list[int]:
        """The ids of its sequence up to `stop` at least."""
        return self.seq.tokens + list(self.drafts) if self.drafts else self.seq.tokens


@dataclass(slots=True)
class Copies:
    """Whole state slots and blocks to copy before a step, target -> source; all are read before any is
    written. After that, those to wipe (canary.py) are filled with NaN."""

    slots: dict[int, int] = field(default_factory=dict)
    blocks: dict[int, int] = field(default_factory=dict)
    wipe_slots: list[int] = field(default_factory=list)
    wipe_blocks: list[int] = field(default_factory=list)

    def slot(self, source: int, target: int) -> None:
        """Copy a slot, as the copies before this one leave it."""
        self.slots[target] = self.slots.get(source, source)

    def block(self, source: int, target: int) -> None:
        """Copy a block, as the copies before this one leave it."""
        self.blocks[target] = self.blocks.get(source, source)

    def __bool__(self) -> bool:
        return bool(self.slots or self.blocks or self.wipe_slots or self.wipe_blocks)


@dataclass(frozen=True)
class StepPlan:
    """One step: prompt chunks (`kind` "prefill") or one row of every running sequence ("decode")."""

    kind: str
    chunks: list[Chunk]
    copies: Copies = field(default_factory=Copies)

    @property
    def rows(self) -> int:
        """Rows that the model computes in this step."""
        return sum(chunk.stop - chunk.start for chunk in self.chunks)


@dataclass(slots=True)
class Round:
    """What a step with a draft gave a sequence: the tokens that hold, in order, and a proposal for the
    next."""

    sampled: list[Sampled]
    proposal: Proposal | None = None

    @property
    def error(self) -> str | None:
        """Why no token could be chosen, if so."""
        return self.sampled[-1].error


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What became of one proposal: the logits of the confidence in its guesses, how many of them were judged,
    and how many held."""

    request_id: str
    confidence: list[float]
    judged: int
    held: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token chosen for one row, or the reason why none could be.

    `logprob` and `top` (pairs of id and log-probability, most probable first) are of the model's own
    distribution, before bias, penalties, temperature and filters; None when not asked for.
    """

    token_id: int | None
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None
    error: str | None = None


@dataclass(frozen=True)
class StepResult:
    """What a step gave, one entry per chunk of its plan: Sampled for "last" (with a draft: Round), a tensor
    for "all", None for "none".

    `error` is set when the whole step failed; it then ends all of its requests.
    """

    outputs: list
    error: str | None = None


@dataclass(slots=True)
class TokenEvent:
    """One token of one request on its way out.

    `text` is what this token added; it may be empty (half a character, a possible stop string) and the next
    event brings the rest. The last event has a `finish_reason`, and no `token_id` if it is an abort or an
    error.
    """

    request_id: str
    token_id: int | None
    text: str
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None
    finish_reason: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Usage:
    """Counts in tokens; `cached_tokens` of the prompt came from the prefix cache; `ttft_s` from submission to
    the first token; `decode_tok_s` over the tokens after it; `rounds` steps verified `drafted` guesses of the
    draft, `accepted` of them held."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    ttft_s: float | None
    decode_tok_s: float | None
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Result:
    """A finished request. `token_ids` has every generated token, a final stop token too; `text` leaves that
    out.

    `chat` also splits the text: `reasoning` (None when there was none), `tool_calls` (OpenAI's shape), and
    `text` is the answer alone. `error` says what went wrong when `finish_reason` is "error".
    """

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: str
    usage: Usage
    seed: int
    logprobs: list[Sampled] | None = None
    error: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict] | None = None


@dataclass(frozen=True)
class StepRecord:
    """Times of one step in microseconds; the newest 4,096 are in `Engine.trace()`.

    ended_s: when it was booked, in seconds of `time.perf_counter`; the time between two of them is a step's.
    """

    kind: str
    rows: int
    sequences: int
    plan_us: float
    launch_us: float
    wait_us: float
    commit_us: float
    tokens: int
    ended_s: float


# ---- validation of SamplingParams ----------------------------------------------------------------


def _number(
    params: SamplingParams, name: str, low: float, high: float, *, above: bool = False, kind: type = float
):
    """Check one numeric field: a number of its kind inside [low, high], or above low when `above`."""
    value = getattr(params, name)
    if value is None:
        return
    types = int if kind is int else (int, float)
    inside = isinstance(value, types) and not isinstance(value, bool) and low <= value <= high
    if not inside or (above and value == low):
        word = "an integer" if kind is int else "a number"
        bounds = f"above {low}" if above else f"at least {low}"
        bounds += "" if high == math.inf else f" and at most {high}"
        raise RequestError(f"{name} is {value!r}; it must be {word} {bounds}", param=name)
    if kind is float and not math.isfinite(value):
        raise RequestError(f"{name} is {value!r}; it must be finite", param=name)


def _stop_strings(stop: str | Seq[str] | None) -> tuple[str, ...]:
    """Normalise `stop` to a tuple of non-empty strings, 16 at most."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > 16 or not all(isinstance(s, str) and s for s in strings):
        raise RequestError(
            f"stop is {stop!r}; it must be a non-empty string or a list of at most 16 of them", param="stop"
        )
    return strings


def _token_ids(ids: Seq[int] | None) -> tuple[int, ...]:
    """Normalise `stop_token_ids` to a tuple of non-negative ints; the vocabulary is checked when
    submitted."""
    found = () if ids is None else tuple(ids) if isinstance(ids, (list, tuple, set, frozenset)) else ("",)
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in found):
        raise RequestError(
            f"stop_token_ids is {ids!r}; it must be a list of token ids", param="stop_token_ids"
        )
    return found


def constraint(body: Mapping[str, Any]) -> Constraint | None:
    """What a request body asks of the text: vLLM's structured_outputs or guided_*, or OpenAI's
    response_format."""
    asked = {f"guided_{kind}": {kind: body.get(f"guided_{kind}")} for kind in STRUCTURES}
    asked = {name: value for name, value in asked.items() if value != {name[7:]: None}}
    if body.get("structured_outputs") is not None:
        asked["structured_outputs"] = body["structured_outputs"]
    form = body.get("response_format")
    if isinstance(form, Mapping) and form.get("type") in ("json_object", "json_schema"):
        named = form.get("json_schema") if form["type"] == "json_schema" else {"schema": {"type": "object"}}
        if not isinstance(named, Mapping) or named.get("schema") is None:
            raise RequestError(
                "response_format needs json_schema with a name and a schema", param="response_format"
            )
        asked["response_format"] = {"json": named["schema"]}
    if len(asked) > 1:
        names = list(asked)
        raise RequestError(f"{names[0]} and {names[1]} can't be given together", param=names[1])
    found = [_constraint(value, name) for name, value in asked.items()]
    return found[0] if found else None


def _constraint(value: Any, name: str = "structured_outputs") -> Constraint | None:
    """Normalise what a text has to follow; whether it can be compiled is seen when it is submitted."""
    if value is None or isinstance(value, Constraint):
        return value
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} is {value!r:.80}; it must be an object", param=name)
    given = [(k, v) for k, v in dict(value).items() if v is not None and v is not False]
    if len(given) != 1 or given[0][0] not in STRUCTURES:
        raise RequestError(
            f"{name} must hold exactly one of {', '.join(STRUCTURES)}; it holds {[k for k, _ in given]}",
            param=name,
        )
    kind, what = given[0]
    if kind == "json_object":
        kind, what = "json", {"type": "object"}
    try:
        text = what if isinstance(what, str) else json.dumps(what)
        good = _good(kind, what, text)
    except (TypeError, ValueError, RecursionError):
        good = False
    if not good:
        raise RequestError(f"{name} must be {_STRUCTURES[kind]}, not {what!r:.80}", param=name)
    return Constraint(kind, text, field=name)


_STRUCTURES = {
    "json": "a JSON schema (an object, or its text)",
    "choice": "a list of texts, none of them empty",
    "regex": "a pattern that is not empty",
    "grammar": "the text of an EBNF",
}


def _good(kind: str, what: Any, text: str) -> bool:
    """Whether a constraint has the type that its kind needs."""
    if kind == "json":
        return isinstance(json.loads(text), (dict, bool))
    if kind == "choice":
        return isinstance(what, (list, tuple)) and bool(what) and all(isinstance(s, str) and s for s in what)
    return isinstance(what, str) and bool(what)


def _bias(bias: Mapping | None) -> dict[int, float]:
    """Normalise `logit_bias`: JSON has string keys, so "42" is taken as 42."""
    try:
        pairs = {int(k): float(v) for k, v in (bias or {}).items()}
    except (AttributeError, TypeError, ValueError):
        pairs = {-1: 0.0}
    if not all(k >= 0 and -100 <= v <= 100 for k, v in pairs.items()):
        raise RequestError(
            f"logit_bias is {bias!r}; it must map token ids to numbers from -100 to 100", param="logit_bias"
        )
    return pairs
