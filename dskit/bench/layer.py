"""`dskit bench layer`: single layers of a model in the steps that it runs, beside their floors.

Idea: the runner lays out a decode step of so many requests, whose caches a prompt has filled, and a step that
brings a whole prompt. The model runs it once; what each layer is handed then is kept, and that layer alone
is called with it again: by the kernels that a user gets, by the formulas, and by the compiler.

Compiled, each op of the layer is one program, but for the loop over the experts that tokens chose, which no
compiler can know; its products are programs again.

On a GPU the calls are captured in a CUDA graph and the L2 is emptied before each replay; one that cannot be
captured, as the formulas that ask the GPU for counts, is timed call by call, its launches included.

Shapes: a row is a layer in a step: requests, new rows of each, and what the last of them sees (context).
Units: microseconds of one call, the median; `of_floor` is the floor over the kernels' time.
Errors: ValueError for a layer that the model does not have, or a context that it cannot hold.
Numerics: requests share the words before their last token, so that they attend alike and are routed apart;
`experts` is how many of the layer's they met.
Source: kernels.md section 5 for the floors (engine/plan.py).
"""

from __future__ import annotations

import contextlib
import copy
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import torch

from dskit import checkpoint, ops
from dskit.bench import floors
from dskit.bench.environment import deliver, header, say
from dskit.bench.steps import flags, model_name, show
from dskit.bench.timing import Device, Timed, interleave, said
from dskit.engine.config import EngineConfig
from dskit.engine.host import current
from dskit.engine.plan import Plan
from dskit.engine.runner import ModelRunner, Work
from dskit.engine.seq import Copies
from dskit.model import Block, Model

Report = dict[str, Any]
WAYS = {"us": None, "torch_us": "torch", "compile_us": "compile"}  # column -> the ops' implementation
CHUNK = 4096  # rows of a step that fills caches
INTERVAL = ("one layer's forward in a step; in a CUDA graph behind a flushed L2 where it can be captured, "
            "else between events, launches included; on a CPU by the clock")


def main(args: Any, command: str) -> int:
    """Measure, print a table or one JSON document, and keep the result where `--result-dir` says."""
    with current(checkpoint.default_device(args.device)):
        report = measure(args)
    return deliver(report, args, f"{model_name(args)}-layer", command, show)


def measure(args: Any) -> Report:
    """The whole report for parsed flags (`dskit.flags.LayerArgs`)."""
    model = checkpoint.load(args.model, device=args.device, numerics=args.numerics, seed=args.seed)
    config, device = model.config, model.norm.weight.device
    layers = args.layers or range(config.num_hidden_layers)
    if wrong := [layer for layer in layers if layer >= config.num_hidden_layers]:
        raise ValueError(f"--layers has {wrong[0]}; {args.model} has 0 to {config.num_hidden_layers - 1}")
    if max(args.context_len + 1, args.prompt_len) > config.max_position_embeddings:
        raise ValueError(f"{args.model} holds {config.max_position_embeddings} tokens; ask for less with "
                         "--context-len or --prompt-len")
    env = header(device, *flags(args), INTERVAL) | {"config": asdict(config)}
    on = floors.machine(torch.cuda.get_device_name(device) if device.type == "cuda" else None)
    plan = Plan(config, 1, on) if on and device.type == "cuda" else None
    clock = Device() if device.type == "cuda" else Host()
    runner, works = steps(model, args)
    return {"bench": "layer", "env": env, "model": model_name(args),
            "rows": [row for work in works for row in _rows(runner, work, layers, plan, clock, args.compile)]}


# ---- the steps ---------------------------------------------------------------------------------------------

def steps(model: Model, args: Any) -> tuple[ModelRunner, list[list[Work]]]:
    """(a runner with filled caches, its work: a decode step per number of requests, and a whole prompt)."""
    most, context = max(args.requests), args.context_len
    cfg = EngineConfig.of(model.config, max_num_seqs=most, max_model_len=max(context, args.prompt_len) + 1)
    each = -(-cfg.max_model_len // cfg.block_size)
    runner = ModelRunner(model, num_blocks=each * most, block_size=cfg.block_size, num_slots=most,
                         enforce_eager=True)
    draw = random.Random(args.seed).choices
    words = draw(range(3, model.config.vocab_size), k=max(context, args.prompt_len))
    blocks = [list(range(1 + each * i, 1 + each * (i + 1))) for i in range(most)]
    for start in range(0, context, CHUNK):
        stop = min(start + CHUNK, context)
        runner.run([Work(1, blocks[0], words, start, stop, context, want="none")])
    newest = draw(range(3, model.config.vocab_size), k=most)
    work = [Work(1 + i, blocks[i], [*words[:context], newest[i]], context, context + 1, context)
            for i in range(most)]
    same = {block: source for mine in blocks[1:] for block, source in zip(mine, blocks[0], strict=True)}
    runner.run(work, Copies(slots=dict.fromkeys(range(2, most + 1), 1), blocks=same))
    prompt = Work(1, blocks[0], words, 0, args.prompt_len, args.prompt_len)
    return runner, [*(work[:count] for count in args.requests), [prompt]]


@torch.inference_mode()
def _rows(runner: ModelRunner, work: list[Work], layers: Iterable[int], plan: Plan | None,
          clock: Device | Host, compiled: bool) -> Iterator[Report]:
    """One row for each layer of a step."""
    rows, context = work[0].stop - work[0].start, work[0].stop
    phase = "decode" if rows == 1 else "prefill"
    with ops.step(phase):
        handed, met = _handed(runner, work)
    for layer in layers:
        say(f"{phase}, {len(work)} x {rows} rows, layer {layer}")
        block, args = runner.model.layers[layer], handed[layer]
        found = _times(lambda: block(*_again(args)), phase, clock, compiled)  # noqa: B023 - called in this turn
        told = [f"{way or 'kernels'} {found[column]:.0f} us" for column, way in WAYS.items() if found[column]]
        say(", ".join(told))
        floor = plan and 1e6 * plan.layer(layer, len(work), context, rows, met[layer])
        yield {"layer": layer, "phase": phase, "requests": len(work), "rows": rows, "context": context,
               "experts": met[layer], "floor_us": floor, "of_floor": floor and floor / found["us"], **found}


def _handed(runner: ModelRunner, work: list[Work]) -> tuple[dict[int, tuple], dict[int, int]]:
    """(what each layer is called with, how many experts it met) in a step."""
    handed: dict[int, tuple] = {}
    met: dict[int, int] = {}

    def enter(block: Block, args: tuple) -> None:
        handed[block.layer] = _again(args)

    def see(op: ops.Op, args: tuple, kwargs: dict, result: Any) -> None:
        if op.name == "moe.gate":
            met[max(handed)] = result[0].unique().numel()

    hooks = [block.register_forward_pre_hook(enter) for block in runner.model.layers]
    with ops.watch(see):
        runner.model.hidden(runner.step(work), runner.memory)
    for hook in hooks:
        hook.remove()
    return handed, met


def _again(args: tuple) -> tuple:
    """A layer's arguments (state, step, memory, shared), of which it may change the first and the last."""
    state, step, memory, shared = args
    return replace(state, taps=None), step, memory, copy.copy(shared)


# ---- their times -------------------------------------------------------------------------------------------

class Host:
    """Times calls on a CPU."""

    def prepare(self, calls: list[Callable[[], Any]]) -> Timed:
        """The call between two readings of the clock, after one that is not counted."""
        def sample() -> float:
            begin = time.perf_counter()
            calls[0]()
            return 1e6 * (time.perf_counter() - begin)

        return Timed(calls, sample, False, 1, (sample(), sample())[1])


def _times(call: Callable[[], Any], phase: str, clock: Device | Host, compiled: bool) -> Report:
    """Microseconds of a call each way, None where a way failed; whether the kernels' call was captured."""
    contenders: dict[str, Timed] = {}

    def under(way: str | None) -> None:
        with ops.use(way) if way else contextlib.nullcontext(), ops.step(phase):
            call()

    if compiled:
        torch._dynamo.config.recompile_limit = 256  # the experts' products have as many shapes as rows

    for column, way in WAYS.items():
        if way == "compile" and not compiled:
            continue
        try:
            contenders[column] = clock.prepare([lambda way=way: under(way)])
        except Exception as error:
            if column == "us":
                raise
            say(f"left out: {way}: {said(error)}")
    interleave(contenders, 10)
    found = {column: median(timed.samples) for column, timed in contenders.items()}
    return {column: found.get(column) for column in WAYS} | {"captured": contenders["us"].graph}
