"""The trainer: makes the demo model from nothing, and any ablation of it.

Idea: master weights are float32 and stay what they are; each step makes the rounded weights that the release
would hold and runs the model on those (torch.func.functional_call), so layers know nothing of training. Three
stretches, as shares of the steps:

    warm-up   dense attention over all visible entries; indexers learn from it
    sparse    from `sparse_from`: attention reads the selection only
    rounded   from `round_from`: every rounding of the release, of weights, activations and caches;
              gradients pass

Matrices learn by Muon, everything else by AdamW; the router's bias moves by the sign of each expert's load.
Any mechanism can be left out by name (ABLATIONS). A run is a function of its seed, and goes on from its
newest state.

Shapes: a batch is ids [B, T] with the documents' starts; targets are the tokens that an assistant says.
Units: lr per step, tokens, seconds.
State: OUT/state.pt (masters, optimisers, step), OUT/log.csv, OUT/loss.png, and the checkpoint OUT/model.
Errors: ValueError for an unknown mechanism or setting.
Source: model.md 7.2, appendix B; README decision 18.
Try: dskit train demo --steps 50 --out runs/try
"""

from __future__ import annotations

import csv
import functools
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dskit import chat, checkpoint, ops
from dskit.config import PRESETS_DIR, ModelConfig, preset
from dskit.layers.engram import Table, folding
from dskit.layers.linear import Experts, Linear, Numerics, pack_fp8, quantize, unpack_fp8
from dskit.layers.mla import Memory
from dskit.layers.moe import Gate
from dskit.model import Model
from dskit.train import data
from dskit.train.muon import Muon
from dskit.train.whole import whole_step

# what a config without a mechanism has instead; the last four are none of the config's
ABLATIONS: dict[str, Callable[[ModelConfig], dict]] = {
    "engram": lambda c: dict(engram_layer_ids=(), engram_num_embeddings=()),
    "mhc": lambda c: dict(hc_mult=1),
    "candidates": lambda c: dict(candidate_source_layer_id=-1),
    "sharing": lambda c: dict(kv_source_layer_ids=_reading(c), index_source_layer_ids=_reading(c),
                              candidate_source_layer_id=-1),
    "global": lambda c: dict(compress_ratios=(0,) * len(c.compress_ratios), kv_source_layer_ids=(),
                             index_source_layer_ids=(), candidate_source_layer_id=-1),
    "moe": lambda c: dict(n_routed_experts=c.num_experts_per_tok),  # every token goes to all of them
    **dict.fromkeys(("sparse", "rounding", "balance", "index_loss"), lambda c: {}),
}


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run besides its config; shapes: (seq_len, rows, weight in the rotation)."""

    steps: int = 3850
    lr: float = 3e-3
    lr_adam: float = 3e-3
    warmup: int = 150
    decay_from: float = 0.5
    sparse_from: float = 0.5
    round_from: float = 0.5
    shapes: tuple[tuple[int, int, int], ...] = ((512, 128, 5), (1024, 64, 3), (4096, 16, 2))
    probes: int = 32
    index_weight: float = 0.3
    prompt_weight: float = 0.05
    balance: float = 2e-3
    seed: int = 0
    disable: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()  # parameters whose name holds one of these do not learn
    mix: dict[str, float] | None = None  # skills and their shares; None: data.MIXES by row length


def ablated(config: ModelConfig, disable: tuple[str, ...]) -> ModelConfig:
    """The config without the named mechanisms; raises ValueError for a name that is none of ABLATIONS."""
    for name in disable:
        if name not in ABLATIONS:
            raise ValueError(f"--disable names {name!r}; mechanisms are {', '.join(ABLATIONS)}")
        changes = ABLATIONS[name](config)
        config = config.replace(**changes) if changes else config
    return config


def _reading(config: ModelConfig) -> tuple[int, ...]:
    """The layers that read a global memory."""
    return tuple(layer for layer in range(config.num_hidden_layers) if config.ratio(layer))


class Trainer:
    """One run: model, optimisers, data, logs; `figures` are what it logs besides, `quiet` shows no bar."""

    figures: tuple[str, ...] = ()
    quiet = False

    def __init__(self, config: ModelConfig, tokenizer: chat.Tokenizer, recipe: Recipe, out: Path, device: str,
                 workers: int = 0):
        self.config, self.tokenizer, self.recipe = ablated(config, recipe.disable), tokenizer, recipe
        self.out, self.device, self.workers, self.step = out, torch.device(device), workers, 0
        torch.manual_seed(recipe.seed)
        torch.set_float32_matmul_precision("high")
        self.model = self._model()
        self.masters = dict(self.model.named_parameters())
        self.optimizers = self._optimizers()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"].to(self.device)
        self.balance_rate = torch.zeros((), device=self.device)
        self.graphs: dict[tuple, StepGraph] = {}
        self.seen_keys: dict[tuple, int] = {}
        self.folding = torch.zeros(self.config.vocab_size, dtype=torch.int64)
        if self.config.engram_layer_ids:
            self.folding = torch.from_numpy(folding(self.config, tokenizer.backend))
        self.folding = self.folding.to(self.device)
        self.loads: dict[str, Tensor] = {}
        for name, module in self.model.named_modules():
            if isinstance(module, Gate):
                module.register_forward_hook(lambda m, _, out, name=name: self._count(name, m, out[0]))

    # ---- making --------------------------------------------------------------------------------------------

    def _numerics(self, rounded: bool) -> Numerics:
        how = Numerics.of(self.config, "release", device=self.device)
        return how if rounded else replace(how, name="bfloat16")

    def _model(self) -> Model:
        with torch.device(self.device):
            model = Model(self.config, self._numerics(False))
        model.folding = None
        for module in model.modules():
            if isinstance(module, Table):
                module.weight = nn.Parameter(torch.empty(module.shape, device=self.device))
        for name, parameter in model.named_parameters():
            value = initial(name, parameter, self.config).to(self.device)
            trained = parameter.is_floating_point() and self.learns(name)
            owner, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            setattr(owner, leaf, nn.Parameter(value, requires_grad=trained))
        return model.to(self.device)

    def learns(self, name: str) -> bool:
        """Whether a parameter learns by gradient; routers' biases move by `_balance`."""
        return not name.endswith((".bias", ".bias_vl")) and not any(f in name for f in self.recipe.freeze)

    def start_from(self, source: str | Path) -> None:
        """Take the weights of a checkpoint; raises ValueError where one is missing or of another shape."""
        model = checkpoint.load(source, device=self.device, numerics="exact")
        held = dict(model.named_parameters())
        for name, p in self.masters.items():
            if not name.startswith("mtp.") and (name not in held or held[name].shape != p.shape):
                found = "nothing" if name not in held else tuple(held[name].shape)
                raise ValueError(f"{source} has {found} for {name}, this run {tuple(p.shape)}; start from a "
                                 "checkpoint of the same recipe and --disable")
        with torch.no_grad():
            for name, p in self.masters.items():
                if name not in held:
                    continue  # a draft that is yet to be trained
                owner, value = model.get_submodule(name.rpartition(".")[0]), held[name]
                if isinstance(owner, Table):  # held as codes even here
                    value = owner(torch.arange(len(value), device=self.device)[:, None]).view(value.shape)
                p.copy_(value)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        def matrix(name: str) -> bool:
            hidden = any(part in name for part in (".attn.", ".ffn.experts", ".ffn.shared", ".engram.wkv"))
            return hidden and name.endswith(".weight") and self.masters[name].dim() > 1

        trained = {n: p for n, p in self.masters.items() if p.requires_grad}
        matrices = [p for n, p in trained.items() if matrix(n)]
        rest = [p for n, p in trained.items() if not matrix(n)]
        on_gpu = self.device.type == "cuda"
        return [Muon(matrices, lr=torch.tensor(self.recipe.lr), weight_decay=0.01),
                torch.optim.AdamW(rest, lr=torch.tensor(self.recipe.lr_adam), betas=(0.9, 0.98), eps=1e-10,
                                  weight_decay=0.0, fused=on_gpu, capturable=on_gpu)]

    def _count(self, name: str, gate: Gate, topk: Tensor) -> None:
        zeros = torch.zeros(gate.weight.shape[0], device=topk.device)
        ones = torch.ones_like(topk.flatten(), dtype=zeros.dtype)
        self.loads[name] = zeros.scatter_add_(0, topk.flatten(), ones)

    # ---- one step ------------------------------------------------------------------------------------------

    def weights(self, rounded: bool, prefix: str = "") -> dict[str, Tensor]:
        """The weights of this step: masters in bfloat16, or rounded as the checkpoint stores them."""
        compute = self.model.numerics.compute
        return {name: stored(self.model.get_submodule(name.rpartition(".")[0]), name, p, rounded, compute)
                for name, p in self.masters.items() if name.startswith(prefix)}

    def loss(self, ids: Tensor, start: Tensor, said: Tensor, rounded: bool, sparse: bool
             ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch (ids, doc_start, is the next token an answer's: [B, T]), and what is logged."""
        step = whole_step(self.model, self.folding, ids, start, sparse=sparse, probes=self.recipe.probes)
        logits = torch.func.functional_call(self.model, self.weights(rounded), (step, Memory()))
        target, weight, hit = self._targets(ids, start, said)
        each = F.cross_entropy(logits, target, reduction="none")
        loss = (each * weight).sum() / weight.sum().clamp(min=1)
        answer = hit.float()
        with torch.no_grad():
            right = (logits.argmax(-1) == target).float()
            logs = {"loss": (each * answer).sum() / answer.sum(),
                    "accuracy": (right * answer).sum() / answer.sum()}
        if step.whole.index_losses and "index_loss" not in self.recipe.disable:
            logs["index_kl"] = torch.stack(step.whole.index_losses).mean()
            loss = loss + self.recipe.index_weight * logs["index_kl"]
        return loss, logs

    def _targets(self, ids: Tensor, start: Tensor, said: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(next token, its weight, is it an answer's) per row; nothing counts after a conversation's end."""
        target = ids.roll(-1, dims=1)
        within = (start.roll(-1, dims=1) == start) & (target != self.tokenizer.pad_id)
        within[:, -1] = False
        weight = torch.where(said, 1.0, self.recipe.prompt_weight * within)
        return target.flatten(), weight.flatten(), said.flatten()

    def rate(self) -> float:
        """The learning rate as a share of its peak: warm-up, plateau, straight down to zero."""
        share = self.step / self.recipe.steps
        falling = (1 - share) / (1 - self.recipe.decay_from)
        return min(1.0, (self.step + 1) / self.recipe.warmup, max(falling, 0.0))

    def update(self, batch: data.Batch) -> dict[str, Tensor]:
        """Forward, backward, optimise, balance routers; on a GPU from the third time on as one CUDA graph."""
        share = self.step / self.recipe.steps
        rounded = share >= self.recipe.round_from and "rounding" not in self.recipe.disable
        sparse = share >= self.recipe.sparse_from and "sparse" not in self.recipe.disable
        self._set_numerics(rounded)
        self._set_rates()
        tensors = [torch.from_numpy(a).to(self.device) for a in (batch.ids, batch.doc_start, batch.loss)]
        key = (*batch.ids.shape, rounded, sparse)
        if self.device.type == "cuda" and key not in self.graphs:
            self.seen_keys[key] = self.seen_keys.get(key, 0) + 1
            if self.seen_keys[key] > 2:
                self.graphs[key] = StepGraph(lambda *t: self._update(*t, rounded, sparse), tensors)
        logs = self.graphs[key](tensors) if key in self.graphs else self._update(*tensors, rounded, sparse)
        self.step += 1
        return logs | {f"accuracy_{batch.ids.shape[1]}": logs["accuracy"]}

    def _update(self, ids: Tensor, doc_start: Tensor, said: Tensor, rounded: bool, sparse: bool
                ) -> dict[str, Tensor]:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss, logs = self.loss(ids.long(), doc_start.long(), said, rounded, sparse)
        loss.backward()
        trained = [p for p in self.masters.values() if p.grad is not None]
        logs["grad_norm"] = nn.utils.clip_grad_norm_(trained, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        logs["load"] = self._balance()
        return {k: v.detach() for k, v in logs.items()}

    def _set_rates(self) -> None:
        """Rates are tensors, so that a captured graph reads what is set here."""
        for optimizer, peak in zip(self.optimizers, (self.recipe.lr, self.recipe.lr_adam), strict=True):
            for group in optimizer.param_groups:
                group["lr"].fill_(peak * self.rate())
        self.balance_rate.fill_(self.recipe.balance * self.rate())

    def _set_numerics(self, rounded: bool) -> None:
        if self.model.numerics.release != rounded:
            for module in self.model.modules():
                if hasattr(module, "numerics"):
                    module.numerics = self._numerics(rounded)

    @torch.no_grad()
    def _balance(self) -> Tensor:
        """Move each router's bias against its experts' load; the largest load over the mean, averaged."""
        skew = []
        for name, load in self.loads.items():
            skew.append(load.max() / load.mean())
            if "balance" not in self.recipe.disable and self.learns(f"{name}.weight"):
                self.masters[f"{name}.bias"].add_((load.mean() - load).sign() * self.balance_rate)
        return torch.stack(skew).mean()

    # ---- the run -------------------------------------------------------------------------------------------

    def batches(self) -> Iterator[data.Batch]:
        """Batches of the recipe's shapes in a fixed rotation, from the current step on."""
        shapes = self.recipe.shapes
        turn = sorted((k / shape[2], i) for i, shape in enumerate(shapes) for k in range(shape[2]))
        turn = [i for _, i in turn]
        done = [sum(turn[s % len(turn)] == i for s in range(self.step)) for i in range(len(shapes))]
        streams = []
        for i, (seq_len, rows, weight) in enumerate(shapes):
            share = seq_len * rows * weight / sum(s * r * w for s, r, w in shapes)
            streams.append(data.batches(self.tokenizer, self.recipe.seed * 1000 + i, seq_len, rows,
                                        self.recipe.mix or data.mix_for(seq_len), start=done[i],
                                        workers=math.ceil(self.workers * share)))
        step = self.step
        while True:
            yield next(streams[turn[step % len(turn)]])
            step += 1

    def run(self, *, minutes: float = math.inf, tensorboard: str | None = None) -> bool:
        """Train to the last step or for so many minutes; saves the state. True when the run is complete."""
        self.out.mkdir(parents=True, exist_ok=True)
        began, writer = time.perf_counter(), _writer(tensorboard)
        with Log(self.out / "log.csv", self.step, self.recipe, writer, self.figures, self.quiet) as log:
            for batch in self.batches():
                if self.step >= self.recipe.steps or time.perf_counter() - began > 60 * minutes:
                    break
                log.add(self.step, batch.ids.size, self.update(batch))
        self.save_state()
        if self.step >= self.recipe.steps:
            self.finish()
        return self.step >= self.recipe.steps

    def finish(self) -> None:
        """Write what a complete run leaves: the checkpoint and the plot."""
        self.save_model()
        plot(self.out / "log.csv", self.out / "loss.png")

    def save_state(self) -> None:
        """Write OUT/state.pt, from which `resume` goes on."""
        state = {"step": self.step, "recipe": asdict(self.recipe), "masters": self.masters,
                 "optimizers": [o.state_dict() for o in self.optimizers], "random": torch.get_rng_state()}
        torch.save(state, self.out / "state.tmp")
        (self.out / "state.tmp").replace(self.out / "state.pt")

    def resume(self) -> None:
        """Go on from OUT/state.pt; raises ValueError when it was made by another recipe."""
        state = torch.load(self.out / "state.pt", map_location=self.device, weights_only=True)
        if state["recipe"] != asdict(self.recipe):
            raise ValueError(f"{self.out / 'state.pt'} belongs to another recipe: {state['recipe']}")
        self.step = state["step"]
        with torch.no_grad():
            for name, p in self.masters.items():
                p.copy_(state["masters"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        torch.set_rng_state(state["random"].cpu())

    def save_model(self) -> Path:
        """Write the checkpoint OUT/model in the released format, tokenizer included."""
        folder = checkpoint.save(self.model, self.out / "model", shard_size=11 << 20)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "examples.json"):
            if (PRESETS_DIR / "demo" / name).exists():
                shutil.copyfile(PRESETS_DIR / "demo" / name, folder / name)
        return folder


class StepGraph:
    """A training step captured once and replayed: thousands of launches become one."""

    def __init__(self, update: Callable[..., dict[str, Tensor]], inputs: list[Tensor]):
        self.inputs = [t.clone() for t in inputs]
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, pool=_pool()):
            self.logs = update(*self.inputs)

    def __call__(self, inputs: list[Tensor]) -> dict[str, Tensor]:
        """Run one step on new inputs of the captured shapes."""
        for held, new in zip(self.inputs, inputs, strict=True):
            held.copy_(new)
        self.graph.replay()
        return {k: v.clone() for k, v in self.logs.items()}


@functools.cache
def _pool():
    """All captured steps share their scratch memory: one runs at a time."""
    return torch.cuda.graph_pool_handle()


@ops.implement("moe.each_expert", "grouped", grad=True)
def each_expert_grouped(x_RK: Tensor, weight: Experts, expert_R: Tensor, dtype: torch.dtype) -> Tensor:
    """All experts in one grouped product, without asking the device for the counts (bfloat16, sm_90)."""
    counts = torch.zeros(weight.experts, dtype=torch.int32, device=expert_R.device)
    ones = torch.ones_like(expert_R, dtype=torch.int32)
    ends = counts.scatter_add_(0, expert_R, ones).cumsum(0, dtype=torch.int32)
    return torch._grouped_mm(x_RK, weight.dense().transpose(1, 2), offs=ends).to(dtype)


def fast_kernels() -> dict[str, str]:
    """What training runs on a GPU: grouped experts, and small formulas compiled."""
    compiled = ("mhc.mixes", "mhc.read", "mhc.write", "linear.quantize", "rope.rotate", "norm.rms",
                "moe.swiglu")
    return {"moe.each_expert": "grouped"} | dict.fromkeys(compiled, "compile")


def initial(name: str, p: Tensor, config: ModelConfig) -> Tensor:
    """First value of a parameter, float32 (model.md appendix B)."""
    if name.endswith(("_fn", "bias", "bias_vl", "attn_sink")):
        return torch.zeros(p.shape)
    if name.endswith("_scale"):
        return torch.full(p.shape, 0.01)
    if name.endswith("_base"):
        return _base(int(name.split(".")[1]), config.hc_mult)
    if name.endswith(("norm.weight", "q_weight", "k_weight")):
        return torch.ones(p.shape)
    if name == "embed.weight":
        return torch.randn(p.shape) * 0.5
    if name.endswith("engram.embed.weight"):
        return torch.randn(p.shape) * 0.1
    deep = (2 * config.num_hidden_layers) ** -0.5 if name.endswith(("wo_b.weight", "w2.weight")) else 1.0
    return torch.randn(p.shape) * p.shape[-1] ** -0.5 * (0.1 if name == "head.weight" else 0.7 * deep)


def _base(layer: int, streams: int) -> Tensor:
    """Read mostly stream `layer mod N`, write to all, mix hardly."""
    read = torch.full((streams,), -3.0)
    read[layer % streams] = 3.0
    return torch.cat((read, torch.zeros(streams), (6 * torch.eye(streams) - 3).flatten()))


def stored(module: nn.Module, name: str, p: Tensor, rounded: bool, compute: torch.dtype) -> Tensor:
    """A master as the step reads it: bfloat16, or (rounded) what the checkpoint will hold; gradients pass."""
    fmt = (module.fmt if isinstance(module, Linear | Experts) else
           "row" if isinstance(module, Table) else "bf16")
    if name.split(".")[-1].startswith(("hc_", "attn_sink", "bias")) or not p.is_floating_point():
        return p
    if rounded and fmt == "fp8":
        with torch.no_grad():
            value = unpack_fp8(*pack_fp8(p, module.block), module.block, torch.float32)
        return (p + (value - p).detach()).to(compute)
    if rounded and fmt in ("fp4", "row"):
        return quantize(p, "fp4_32" if fmt == "fp4" else "fp8_32", compute)
    number = p.bfloat16()
    matrix = isinstance(module, Linear | Experts) and fmt != "fp32"
    return number.to(compute) if matrix else number.float() if p.dim() == 1 or fmt == "fp32" else number


class Log:
    """Progress bar, CSV and TensorBoard scalars; values stay on the device between lines."""

    COLUMNS = ("step", "loss", "accuracy", "index_kl", "load", "grad_norm", "tokens_per_s", "seconds")

    def __init__(self, path: Path, step: int, recipe: Recipe, writer, figures: tuple[str, ...] = (),
                 quiet: bool = False):
        from rich.progress import Progress, TextColumn

        self.path, self.writer, self.held, self.tokens = path, writer, [], 0
        self.every = max(1, min(20, recipe.steps // 100))
        self.bar = Progress(*Progress.get_default_columns(), TextColumn("{task.fields[note]}"), disable=quiet)
        self.columns = (*self.COLUMNS, *(f"accuracy_{seq_len}" for seq_len, *_ in recipe.shapes), *figures)
        self.task = self.bar.add_task("train", total=recipe.steps, completed=step, note="")

    def __enter__(self) -> Log:
        fresh = not self.path.exists() or not self.path.stat().st_size
        self.file = self.path.open("a", newline="")
        self.rows = csv.writer(self.file)
        if fresh:
            self.rows.writerow(self.columns)
        self.began = self.since = time.perf_counter()
        self.bar.start()
        return self

    def add(self, step: int, tokens: int, logs: dict[str, Tensor]) -> None:
        """Take one step's values; writes a line every so many steps."""
        self.held.append(logs)
        self.tokens += tokens
        if (step + 1) % self.every:
            return
        mean = {k: torch.stack([h[k].detach() for h in self.held if k in h]).mean().item()
                for k in {k for h in self.held for k in h}}
        now = time.perf_counter()
        mean |= {"step": step + 1, "tokens_per_s": round(self.tokens / (now - self.since)),
                 "seconds": now - self.began}
        self.rows.writerow([f"{mean[c]:.6g}" if c in mean else "" for c in self.columns])
        self.file.flush()
        if self.writer is not None:
            for key, value in mean.items():
                self.writer.add_scalar(f"train/{key}", value, step + 1)
        note = f"loss {mean['loss']:.3f} acc {mean['accuracy']:.3f} {mean['tokens_per_s'] / 1e3:.0f}k tok/s"
        self.bar.update(self.task, completed=step + 1, note=note)
        self.held, self.tokens, self.since = [], 0, now

    def __exit__(self, *_) -> None:
        self.bar.stop()
        self.file.close()
        if self.writer is not None:
            self.writer.close()


def _writer(folder: str | None):
    if folder is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder)


def plot(log: Path, picture: Path) -> None:
    """Draw loss and accuracy of a run's CSV."""
    from matplotlib.figure import Figure

    rows = list(csv.DictReader(log.open()))
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axis = figure.subplots()
    steps = [int(r["step"]) for r in rows]
    axis.semilogy(steps, [float(r["loss"]) for r in rows], label="loss of answers, nats per token")
    axis.set_xlabel("step")
    axis.set_ylabel("loss")
    other = axis.twinx()
    other.plot(steps, [float(r["accuracy"]) for r in rows], "C1--", label="share of answer tokens right")
    other.set_ylim(0, 1)
    figure.legend(loc="outside upper center", ncols=2)
    figure.savefig(picture, dpi=120)


def recipe_of(args, base: type[Recipe] = Recipe) -> Recipe:
    """The recipe that the flags ask for; raises ValueError for shares that are not `skill=number`."""
    shapes = Recipe.shapes
    if args.batch_size:
        shapes = tuple((seq_len, max(1, args.batch_size * rows // shapes[0][1]), w)
                       for seq_len, rows, w in shapes)
    if args.seq_len:
        shapes = tuple(shape for shape in shapes if shape[0] == args.seq_len)
    mix = None
    if args.mix:
        pairs = [part.partition("=") for part in args.mix.split(",")]
        if not all(share.replace(".", "", 1).isdigit() for _, _, share in pairs):
            raise ValueError(f"--mix is {args.mix!r}; write it as define=40,tools=60")
        mix = {skill: float(share) for skill, _, share in pairs}
    recipe = base(steps=args.steps or base.steps, lr=args.lr or base.lr, lr_adam=args.lr or base.lr_adam,
                  seed=args.seed, shapes=shapes, mix=mix, disable=_words(args.disable),
                  freeze=_words(args.freeze))
    if args.start and base is Recipe:  # trained weights need no dense stretch, and their routers are balanced
        recipe = replace(recipe, warmup=max(1, recipe.steps // 14), decay_from=0.3, sparse_from=0.0,
                         round_from=0.0, balance=0.0)
    return recipe


def _words(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def prepare(device: str | None) -> tuple[str, int]:
    """(device, data workers) of a run; on a GPU also the kernels that training takes."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda"):
        if torch.device(device).index is not None:
            torch.cuda.set_device(device)  # where Triton launches
        torch._dynamo.config.automatic_dynamic_shapes = False  # few shapes, each worth its own code
        torch._dynamo.config.recompile_limit = 64
        ops.prefer(fast_kernels(), "dskit train")
    return device, max(0, (torch.multiprocessing.cpu_count() or 2) - 2)


def main(args) -> int:
    """`dskit train`: run a recipe; exit status 0 when it is complete, 1 when its minutes ran out before."""
    from dskit.train import ablate, draft

    if args.recipe == "ablate":
        return ablate.main(args)
    base = draft.DraftRecipe if args.recipe == "demo-draft" else Recipe
    recipe = recipe_of(args, base)
    device, workers = prepare(args.device)
    out = Path(args.out or f"runs/{args.recipe}")
    if base is draft.DraftRecipe:
        source = checkpoint.locate(args.start or "demo")
        trainer = draft.DraftTrainer(source, chat.Tokenizer(source), recipe, out, device, workers)
    else:
        tokenizer = chat.Tokenizer(PRESETS_DIR / "demo")
        trainer = Trainer(preset("demo").without_draft(), tokenizer, recipe, out, device, workers)
    if args.resume:
        trainer.resume()
    elif args.start and base is Recipe:
        trainer.start_from(args.start)
    done = trainer.run(minutes=args.minutes or math.inf, tensorboard=args.tensorboard)
    return 0 if done else 1
