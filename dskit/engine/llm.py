"""LLM: a model, its tokenizer and its engine in one object; the only class a notebook needs.

    with LLM("demo") as llm:
        print(llm.chat("What is a harbour?").text)

Shapes: prompts are text, or lists of token ids; `logits` gives float32 [tokens, vocab].
State: holds the model and its caches until `close`. `generate`, `chat` and `logits` take the steps in the
calling thread; `submit` and `stream` start the engine's thread, and any number of callers may then share one
LLM.
Errors: RequestError (seq.py) and chat.ChatError for requests that can't be served, both ValueErrors with
`param` and `status`; EngineConfigError, ConfigError and the loader's errors at the start. A request that
fails later has a Result with finish_reason "error" and the cause in `error`; `logits` raises it as
RuntimeError.
Source: engine.md section 3; README.md of the design, decisions 2, 4, 14, 16.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dskit import chat, checkpoint, ops
from dskit.config import PRESETS
from dskit.engine import engram, exchange, ranks, spec
from dskit.engine.config import EngineConfig
from dskit.engine.dist import Group, GroupError, Parallel
from dskit.engine.exchange import Peers
from dskit.engine.grammar import Grammars
from dskit.engine.host import current
from dskit.engine.loop import Engine, Handle
from dskit.engine.pools import Blocks, Slots, bytes_by_kind
from dskit.engine.ranks import Seat
from dskit.engine.rebalance import Rebalancer
from dskit.engine.runner import ModelRunner
from dskit.engine.seq import Constraint, RequestError, Result, SamplingParams, TokenEvent, constraint
from dskit.model import Model

logger = logging.getLogger("dskit.engine")
Prompts = str | Seq[int] | Seq[str] | Seq[Seq[int]]


@dataclass(frozen=True)
class Swap:
    """What `LLM.swap` did: {op: (before, after)}, CUDA graphs captured anew, milliseconds."""

    changed: dict[str, tuple[str, str]]
    graphs: int
    waited_ms: float
    took_ms: float

    def __repr__(self) -> str:
        ways: dict[str, list[str]] = {}
        for op, (before, after) in self.changed.items():
            ways.setdefault(f"{before} -> {after}", []).append(op)
        what = "; ".join(f"{way}: {', '.join(names)}" for way, names in ways.items()) or "nothing changed"
        graphs = f"{self.graphs} CUDA graphs captured again" if self.graphs else "no CUDA graphs to capture"
        return f"{what}; waited {self.waited_ms:.1f} ms for a step, took {self.took_ms:.1f} ms, {graphs}"


class LLM:
    """A preset's name (`demo`, `tiny`, ...), a checkpoint folder or a ready Model, made to answer.

    device           "cpu", "cuda", ...; None: a GPU if there is one
    numerics         "release" rounds as the release does, "token" scales experts' inputs by token, "exact"
                     computes in float32
    seed             of the random weights of presets that ship none
    dtype            of the operands of products, where not the default
    batch_invariant  the same bits for a request in any batch; slower
    engram_placement where the n-gram tables lie: device, shard, host, mmap; None: where they fit
    tokenizer        None: the checkpoint's tokenizer.json; one token per byte where it has none
    dp, ep           ranks, each a process with its own requests, and how many of them share the experts
    distributed_timeout  seconds without a sign of a rank after which the group of ranks ends
    progress         gets a line every two seconds while weights are loaded
    others           EngineConfig: max_model_len, max_num_seqs, max_num_batched_tokens, replay, ...

    A ready Model brings its own device, numerics and tables; the first five are not read then. With dp > 1
    this process is rank 0, and the others are started, on this node, unless torchrun has (ranks.py).
    """

    engram: engram.Placement | None = None  # where the tables lie, of a model that has some

    def __init__(
        self,
        model: str | Path | Model = "demo",
        device: str | None = None,
        numerics: str = "release",
        seed: int = 0,
        *,
        dtype: torch.dtype | None = None,
        tokenizer: chat.Tokenizer | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        num_blocks: int | None = None,
        block_size: int | None = None,
        batch_invariant: bool = False,
        replay: str = "off",
        exact_prefix: bool = True,
        engram_placement: str | None = None,
        dp: int = 1,
        ep: int = 1,
        distributed_timeout: float = 60.0,
        progress: Callable[[str], None] | None = None,
        **settings: Any,
    ):
        asked = settings | {k: v for k, v in locals().items() if k not in ("self", "settings", "progress")}
        parallel = Parallel(asked.pop("dp"), asked.pop("ep"), asked.pop("distributed_timeout"))
        self.name = "model" if isinstance(model, Model) else str(model)
        if parallel.dp == 1:
            with current(_device_of(model, device)):
                self._open(**asked, loading=ranks.Loading(progress))
            return
        if isinstance(model, Model):
            raise GroupError(f"dp is {dp}, but a ready Model is on one device; name it, and each rank loads "
                             "its part")
        with ranks.take_seat(parallel, asked) as seat, current(seat.device):
            group = ranks.join(seat, parallel)
            loading = ranks.Loading(progress, seat)
            self._open(**asked | {"device": str(seat.device)}, seat=seat, group=group, loading=loading)
            if seat.device.type == "cuda":
                loading.say("taking the first steps, for which kernels are compiled")
                self.engine.warm_up()
            loading.meet()
            self.engine.start()
            if seat.rank:
                ranks.obey(self.engine, seat.links[0])

    def _open(
        self,
        model: str | Path | Model,
        *,
        tokenizer: chat.Tokenizer | None,
        device: str | None,
        numerics: str,
        seed: int,
        dtype: torch.dtype | None,
        batch_invariant: bool,
        engram_placement: str | None,
        loading: Callable[[float], None],
        seat: Seat | None = None,
        group: Group | None = None,
        **settings: Any,
    ) -> None:
        """Load the model, or this rank's part of it, and make the engine."""
        peers, placement = group.peers if group else Peers(), None
        if isinstance(model, Model):
            if engram_placement is not None:
                raise engram.EngramError(f"engram_placement is {engram_placement!r}, but a ready Model's "
                                         "tables stay where they are; name a preset or a folder")
        else:
            placement = engram.choose(
                checkpoint.configuration(model),
                checkpoint.default_device(device),
                engram_placement,
                files=not checkpoint.is_drawn(model),
                ranks=engram.Ranks.of(group.tables, group.loading) if group else None,
            )
        ready = isinstance(model, Model)
        shape = model.config if ready else checkpoint.configuration(model)
        on = model.norm.weight.device if ready else checkpoint.default_device(device)
        cfg = EngineConfig.of(shape, gpu=on.type == "cuda", engram_placement=placement and placement.name,
                              ep=peers.size, **settings)
        if not isinstance(model, Model):
            held = partial(exchange.held, peers=peers, redundant=cfg.num_redundant_experts)
            model = checkpoint.load(
                model,
                device=device,
                numerics=numerics,
                dtype=dtype,
                seed=seed,
                batch_invariant=batch_invariant,
                tables=placement,
                held=held if peers.size > 1 else None,
                progress=loading,
            )
        rebalancer = Rebalancer.of(model, peers, cfg) if peers.size > 1 else None
        if peers.size > 1:
            group.meet()  # one may have loaded long before another
            each = 1 + model.config.dspark_block_size * cfg.drafts  # rows of a sequence that decodes
            peers.open(model, spec.padded(max(cfg.max_num_batched_tokens, cfg.max_num_seqs * each)))
        # a graph repeats no collective of torch.distributed; kernels that write to peers it does
        repeats = peers.size == 1 or peers.direct(model.numerics)
        repeats = repeats and not (placement and placement.joint)
        self.model, self.config, self.device = model, model.config, model.norm.weight.device
        self.numerics, self.dtype = model.numerics.name, model.numerics.dtype
        self.tokenizer = tokenizer or self._tokenizer()
        if cfg.overlap is None:
            cfg = replace(cfg, overlap=self.device.type == "cuda")
        if cfg.drafts:
            cfg = replace(cfg, **self._measured(cfg))
            if settings.get("speculate") == "scheduled" and cfg.step_cost is None:
                logger.warning("no cost of rows is known here, so every guess is verified; measure it with "
                               "`dskit bench spec --save`")
        runner = ModelRunner(
            model,
            num_blocks=cfg.num_blocks,
            block_size=cfg.block_size,
            num_slots=cfg.max_num_seqs + cfg.num_snapshots,
            replay=cfg.replay,
            keep=cfg.keep_tokens,
            drafts=cfg.drafts,
            enforce_eager=cfg.enforce_eager or (group is not None and not repeats),
            peers=peers if peers.size > 1 else None,
            engram=placement and placement.serve(model),
        )
        self.engram = runner.engram
        defaults = self.tokenizer.generation
        eos = defaults.get("eos_token_id", model.config.eos_token_id)
        eos = eos if isinstance(eos, list) else [eos]
        make = Engine if group is None else ranks.engine_at(seat, group, rebalancer)
        self.engine = make(
            runner,
            cfg,
            Blocks(cfg.num_blocks, cfg.block_size),
            Slots(cfg.max_num_seqs),
            vocab_size=model.config.vocab_size,
            eos_ids=eos,
            decode=self.tokenizer.decode,
            defaults=defaults,
            grammars=Grammars(self.tokenizer, model.config.vocab_size, eos, self.family),
        )

    # ---- text in, text out -------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompts, params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> Result | list[Result]:
        """Continue one prompt (gives a Result) or a list of them, served together (gives a list, in order).

        Text gets the begin-of-sentence token in front; ids are taken as they are. If one prompt can't be
        served, RequestError is raised and none is.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        batch = [prompts] if single else list(prompts)
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(batch)
        if len(each) != len(batch):
            raise RequestError(
                f"{len(batch)} prompts, but {len(each)} params; give one, or one for each", param="params"
            )
        ids = [self.encode(prompt) for prompt in batch]
        handles = self.engine.submit_all(zip(ids, each, strict=True))
        try:
            results = [handle.result() for handle in handles]
        finally:  # after an error or Ctrl-C nothing of this call goes on
            self._abort_all(handles)
        return results[0] if single else results

    def stream(self, prompt: str | Seq[int], params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Continue one prompt, token by token; leaving the loop early frees everything."""
        return self._events(self.submit(prompt, params))

    def submit(
        self,
        prompt: str | Seq[int],
        params: SamplingParams | None = None,
        *,
        start: bool = True,
        **options: Any,
    ) -> Handle:
        """Queue one prompt and return at once; the engine's thread serves it unless `start` is False.

        `options`: request_id, and those of Engine.submit_all: priority, timeout, cache_salt.
        """
        handle = self.engine.submit(self.encode(prompt), params, **options)
        if start:
            self.engine.start()
        return handle

    def submit_all(
        self, work: list[tuple[Seq[int], SamplingParams]], names: list[str], **options: Any
    ) -> list[Handle]:
        """Queue the choices of one request, all of them or none; one prompt is computed once for all."""
        handles = self.engine.submit_all(work, names, **options)
        self.engine.start()
        return handles

    # ---- conversations -----------------------------------------------------------------------------------

    def chat(
        self,
        messages: str | list[dict] | dict,
        *,
        params: SamplingParams | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Result | Iterator[dict]:
        """Answer a conversation: a question, a list of messages, or a whole chat-completions body.

        `fields` are more of the body (tools, thinking, reasoning_effort, temperature, ...); `params`
        overrides its sampling values. Gives a Result with `text`, `reasoning` and `tool_calls`; with `stream`
        the deltas of OpenAI's shape (`reasoning_content`, `content`, `tool_calls`) as they come.
        """
        prompt, sampling = self.render(messages, params=params, **fields)
        handle = self.submit(prompt.ids, sampling, start=stream)
        if stream:
            return self._deltas(handle, chat.StreamParser(prompt))
        try:
            result = handle.result()
        finally:
            self._abort_all([handle])
        message = chat.parse(prompt, result.text, "length" if result.finish_reason == "length" else "stop")
        calls = message.get("tool_calls") or None
        reason = "tool_calls" if calls and result.finish_reason == "stop" else result.finish_reason
        return replace(
            result,
            text=message.get("content") or "",
            reasoning=message.get("reasoning_content") or None,
            tool_calls=calls,
            finish_reason=reason,
        )

    def render(
        self, messages: str | list[dict] | dict, *, params: SamplingParams | None = None, **fields: Any
    ) -> tuple[chat.Prompt, SamplingParams]:
        """The prompt of a conversation, and its sampling values: of params, body, checkpoint, in turn."""
        body = (
            dict(messages)
            if isinstance(messages, dict)
            else {
                "messages": [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
            }
        )
        body |= fields
        if body.get("logit_bias"):
            body["logit_bias"] = {str(token_id): bias for token_id, bias in body["logit_bias"].items()}
        prompt = chat.render(body, self.tokenizer, family=self.family)
        values = prompt.sampling | {"max_tokens": prompt.max_tokens(self.max_model_len)}
        values["logprobs"] = SamplingParams.from_body(body).logprobs
        values["structured_outputs"] = _constraint(prompt, body)
        values |= params.given() if params else {}
        return prompt, SamplingParams(**values)

    @property
    def family(self) -> str:
        """Whose chat format it has: "v4.1" or "v4"."""
        return "v4.1" if self.config.is_v41 else "v4"

    # ---- one level down ----------------------------------------------------------------------------------

    def logits(self, token_ids: Seq[int]) -> torch.Tensor:
        """Logits of every position, float32 [tokens, vocab] on the CPU; row t scores the token after t."""
        handle = self.engine.submit(token_ids, scoring=True)
        try:
            result = handle.result()
        finally:
            self._abort_all([handle])
        if result.finish_reason == "error":
            raise RuntimeError(result.error)
        return handle.logits

    def encode(self, prompt: str | Seq[int]) -> list[int]:
        """Ids of a prompt: text behind the begin-of-sentence token, ids as they are."""
        if not isinstance(prompt, str):
            return list(prompt)
        if not prompt:
            raise RequestError(
                "the prompt is empty; give at least one character", param="prompt", code="empty_prompt"
            )
        return [self.tokenizer.bos_id, *self.tokenizer.encode(prompt)]

    def step(self) -> list[TokenEvent]:
        """Take one step of the engine by hand; [] when there was nothing to do."""
        return self.engine.step()

    def abort(self, request_id: str) -> bool:
        """End a request and free what it holds; False if there is none of that name (any more)."""
        found = self.engine.cancel(request_id)
        self.engine.settle()
        return found

    def swap(
        self, choice: str | dict[str, str] | None = None, *, phase: str | None = None, **groups: str
    ) -> Swap:
        """Choose kernels as `dskit.use` does, for good, while requests go on; gives what changed.

        Waits for the running step, swaps, captures CUDA graphs anew and reuses no prefix that other kernels
        computed. Raises what `use` raises, and then nothing has changed; RuntimeError after `close`.
        """
        if self.engine.closed:
            raise RuntimeError("this LLM is closed; dskit.use chooses kernels without one")
        asked = time.perf_counter()

        def change() -> Swap:
            begin, before = time.perf_counter(), ops.selection()
            ops.use(choice, phase=phase, **groups)
            after = ops.selection()
            changed = {op: (before[op], after[op]) for op in after if before[op] != after[op]}
            graphs = self.engine.runner.graphs
            captured = graphs.recapture() if graphs else 0
            self.engine.forget()
            return Swap(changed, captured, 1e3 * (begin - asked), 1e3 * (time.perf_counter() - begin))

        return self.engine.between_steps(change)

    def stats(self) -> dict[str, int]:
        """running, waiting, blocks_free (cached ones too), blocks_total, blocks_cached, slots_free, steps,
        tokens, preemptions, evictions; of a model with Engram also engram_bytes, engram_lookups,
        engram_wait_us; with CUDA graphs graph_steps, eager_steps (of decoding), graph_prefills,
        eager_prefills (runs of layers over prompts' rows), graph_failures, graph_capture_ms; of ranks that
        share experts what `Rebalancer.stats` says."""
        return self.engine.stats() | (self.engram.stats() if self.engram else {})

    def expert_rows(self) -> torch.Tensor:
        """Rows that each expert received [layers, experts] in the decode steps before the last look.

        Ranks that share experts count them, and look every 128 steps. RuntimeError on one rank.
        """
        rebalancer = getattr(self.engine, "rebalancer", None)
        if rebalancer is None:
            raise RuntimeError("only ranks that share experts count what each receives; with ep=1, look with "
                               'dskit.tap(llm, "layers.*.ffn.gate")')
        return rebalancer.rows_LE

    def cache_bytes(self) -> dict[str, int]:
        """Bytes of the caches by kind: window, global, index, draft, open groups of the compressor."""
        return bytes_by_kind(self.engine.runner.memory, self.config.num_hidden_layers)

    @property
    def max_model_len(self) -> int:
        """The longest sequence, prompt and answer together."""
        return self.engine.cfg.max_model_len

    def close(self) -> None:
        """End every request and free the model and its caches; calling it twice is fine."""
        self.engine.close()
        if self.engram is not None:
            with current(self.device):
                self.engram.close()
        self.model = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.model is None else f"{self.stats()}"
        return f"LLM({self.name!r}, device={str(self.device)!r}, numerics={self.numerics!r}, {state})"

    # ---- inside ------------------------------------------------------------------------------------------

    def _measured(self, cfg: EngineConfig) -> dict[str, Any]:
        """What `dskit bench spec --save` has found out for this model and machine, as settings not given."""
        found: dict[str, Any] = {}
        calibration = None if self.drawn else checkpoint.locate(self.name) / spec.CALIBRATION
        if calibration and cfg.draft_temperatures is None and calibration.is_file():
            block = self.config.dspark_block_size
            found["draft_temperatures"] = spec.Calibration.load(calibration, block).temperatures
        cost = spec.cost_file(self.name, str(self.device))
        if cfg.step_cost is None and cost.is_file():
            found["step_cost"] = spec.StepCost.load(cost)
        return found

    @property
    def drawn(self) -> bool:
        """Whether the model comes from no files: its weights are random, or it was given ready."""
        known = self.name in PRESETS and self.name != "demo"
        return self.name == "model" or self.name.startswith("slice") or known

    def _tokenizer(self) -> chat.Tokenizer:
        """The tokenizer of the files that the model came from; where they have none, one token per byte."""
        folder = None if self.drawn else checkpoint.locate(self.name)
        if folder is None or not (folder / "tokenizer.json").is_file():
            return chat.Tokenizer.of_bytes(self.config)
        return chat.Tokenizer(folder)

    def _events(self, handle: Handle) -> Iterator[TokenEvent]:
        try:
            yield from handle
        finally:
            self._abort_all([handle])

    def _deltas(self, handle: Handle, parser: chat.StreamParser) -> Iterator[dict]:
        """Deltas of a chat, the role first, and last {"finish_reason": ...}."""
        chunks = parser.start()
        for event in self._events(handle):
            chunks += parser.push(event.text) if event.text else []
            if event.finish_reason:
                chunks += parser.finish(event.finish_reason)
            for choice in (c for chunk in chunks for c in chunk["choices"]):
                if delta := {k: v for k, v in choice["delta"].items() if v is not None}:
                    yield delta
                if choice.get("finish_reason"):
                    kept = event.finish_reason in ("abort", "error", "length")
                    yield {"finish_reason": event.finish_reason if kept else choice["finish_reason"]}
            chunks = []

    def _abort_all(self, handles: list[Handle]) -> None:
        """Cancel those that are not finished, now."""
        left = [handle for handle in handles if not handle.finished]
        for handle in left:
            handle.cancel()
        if left:
            self.engine.settle()


def _device_of(model: str | Path | Model, device: str | None) -> torch.device:
    return model.norm.weight.device if isinstance(model, Model) else checkpoint.default_device(device)


def _constraint(prompt: chat.Prompt, body: dict[str, Any]) -> Constraint | None:
    """What the answer has to follow; tools that are not strict may be called in whatever way."""
    asked, found = constraint(body), prompt.constraint
    if found is None or not found.kind.startswith("tool_call"):
        text = found.schema or None if found else None  # strict schemas are closed there
        if asked is None:
            return None
        return replace(asked, text=text or asked.text, thinking=prompt.thinking)
    if asked is not None:
        raise RequestError(
            f"{asked.field} can't be enforced beside tools; leave one out, or set tool_choice to none",
            param=asked.field,
        )
    strict = any(tool["function"].get("strict") for tool in body["tools"])
    if found.kind == "tool_call" and not strict:
        return None
    field = "tools" if strict else "tool_choice"
    return Constraint(found.kind, found.schema, prompt.thinking, field)
