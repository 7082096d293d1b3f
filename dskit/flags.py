"""What each command accepts: one frozen dataclass per command, turned into flags by tyro.

Idea: a field is a flag, its docstring is the help, its default is what a user receives. Names are vLLM's
where vLLM has the flag. The files behind the commands take these objects as they are, as in
`dskit.serve.server.main(ServeArgs())`.

Units: lengths in tokens, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

Count = Annotated[int | None, arg(metavar="N")]
Text = Annotated[str | None, arg(metavar="TEXT")]
Folder = Annotated[str | None, arg(metavar="DIR")]
Numerics = Literal["release", "token", "exact"]


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """How a model is loaded."""

    model: Positional[Annotated[str, arg(metavar="MODEL")]] = "demo"
    """Preset (demo, tiny, odd, slice, flash, v4-flash), checkpoint folder, or Hugging Face id."""
    device: Text = None
    """cpu, cuda, cuda:1; by default a GPU if there is one."""
    numerics: Numerics = "release"
    """release rounds as the released model does; token too, but experts take one scale a token, coarser and
    for many rows faster; exact leaves roundings of activations and caches out."""
    seed: int = 0
    """Seed of random weights and of sampling."""
    kernels: Annotated[str | None, arg(metavar="GROUP=IMPL,...")] = None
    """Implementations of ops, for example moe=compile,mla=torch, or one word for all of them."""


@dataclass(frozen=True, kw_only=True)
class ServeArgs(ModelArgs):
    """Serve a model: the OpenAI API, and the chat page at /ui."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 makes the server reachable from other machines."""
    port: int = 8000
    """Port of the API and the page; 0 takes a free one."""
    served_model_name: Text = None
    """Name that the API reports and expects; by default the model as given."""
    api_key: Text = None
    """Key that requests must send as a bearer token."""
    max_model_len: Count = None
    """Longest request, prompt and answer together; by default what the checkpoint allows."""
    max_num_seqs: Count = None
    """Most requests computed in one step."""
    max_num_batched_tokens: Count = None
    """Most tokens computed in one step; longer prompts are split."""
    enable_prefix_caching: bool = True
    """Compute a beginning that prompts share only once."""
    exact_prefix: bool = True
    """Go on behind it from a copy of the state; --no-exact-prefix rebuilds windows, an approximation."""
    batch_invariant: bool = False
    """Give each request the same bits whatever runs beside it; slower."""
    data_parallel_size: Annotated[int, arg(metavar="N", aliases=["--dp", "-dp"])] = 1
    """Ranks, each a process with its own requests and the whole attention; they are started here, or by
    torchrun."""
    expert_parallel_size: Annotated[int, arg(metavar="N", aliases=["--ep"])] = 1
    """How many ranks share the routed experts; --data-parallel-size must be a multiple of it."""
    enable_expert_parallel: bool = False
    """Share the experts among all ranks: --expert-parallel-size is --data-parallel-size."""
    num_redundant_experts: int = 0
    """Second copies of routed experts, so that busy ones can be spread; at least so many."""
    enable_eplb: bool = False
    """Move experts from rank to rank while serving, so that none has much more to do than the others."""
    eplb_interval: int = 3000
    """Steps from one look for a better placement to the next."""
    eplb_min_balance: float = 0.9
    """Move nothing while the mean over the busiest rank's rows is as good as this."""
    eplb_algorithm: Literal["step-aware", "classic"] = "step-aware"
    """Judge a placement by the peaks of single steps, or by the rows of all."""
    distributed_timeout_seconds: Annotated[float, arg(metavar="FLOAT")] = 60.0
    """The group of ranks ends after so long without a sign of one of them."""
    enforce_eager: bool = False
    """Launch every kernel of a step by itself, where one GPU would replay CUDA graphs of them."""
    speculate: Literal["off", "static", "scheduled"] | None = None
    """Let the draft guess ahead and verify every guess, or those that pay; by default what pays, where there
    is a draft."""
    accept: Literal["coupled", "rejection", "block"] = "coupled"
    """Which guesses hold: coupled ones leave the text of a seed as it is, rejection takes more, block most
    of them."""
    engram_placement: Literal["device", "shard", "host", "mmap"] | None = None
    """Where n-gram tables lie: on every device, spread over the ranks, once in host memory, in the file; by
    default where they fit."""
    ui: bool = True
    """Put the chat page at /ui."""


@dataclass(frozen=True, kw_only=True)
class ChatArgs(ModelArgs):
    """Chat in the terminal, with a model loaded here or with a running server."""

    quick: Annotated[str | None, arg(metavar="TEXT", aliases=["-q"])] = None
    """Ask this, print the answer, and end."""
    url: Text = None
    """Server to talk to, for example http://127.0.0.1:8000/v1, instead of loading a model."""
    model_name: Text = None
    """Model to ask the server for; by default the first that it lists."""
    api_key: Text = None
    """Bearer token that the server expects."""
    system_prompt: Text = None
    """System text of the conversation."""
    think: Literal["off", "low", "high", "max"] = "high"
    """How much the model thinks before it answers."""
    max_tokens: Count = None
    """Most tokens of one reply, thinking included."""
    temperature: Annotated[float | None, arg(metavar="FLOAT")] = None
    """0 always takes the likeliest token; by default what the checkpoint says."""


@dataclass(frozen=True, kw_only=True)
class BenchArgs(ModelArgs):
    """What every measurement of a model takes."""

    json: bool = False
    """Print one JSON document instead of the table."""
    result_dir: Folder = None
    """Write run.json and bench.json into a new folder in here, for example profiles."""


@dataclass(frozen=True, kw_only=True)
class LatencyArgs(BenchArgs):
    """Time one stream and eight: time to first token, tokens per second, beside transformers."""

    output_len: int = 64
    """Tokens generated per stream."""
    repeats: int = 3
    """Times that each row is measured; the median is shown, with the spread."""
    compile: bool = True
    """Measure one stream a second time with compiled ops, their compile time apart."""
    peer: bool = True
    """Measure transformers on a V4 model of the same widths in the same run."""


@dataclass(frozen=True, kw_only=True)
class SpecArgs(BenchArgs):
    """Measure a draft: tokens per round by skill, calibration, and tokens per second with and without it."""

    prompts: Annotated[int, arg(metavar="N")] = 20
    """Prompts of each skill, and as many more to calibrate on."""
    temperature: Annotated[float, arg(metavar="FLOAT")] = 0.0
    """0 always takes the likeliest token."""
    requests: Annotated[tuple[int, ...], arg(metavar="N")] = (1, 8, 32)
    """Requests served at a time."""
    repeats: int = 3
    """Times that each way is measured at each load, in turn; the median is shown."""
    save: bool = False
    """Put the fitted temperatures beside the checkpoint and the cost of rows where this machine keeps it."""


@dataclass(frozen=True, kw_only=True)
class KernelsArgs:
    """Time every op's kernel at its released widths, beside its floor, its peers and torch.compile."""

    op: Annotated[str, arg(metavar="NAME,...")] = "all"
    """Ops or groups, for example mhc,norm.rms."""
    rows: Annotated[str, arg(metavar="N,...")] = ""
    """Only shapes of so many rows: a decode step's requests, or the tokens of a prefill."""
    peer: Annotated[str, arg(metavar="NAME")] = "auto"
    """auto measures every library that is installed, none no library, a package's name only that one."""
    check: bool = True
    """Compare kernels and peers with the reference before they are timed."""
    time: bool = True
    """Time them; without it they are only compared, which takes a fraction of a second each."""
    compile: bool = True
    """Measure torch.compile of the reference too."""
    quick: bool = False
    """Fewer replays, torch.compile without its own search, and at most 5.5 minutes."""
    prove: bool = False
    """Let auto take the kernels that passed their checks on this kind of GPU, and no others."""
    minutes: Annotated[float | None, arg(metavar="FLOAT")] = None
    """Stop after so many minutes; what is left is written as not measured."""
    seed: int = 0
    """Seed of the inputs."""
    resume: Annotated[str | None, arg(metavar="FILE")] = None
    """Measure only what this file of records lacks, and write its records beside the new ones."""
    out: Annotated[str | None, arg(metavar="FILE")] = None
    """Write the records here, one JSON object a line, the summary last."""
    result_dir: Folder = None
    """Write run.json and kernels.jsonl into a new folder in here, for example profiles; without --out."""
    machine: Annotated[str | None, arg(metavar="FILE")] = None
    """JSON with name, bytes_per_s and flop_per_s of a GPU; without it floors are the H200's, for an H200."""
    allow_no_gpu: bool = False
    """Without a GPU, where nothing can be measured, exit with 0 if the checks pass."""
    read: Annotated[str | None, arg(metavar="FILE")] = None
    """Measure nothing: print the Markdown table of a file of records."""
    picture: Annotated[str | None, arg(metavar="FILE")] = None
    """With --read: also draw each kernel's share of the floor, and its peer's, as png or svg."""


@dataclass(frozen=True, kw_only=True)
class TuneArgs:
    """Time every kernel's configurations at its released widths and write the table of the fastest ones."""

    op: Annotated[str, arg(metavar="NAME,...")] = "all"
    """Ops or groups, for example mhc,norm.rms; what the table says of others stays."""
    minutes: Annotated[float, arg(metavar="FLOAT")] = 8.0
    """Stop after so many minutes; decode steps of 128 rows and prefills of 4,096 are measured first."""
    seed: int = 0
    """Seed of the inputs."""
    out: Annotated[str | None, arg(metavar="FILE")] = None
    """Write the table here instead of where the kernels read it."""


@dataclass(frozen=True, kw_only=True)
class ExchangeArgs:
    """Time rows to the experts of other GPUs and back: written directly, by NCCL, and by the reference."""

    rows: Annotated[tuple[int, ...], arg(metavar="N")] = (1, 32, 128, 512, 8192)
    """Rows of each rank."""
    width: Annotated[int, arg(metavar="N")] = 5120
    """Channels of a row."""
    prove: bool = False
    """Let auto take these kernels on this kind of GPU if what they bring is right, else no more."""
    seed: int = 0
    """Seed of the rows."""
    json: bool = False
    """Print one JSON document instead of the table."""
    result_dir: Folder = None
    """Write run.json and bench.json into a new folder in here, for example profiles."""
    allow_no_gpu: bool = False
    """Without two GPUs, where nothing can be measured, exit with 0."""


@dataclass(frozen=True, kw_only=True)
class EngineArgs(BenchArgs):
    """Time what a step costs beside the model; on a GPU also for how long it has nothing to do."""

    running: int = 256
    """Requests that decode at any time while the scheduler is timed."""
    steps: int = 400
    """Decode steps that are timed."""
    expert_parallel_size: Annotated[int, arg(metavar="N", aliases=["--ep"])] = 1
    """Also let so many ranks share the experts, and tell what it gains and takes to move them."""
    engram_gb: Annotated[tuple[float, ...], arg(metavar="GB")] = ()
    """Give the model random n-gram tables of these sizes, and look them up; by default its own."""


@dataclass(frozen=True, kw_only=True)
class LoadArgs(BenchArgs):
    """What a load takes that is given to an engine whole."""

    data_parallel_size: Annotated[tuple[int, ...], arg(metavar="N", aliases=["--dp", "-dp"])] = (1,)
    """Ranks, each a process with its own requests and, on GPUs, one of its own; several numbers, as in
    1 2 4, are measured one after the other, and efficiency is tokens per rank over those of the first."""
    expert_parallel_size: Annotated[int | None, arg(metavar="N", aliases=["--ep"])] = None
    """How many ranks share the routed experts; by default all that there are."""
    max_num_seqs: Count = None
    """Most requests of a rank computed in one step; by default all it has, in throughput what others get."""
    max_num_batched_tokens: Count = None
    """Most tokens of a rank computed in one step; longer prompts are split."""
    enforce_eager: bool = False
    """Launch every kernel of a step by itself, where a GPU would replay CUDA graphs of them."""
    speculate: Literal["off", "static", "scheduled"] | None = None
    """Let the draft guess ahead, as in dskit serve."""
    distributed_timeout_seconds: Annotated[float, arg(metavar="FLOAT")] = 60.0
    """The group of ranks ends after so long without a sign of one of them."""


@dataclass(frozen=True, kw_only=True)
class ThroughputArgs(LoadArgs):
    """Time prompts that are all there at once: tokens per second."""

    num_prompts: Annotated[int, arg(metavar="N")] = 32
    """Prompts of each rank."""
    input_len: Annotated[int, arg(metavar="N")] = 200
    """Tokens of each, random words."""
    output_len: Annotated[int, arg(metavar="N")] = 64
    """Tokens generated for each."""
    repeats: Annotated[int, arg(metavar="N")] = 3
    """Runs; the median is shown, with the spread."""


@dataclass(frozen=True, kw_only=True)
class PrefillArgs(LoadArgs):
    """Time new tokens behind a cached beginning, at several numbers of requests."""

    cached_len: Annotated[int, arg(metavar="N")] = 1024
    """Tokens that all requests share; they are in the prefix cache."""
    new_len: Annotated[int, arg(metavar="N")] = 32
    """Tokens that each request adds."""
    requests: Annotated[tuple[int, ...], arg(metavar="N")] = (1, 2, 4, 8, 16)
    """Requests of each rank at a time."""
    repeats: Annotated[int, arg(metavar="N")] = 3
    """Batches that are timed, after one; the median is shown."""


@dataclass(frozen=True, kw_only=True)
class DecodeArgs(LoadArgs):
    """Time the steps in which so many requests decode."""

    context_len: Annotated[int, arg(metavar="N")] = 1024
    """Tokens before the first decoded one."""
    requests: Annotated[tuple[int, ...], arg(metavar="N")] = (1, 2, 4, 8)
    """Requests of each rank at a time."""
    steps: Annotated[int, arg(metavar="N")] = 50
    """Steps that are timed, after ten."""


@dataclass(frozen=True, kw_only=True)
class StartupArgs(BenchArgs):
    """Time a new process until its first token: import, load, generate."""

    repeats: Annotated[int, arg(metavar="N")] = 3
    """Processes; the median is shown, with the spread."""


@dataclass(frozen=True, kw_only=True)
class LayerArgs(BenchArgs):
    """Time single layers: by their kernels, by the formulas, and compiled, beside their floors."""

    layers: Annotated[tuple[int, ...], arg(metavar="N")] = ()
    """Which layers; by default all of them."""
    requests: Annotated[tuple[int, ...], arg(metavar="N")] = (1, 32, 128)
    """Requests that decode at a time."""
    context_len: Annotated[int, arg(metavar="N")] = 8192
    """Tokens before the decoded one."""
    prompt_len: Annotated[int, arg(metavar="N")] = 4096
    """Tokens of the prompt."""
    compile: bool = True
    """Also time the formulas compiled, after their compilation."""


@dataclass(frozen=True, kw_only=True)
class ServingArgs(BenchArgs):
    """Time what clients of a server see: time to first token, per token, to the end."""

    url: Text = None
    """API to ask, for example http://127.0.0.1:8000/v1; by default a server is started for it."""
    num_prompts: Annotated[int, arg(metavar="N")] = 32
    """Requests of each run."""
    request_rate: Annotated[float | None, arg(metavar="FLOAT")] = None
    """Requests per second, at random times; by default all come at once."""
    max_concurrency: Count = None
    """Most requests at a time; by default all of them."""
    prefix_len: Annotated[int, arg(metavar="N")] = 128
    """Tokens that all prompts begin with."""
    input_len: Annotated[int, arg(metavar="N")] = 128
    """Tokens that each prompt adds, random words."""
    output_len: Annotated[int, arg(metavar="N")] = 64
    """Tokens generated for each."""
    goodput: Annotated[tuple[str, ...], arg(metavar="NAME:MS")] = ()
    """Limits that a good request keeps, for example ttft:500 tpot:50."""
    repeats: Annotated[int, arg(metavar="N")] = 3
    """Runs, after one to warm up; the median is shown."""


@dataclass(frozen=True, kw_only=True)
class CompareArgs:
    """Tell which kernels became faster or slower between two files of records."""

    old: Positional[Annotated[str, arg(metavar="OLD")]]
    """Records of dskit bench kernels."""
    new: Positional[Annotated[str, arg(metavar="NEW")]]
    """Later records of the same ops."""
    json: bool = False
    """Print one JSON document instead of lines."""


@dataclass(frozen=True, kw_only=True)
class ProfileArgs(ModelArgs):
    """Profile one prefill and some decode steps, op by op; or compare two profiles."""

    prompt: Text = None
    """Text to profile; by default random words."""
    prompt_tokens: Annotated[int, arg(metavar="N")] = 64
    """Tokens of a random prompt."""
    num_prompts: Annotated[int, arg(metavar="N")] = 1
    """Prompts served together."""
    decode: Annotated[int, arg(metavar="N", aliases=["--steps"])] = 3
    """Decode steps."""
    warmup: Annotated[int, arg(metavar="N")] = 2
    """Runs before the profiled one; the last says how long steps take without the profiler."""
    memory: bool = False
    """Also record allocations."""
    out: Annotated[str, arg(metavar="DIR")] = "profiles"
    """The run's own folder is made in here: run.json, table.csv, trace, summary."""
    tensorboard: Folder = None
    """Also write trace and scalars for TensorBoard into this folder."""
    compare: Annotated[tuple[str, str] | None, arg(metavar="A B")] = None
    """Measure nothing: show what changed between two folders that were written before."""
    json: bool = False
    """Print one JSON document instead of tables."""


@dataclass(frozen=True, kw_only=True)
class TrainArgs:
    """Train a model from scratch by a recipe."""

    recipe: Positional[Literal["demo", "demo-draft", "ablate"]] = "demo"
    """What to train: the model, its draft, or small models that each lack one mechanism."""
    steps: Count = None
    """Optimiser steps; by default the recipe's."""
    batch_size: Count = None
    """Sequences per step; by default the recipe's."""
    seq_len: Literal[512, 1024, 4096] | None = None
    """Rows of this length only; by default the recipe's rotation of all three."""
    lr: Annotated[float | None, arg(metavar="FLOAT")] = None
    """Peak learning rate; by default the recipe's."""
    seed: int = 0
    """Seed of the weights, the data and their order."""
    disable: Annotated[str, arg(metavar="PART,...")] = ""
    """Mechanisms to leave out, for example engram,mhc; ablate tries those one by one (default: all)."""
    start: Text = None
    """Go on from this checkpoint's weights instead of random ones."""
    freeze: Annotated[str, arg(metavar="PART,...")] = ""
    """Parameters that do not learn: those whose name holds one of these, for example ffn.experts."""
    mix: Annotated[str, arg(metavar="SKILL=SHARE,...")] = ""
    """Conversations per skill, for example define=40,tools=60; by default the recipe's."""
    minutes: Annotated[float | None, arg(metavar="FLOAT")] = None
    """Stop after so many minutes and keep the state; --resume goes on."""
    resume: bool = False
    """Go on from the newest state in --out."""
    tensorboard: Folder = None
    """Write scalars for TensorBoard into this folder."""
    seeds: Count = None
    """ablate: seeds of each model, from --seed on; by default 3."""
    limit: Count = None
    """ablate: questions of each skill that a finished model answers; by default none."""
    out: Folder = None
    """Where states, the CSV, the plot and the finished checkpoint go; by default runs/RECIPE."""
    device: Text = None
    """cpu, cuda, cuda:1; by default a GPU if there is one."""
    kernels: Annotated[str | None, arg(metavar="GROUP=IMPL,...")] = None
    """Implementations of ops."""


@dataclass(frozen=True, kw_only=True)
class EvalArgs(ModelArgs):
    """Measure the skills of a model on held-out questions: exact matches, greedy, no retry."""

    json: bool = False
    """Print one JSON document instead of the table."""
    tasks: Annotated[str, arg(metavar="SKILL,...")] = ""
    """Skills to measure; all of them by default."""
    limit: Count = None
    """Questions per skill; by default the evaluation's own number."""
    output: Annotated[str | None, arg(metavar="FILE")] = None
    """Also write the JSON document to this file."""


@dataclass(frozen=True, kw_only=True)
class ConvertArgs:
    """Convert a checkpoint into the released format, or only count what would be converted."""

    source: Positional[Annotated[str, arg(metavar="SOURCE")]]
    """Checkpoint folder to read."""
    target: Positional[Annotated[str, arg(metavar="TARGET")]] = ""
    """Folder to write; it must not hold a checkpoint yet."""
    dry_run: bool = False
    """Count mapped, unmapped and unused tensors, and write nothing."""
    quantize: bool = False
    """Pack plain weights as the release does: FP8, and FP4 for experts."""
    json: bool = False
    """Print the counts as one JSON document."""


@dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """Check what this machine can do, line by line, and how to mend what it cannot."""

    kernels: Annotated[str | None, arg(metavar="GROUP=IMPL,...")] = None
    """Implementations of ops that the run of the tiny model takes."""
    json: bool = False
    """Print one JSON document instead of lines."""
    plan: Annotated[str | None, arg(metavar="MODEL")] = None
    """Check nothing: say what this model (preset or folder) would take on --gpus, and how fast at most."""
    gpus: Annotated[str, arg(metavar="NxNAME")] = ""
    """GPUs to plan for, for example 8xH200."""
    machine: Annotated[str | None, arg(metavar="FILE")] = None
    """JSON with name, memory_bytes, bytes_per_s and flop_per_s of a GPU that dskit does not know."""
    max_num_seqs: Count = None
    """Requests per GPU to plan windows for; by default what dskit serve takes."""
    max_model_len: Count = None
    """Longest request to plan the cache for; by default what the checkpoint allows."""
    bundle: Annotated[str | None, arg(metavar="FILE")] = None
    """Also write the report to a file that can be shown to others: no user, host or home names in it."""
