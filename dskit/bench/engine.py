"""`dskit bench engine`: what a step costs beside the model: scheduler, pools, tree, n-gram tables, idle time.

Idea: the scheduler is timed without a model: requests come and go so that `--running` of them decode at any
time, results are made up, and `plan` and `commit` of every decode step are clocked, text and all. On a GPU
the model decodes for real, with and without CUDA graphs and overlap, and the trace says for how long nothing
ran there: between two passes of the model, and in the gaps inside them. No draft guesses meanwhile. Prompts
of a few lengths are timed likewise, one at a time.
The n-gram tables are put wherever they can lie here (`--ep N` spreads them too), and the model decodes with
each: how long its layers waited for rows; for which share of the time that a lookup takes alone they did not
(`hidden`); how many rows a second come when many are asked for; whether the tokens are those of the first
placement, for which no bit may depend on what runs beside a request.
With `--ep N` the routing of eight answers is recorded, and plans for N ranks are made from every other step
and judged on the steps between; then N ranks share the experts and rebalance them once while they decode, the
draft's too.

Units: microseconds per step; operations per second; `idle_fraction`, between two passes, and `gap_fraction`,
inside them, of the time from the first kernel to the last one, under a trace, which widens gaps; `busy_ms` of
a step or a prompt, while something ran; a balance is the mean over the busiest rank's rows.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from dskit import checkpoint, traces
from dskit.bench.environment import deliver, header, say
from dskit.bench.latency import Prompts
from dskit.chat import Tokenizer
from dskit.checkpoint import locate
from dskit.config import ModelConfig, preset
from dskit.engine import engram, eplb
from dskit.engine.config import EngineConfig
from dskit.engine.host import current
from dskit.engine.llm import LLM
from dskit.engine.pools import Blocks, Slots
from dskit.engine.scheduler import Scheduler
from dskit.engine.seq import Request, Sampled, SamplingParams, Sequence, StepResult
from dskit.engine.text import TextStream
from dskit.viz.notebook import tap

INTERVAL = "Scheduler.plan and Scheduler.commit of a decode step, detokenisation included; no model runs"
REQUESTS = (1, 32, 128)  # that decode while the GPU's idle time is looked at
PROMPTS = (32, 128, 512, 1900)  # tokens, likewise
MARK = "spin_kernel"  # what torch.cuda._sleep runs
NO_GPU = "no NVIDIA GPU here"
PLACED = ("device", "host", "mmap")  # placements that one rank can have
REQUESTING = 8  # requests of a rank that decode while Engram layers wait


def main(args: Any, command: str) -> int:
    """Measure, print a table or one JSON document, and keep the result where `--result-dir` says."""
    return deliver(measure(args), args, "engine", command, show)


def measure(args: Any) -> dict[str, Any]:
    """The whole report for parsed flags (`dskit.flags.EngineArgs`)."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings, defaults = ({"running": a.running, "model": a.model} for a in (args, type(args)()))
    report = {"env": header(device, settings, defaults, INTERVAL)}
    say(f"scheduler, {args.running} running requests")
    report["scheduler"] = scheduler_us(args.running, args.steps, args.seed)
    report["blocks_ops_s"], report["tree_ops_s"] = blocks_ops_s(), tree_ops_s()
    reason = NO_GPU if not torch.cuda.is_available() else "left out by --device cpu"
    report["engram"] = engram_rows(args, torch.device(device))
    report["idle"], report["prompts"] = rows, _ = gpu_rows(args) if device != "cpu" else ([], [])
    report["idle_reason"] = None if rows else reason
    report["eplb_plans"] = plan_rows(args) if args.expert_parallel_size > 1 else []
    report["eplb"] = eplb_rows(args) if args.expert_parallel_size > 1 else []
    report["idle_fraction"] = max((r["idle_fraction"] for r in rows if r["overlap"] and r["graphs"]),
                                  default=None)
    return report


# ---- the scheduler, without a model ----------------------------------------------------------------------


class Traffic:
    """A scheduler with `running` requests that decode; whoever ends is followed by another."""

    def __init__(self, running: int, seed: int):
        config = preset("demo")
        blocks = (running + 1) * 4096 // config.sliding_window // 2 + 16
        most = dict(max_num_seqs=running, max_num_batched_tokens=1 << 20, max_model_len=4096)
        self.cfg = EngineConfig.of(config, num_blocks=blocks, **most)
        self.scheduler = Scheduler(self.cfg, Blocks(blocks, self.cfg.block_size), Slots(running), {1})
        self.decode, self.pieces = Tokenizer(locate("demo")).decode, {}
        self.random, self.ids, self.count = random.Random(seed), range(300, 4000), 0
        for _ in range(running):
            self.arrive()

    def arrive(self) -> None:
        """One request more, of 100 to 1,000 tokens, with an answer of 100 to 1,500."""
        self.count += 1
        prompt = self.random.choices(self.ids, k=self.random.randint(100, 1000))
        params = SamplingParams(ignore_eos=True, max_tokens=self.random.randint(100, 1500)).resolve({}, 4096)
        text = TextStream(self.decode, (), self.pieces)
        self.scheduler.add(Sequence(Request(f"r{self.count}", prompt, params), text))

    def step(self) -> tuple[str, float, float]:
        """(kind, microseconds of plan, of commit) of one step whose results are made up."""
        begin = time.perf_counter()
        plan = self.scheduler.plan()
        planned = time.perf_counter()
        tokens = self.random.choices(self.ids, k=len(plan.chunks))
        result = StepResult([Sampled(token) for token in tokens])
        ready = time.perf_counter()
        events = self.scheduler.commit(plan, result)
        done = time.perf_counter()
        for _ in range(sum(event.finish_reason is not None for event in events)):
            self.arrive()
        return plan.kind, 1e6 * (planned - begin), 1e6 * (done - ready)


def scheduler_us(running: int, steps: int, seed: int) -> dict[str, Any]:
    """Cost of a decode step at so many running requests: medians, and the 99th percentile."""
    traffic = Traffic(running, seed)
    found: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": []}
    while len(found["decode"]) < steps + 20:
        kind, plan, commit = traffic.step()
        found[kind].append((plan, commit))
    rows = found["decode"][20:]  # the first ones fill caches
    both = [plan + commit for plan, commit in rows]
    return {
        "running": running,
        "steps": len(both),
        "median_us": median(both),
        "p99_us": quantiles(both, n=100)[98],
        "plan_median_us": median(plan for plan, _ in rows),
        "commit_median_us": median(commit for _, commit in rows),
        "prefill_median_us": median(plan + commit for plan, commit in found["prefill"]),
    }


def rate(work: Callable[[], int], seconds: float = 0.3) -> float:
    """Operations per second of a call that returns how many it did."""
    count, begin = 0, time.perf_counter()
    while time.perf_counter() < begin + seconds:
        count += work()
    return count / (time.perf_counter() - begin)


def blocks_ops_s() -> float:
    """Blocks handed out and given back per second, eight at a time."""
    pool = Blocks(4096, 128)

    def work() -> int:
        pool.free(pool.alloc(8))
        return 16

    return rate(work)


def tree_ops_s() -> float:
    """Blocks found, held and released per second, in prompts of 64 known blocks."""
    traffic = Traffic(1, 0)
    scheduler, size = traffic.scheduler, traffic.cfg.block_size
    seq = Sequence(Request("r", list(range(64 * size)), SamplingParams()), None)
    seq.blocks, seq.num_computed = scheduler.blocks.alloc(64), 64 * size
    scheduler.tree.publish(seq)

    def work() -> int:
        path = scheduler.tree.find(seq, 64 * size)
        scheduler.tree.hold(path)
        scheduler.tree.release([node.block for node in path])
        return 3 * 64

    return rate(work)


# ---- n-gram tables ---------------------------------------------------------------------------------------


def engram_rows(args: Any, device: torch.device) -> list[dict[str, Any]]:
    """A row for every placement of the model's tables, or of random ones of the sizes that were asked for."""
    config, ranks = checkpoint.configuration(args.model), args.expert_parallel_size
    if not config.engram_layer_ids:
        return []
    found = []
    for large in [grown(config, gigabytes) for gigabytes in args.engram_gb] or [None]:
        with _source(args, large, device) as source:
            rows = [engram_row(args, source, name, 1) for name in PLACED]
            rows += [engram_row(args, source, "shard", ranks)] if ranks > 1 else []
        first = next((row["tokens"] for row in rows if "tokens" in row), None)
        found += [row | {"equal": row.pop("tokens") == first} if "tokens" in row else row for row in rows]
    return found


@contextmanager
def _source(args: Any, large: ModelConfig | None, device: torch.device) -> Iterator[str]:
    """The model, or a folder with a random one that has large tables; ValueError where no disk holds it."""
    if large is None:
        yield args.model
        return
    with tempfile.TemporaryDirectory() as folder:
        need, free = 1.1 * engram.table_bytes(large), shutil.disk_usage(folder).free
        if need > free:
            raise ValueError(f"tables of {need / 1.1e9:.3g} GB are written to {tempfile.gettempdir()} first, "
                             f"which has {free / 1e9:.3g} GB; ask for smaller ones, or set TMPDIR")
        say(f"{args.model}: writing tables of {need / 1.1e9:.3g} GB")
        with current(device):
            yield str(checkpoint.write_random(large, folder, args.seed, device=device))


def grown(config: ModelConfig, gigabytes: float) -> ModelConfig:
    """The same model with n-gram tables of so many 1e9 bytes."""
    rows = gigabytes * 1e9 / (config.engram_head_dim * 33 / 32) / len(config.engram_layer_ids)
    each = int(rows / (config.engram_max_ngram_size - 1) / config.engram_n_heads)
    primes = replace(config, engram_vocab_size=each, raw={}).engram_primes
    return config.replace(engram_vocab_size=each,
                          engram_num_embeddings=tuple(sum(map(sum, sizes)) for sizes in primes))


def engram_row(args: Any, source: str, name: str, ranks: int) -> dict[str, Any]:
    """Bytes and waits of one placement while requests decode; or why it cannot be had here."""
    row = {"placement": name, "ranks": ranks,
           "table_bytes": engram.table_bytes(checkpoint.configuration(source))}
    say(f"{args.model}: n-gram tables of {row['table_bytes'] / 1e9:.3g} GB, {name}")
    settings = dict(max_num_seqs=REQUESTING, max_model_len=1024, speculate="off", batch_invariant=True)
    settings |= dict(dp=ranks, ep=ranks, engram_placement=name)
    try:
        llm = LLM(source, args.device, args.numerics, args.seed, **settings)
    except (engram.EngramError, engram.DoesNotFit) as error:
        return row | {"reason": str(error)}
    with llm, current(llm.device):
        step_ms, wait_us, tokens = waited(llm, args.seed, REQUESTING * ranks, max(1, args.steps // 20))
        report = llm.engram.report() | {"step_ms": step_ms, "wait_us": wait_us, "tokens": tokens}
        if name == "shard" and not report["direct"]:  # rows come by what all ranks do together
            return row | report | {"fetch_us": None, "hidden": None, "rows_per_s": None}
        fetch_us = 1e6 / rate(partial(fetch, llm, REQUESTING)) * fetch(llm, REQUESTING)
        hidden = max(0.0, 1 - sum(wait_us.values()) / fetch_us)
        return row | report | {"fetch_us": fetch_us, "hidden": hidden,
                               "rows_per_s": rate(partial(fetch, llm, 4096))}


def waited(llm: LLM, seed: int, requests: int, steps: int) -> tuple[float, dict[int, float], list[list[int]]]:
    """Milliseconds of a decode step, microseconds that each Engram layer waited in it, and first tokens."""
    handles = decode(llm, requests, seed, prompt=64)
    before, begin, first = llm.engram.report()["wait_us"], time.perf_counter(), llm.engine.steps
    llm.engine.start()
    while llm.engine.steps < first + steps:
        if llm.engine.closed:
            raise RuntimeError(llm.engine.failure)
        time.sleep(0.001)
    taken, step_ms = llm.engine.steps - first, 1e3 * (time.perf_counter() - begin)
    after = llm.engram.report()["wait_us"]
    for handle in handles:
        handle.cancel()
    tokens = [handle.result().token_ids[:8] for handle in handles[:REQUESTING]]
    wait_us = {layer: (us - before.get(layer, 0)) / taken for layer, us in after.items()}
    return step_ms / taken, wait_us, tokens


@torch.inference_mode()
def fetch(llm: LLM, tokens: int) -> int:
    """Look up the n-grams of so many random tokens, in all layers; how many rows that are."""
    config, device, layers = llm.config, llm.device, llm.engram.layers
    grams = torch.randint(config.engram_compressed_vocab_size, (tokens, config.engram_max_ngram_size))
    grams = grams.to(device)
    found = llm.engram.fetch(grams)
    for layer, each in layers.items():
        found.rows(layer) if found is not None else each.embed(each.rows(grams))
    if device.type == "cuda":
        torch.cuda.synchronize()
    return tokens * sum(each.prime.numel() for each in layers.values())


def decode(llm: LLM, requests: int, seed: int, prompt: int) -> list:
    """Handles of so many requests with random prompts, some decode steps after all of them began."""
    rng, ids = random.Random(seed), range(llm.config.vocab_size // 16, llm.config.vocab_size // 2)
    params = SamplingParams(temperature=0.0, max_tokens=512, ignore_eos=True)
    handles = [llm.submit(rng.choices(ids, k=prompt), params, start=False) for _ in range(requests)]
    for handle in handles:
        for event in itertools.islice(handle, 10):
            if event.finish_reason:
                raise RuntimeError(f"a request ended with {event.finish_reason}: {event.error}")
    return handles


# ---- the GPU between two kernels -------------------------------------------------------------------------


def gpu_rows(args: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Idle shares with and without graphs: of decoding at several numbers of requests, of some prompts."""
    rows, prompts = [], []
    settings = dict(max_num_seqs=max(REQUESTS), max_model_len=2048, speculate="off")
    with LLM(args.model, args.device, args.numerics, args.seed, enforce_eager=False, **settings) as llm:
        runner, graphs = llm.engine.runner, llm.engine.runner.graphs
        for requests, captured, overlap in itertools.product(REQUESTS, (False, True), (False, True)):
            say(f"{llm.name}: {_how(requests, captured, overlap)}")
            runner.graphs = graphs if captured else None
            llm.engine.cfg = replace(llm.engine.cfg, overlap=overlap)
            rows.append({"requests": requests, "graphs": captured, "overlap": overlap}
                        | idle_of(llm, requests, args.seed))
        for tokens, captured in itertools.product(PROMPTS, (False, True)):
            say(f"{llm.name}: a prompt of {tokens} tokens, {'graphs' if captured else 'eager'}")
            runner.graphs = graphs if captured else None
            prompts.append({"tokens": tokens, "graphs": captured} | prompt_of(llm, tokens, args.seed))
    return rows, prompts


def _how(requests: int, captured: bool, overlap: bool) -> str:
    return f"{requests} requests, {'graphs' if captured else 'eager'}, {'' if overlap else 'no '}overlap"


def idle_of(llm: LLM, requests: int, seed: int, steps: int = 30) -> dict[str, Any]:
    """Idle shares and milliseconds of so many decode steps, after some that warm up; timed untraced."""
    handles = decode(llm, requests, seed, prompt=256)
    step_ms, shares = _looked_at(llm, llm.step, steps)
    for handle in handles:
        llm.abort(handle.request_id)
    return shares | {"step_ms": step_ms}


def prompt_of(llm: LLM, tokens: int, seed: int, count: int = 8) -> dict[str, float]:
    """Milliseconds to the first token of random prompts of one length, and for how much nothing ran."""
    rng, ids = random.Random(seed), range(llm.config.vocab_size // 16, llm.config.vocab_size // 2)
    once = SamplingParams(temperature=0.0, max_tokens=1)

    def one() -> None:
        handle = llm.submit(rng.choices(ids, k=tokens), once, start=False)
        while not handle.finished:
            llm.step()

    one()  # captures graphs
    ms, shares = _looked_at(llm, one, count)
    return {"ms": ms, "busy_ms": shares["busy_ms"],
            "idle_fraction": shares["idle_fraction"] + shares["gap_fraction"]}


def _looked_at(llm: LLM, work: Callable[[], Any], times: int) -> tuple[float, dict[str, float]]:
    """(milliseconds of `work`, idle shares while it is done as often again under a trace)."""
    ms = _each_ms(work, times)
    with marked(llm), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        _each_ms(work, times)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        prof.export_chrome_trace(str(path))
        shares = idle_shares(json.loads(path.read_text())["traceEvents"])
    return ms, shares | {"busy_ms": shares["busy_ms"] / times}


def _each_ms(work: Callable[[], Any], times: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin) / times


@contextmanager
def marked(llm: LLM) -> Iterator[None]:
    """While open, a kernel that a trace tells by its name runs before and behind every pass of the model."""
    runner, run = llm.engine.runner, llm.engine.runner.run

    def between_marks(*args: Any) -> torch.Tensor:
        torch.cuda._sleep(1)
        logits = run(*args)
        torch.cuda._sleep(1)
        return logits

    runner.run = between_marks
    try:
        yield
    finally:
        del runner.run


def idle_shares(events: list[dict[str, Any]]) -> dict[str, float]:
    """Shares of the time on the GPU in which nothing ran: between passes of the model, and inside them; the
    milliseconds in which something did.

    What a pass waits for before its first kernel or copy counts as between.
    """
    device = sorted((e for e in events if e.get("cat") in traces.ON_DEVICE), key=lambda e: e["ts"])
    begin = reached = device[0]["ts"]
    idle, marks, inside = [0.0, 0.0], 0, False
    for event in device:
        idle[inside] += max(0.0, event["ts"] - reached)
        reached = max(reached, event["ts"] + event["dur"])
        marks += MARK in event["name"]
        inside = marks % 2 == 1 and MARK not in event["name"]
    span = reached - begin
    return {"idle_fraction": idle[0] / span, "gap_fraction": idle[1] / span,
            "busy_ms": (span - sum(idle)) / 1e3}


# ---- experts that move -----------------------------------------------------------------------------------


def recorded(args: Any, answers: int = 8, steps: int = 100) -> torch.Tensor:
    """Rows that each expert received [steps, layers, experts] while a model decoded so many answers."""
    say(f"{args.model}: routing of {steps} steps")
    params = SamplingParams(temperature=1.0, seed=args.seed, max_tokens=steps + 1, ignore_eos=True)
    with LLM(args.model, args.device, args.numerics, args.seed, speculate="off") as llm:
        with tap(llm, "layers.*.ffn.gate") as seen:
            llm.generate(Prompts(llm, args.seed).draw(answers, 100), params)
        E = llm.config.n_routed_experts
        layers = [[topk.flatten().bincount(minlength=E) for topk, _ in calls[-steps:]]
                  for calls in seen.values()]
    return torch.stack([torch.stack(each) for each in layers], dim=1).cpu()


def plan_rows(args: Any) -> list[dict[str, Any]]:
    """Balances of the layers together, without replicas and with some: of the first layout, and of plans."""
    rows_SLE, ranks, found = recorded(args), args.expert_parallel_size, []
    seen, later, E = rows_SLE[::2], rows_SLE[1::2], rows_SLE.shape[2]
    for slots in (eplb.slots_for(E, extra, ranks) for extra in (0, E // 8)):
        first = torch.tensor(eplb.spread(E, slots, ranks)).expand(rows_SLE.shape[1], -1)
        plans = {"first": first} | {name: plan(seen, slots, ranks) for name, plan in eplb.PLANNERS.items()}
        found.append({"ranks": ranks, "redundant": slots - E} | {
            name: eplb.overall(eplb.by_slot(later, plan), ranks) for name, plan in plans.items()})
    return found


def eplb_rows(args: Any, requests: int = 16, interval: int = 192) -> list[dict[str, Any]]:
    """One rebalance under load, of the model and of its draft: the balance before and after, and its cost."""
    ranks = args.expert_parallel_size
    settings = dict(dp=ranks, ep=ranks, enable_eplb=True, eplb_interval=interval, eplb_min_balance=1.0)
    settings |= dict(num_redundant_experts=ranks, max_num_seqs=requests, max_model_len=1024)
    rng, params = random.Random(args.seed), SamplingParams(max_tokens=900, ignore_eos=True)
    say(f"{args.model}: {requests} requests on {ranks} ranks")
    with LLM(args.model, args.device, args.numerics, args.seed, **settings) as llm:
        ids = range(llm.config.vocab_size // 16, llm.config.vocab_size // 2)
        handles = [llm.submit(rng.choices(ids, k=64), params) for _ in range(requests)]
        own = llm.engine.rebalancer
        movers = {"model": own} | ({"draft": own.draft} if own.draft else {})
        while not all(handle.finished for handle in handles):
            if all(mover.records and mover.records[0].after is not None for mover in movers.values()):
                break
            time.sleep(0.01)
        rows = [{"ranks": ranks, "requests": requests, "part": part} | asdict(mover.records[0])
                for part, mover in movers.items() if mover.records]
        for handle in handles:
            handle.cancel()
    return rows


def show(report: dict[str, Any]) -> None:
    """Print the report as a table."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console, found = Console(), report["scheduler"]
    table = Table("", "", box=SIMPLE, show_header=False)
    table.add_row(f"scheduler, {found['running']} running, median", f"{found['median_us']:.0f} us a step")
    table.add_row("its 99th percentile", f"{found['p99_us']:.0f} us")
    table.add_row("blocks", f"{report['blocks_ops_s'] / 1e6:.2f} M operations/s")
    table.add_row("prefix tree", f"{report['tree_ops_s'] / 1e6:.2f} M operations/s")
    for row in report["engram"]:
        name = f"n-gram tables, {row['table_bytes'] / 1e9:.3g} GB, {row['placement']}"
        if "reason" in row:
            table.add_row(name, row["reason"])
            continue
        waited, alone = sum(row["wait_us"].values()), ""
        if row["rows_per_s"]:
            alone = f"{row['rows_per_s'] / 1e6:.2f} M rows/s; a step's alone {row['fetch_us']:.0f} us; "
        resident = f"{row['resident_bytes'] / 1e9:.3g} GB resident"
        same = "the same tokens" if row["equal"] else "OTHER TOKENS"
        table.add_row(name, f"{alone}waited {waited:.0f} us of {row['step_ms']:.2f} ms; {resident}; {same}")
    for row in report["idle"]:
        idle = f"GPU idle {row['idle_fraction']:.1%} between steps, {row['gap_fraction']:.1%} inside"
        name = _how(row["requests"], row["graphs"], row["overlap"])
        table.add_row(name, f"{idle}, of {row['step_ms']:.2f} ms")
    for row in report["prompts"]:
        name = f"prompt of {row['tokens']:,} tokens, {'graphs' if row['graphs'] else 'eager'}"
        table.add_row(name, f"GPU busy {row['busy_ms']:.1f} of {row['ms']:.1f} ms")
    for row in report["eplb_plans"]:
        name = f"recorded routing, {row['ranks']} ranks, {row['redundant']} replicas"
        plans = ", ".join(f"{planner} {row[planner]:.3f}" for planner in eplb.PLANNERS)
        table.add_row(name, f"balance {row['first']:.3f} -> {plans}")
    for row in report["eplb"]:
        name = f"{row['layers']} layers of the {row['part']} rebalanced on {row['ranks']} ranks"
        after = "unknown" if row["after"] is None else f"{row['after']:.3f}"
        balance = f"balance {row['before']:.3f} -> {after}"
        table.add_row(name, f"{balance}, {row['stall_ms']:.1f} ms, {row['moved_bytes'] / 1e6:.2f} MB a rank")
    console.print(table)
    if report["idle_reason"]:
        console.print(f"GPU idle time: not measured, {report['idle_reason']}")
    env = report["env"]
    console.print(f"{env['device']}, torch {env['torch']}, {env['threads']} threads, commit {env['commit']}")
