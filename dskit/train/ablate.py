"""Ablations: matched models, each without one mechanism, trained on the same tokens and compared.

Idea: a variant is the model of one config with one thing changed and, where the comparison would be unfair
otherwise, something given back: without Engram the experts take the parameters of its tables, without the
shared expert one more routed expert answers. Per seed all variants read the same conversations in the same
order, so what is compared is the difference to the full model, seed by seed:

    worse = mean over seeds of (loss - loss of the full model),   se = standard deviation / sqrt(seeds)

The loss is measured on held-out conversations of the trained skills, each skill weighing the same. A
difference is called one when its 95 % interval (Student's t) leaves out zero.

Shapes: a run is a dict, a row of the summary too; `curve` is a list of [step, training loss].
Units: nats per answer token; shares of answer tokens right; bytes; tokens per second of training.
State: OUT/study.json says what is compared; OUT/<variant>-<seed>/result.json is a finished run, which is not
run again; state.pt an unfinished one, which goes on.
Errors: ValueError for an unknown variant, or a folder that holds another study.
Source: experience.md section 4 (`--disable`); Engram's paper for the exchange of tables and experts.
Try: notebooks/09_ablation.ipynb; dskit train ablate --disable engram,mhc --out runs/ablate
"""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dskit import chat, evaluate, ops
from dskit.config import PRESETS_DIR, ModelConfig, preset
from dskit.layers.cache import Packing
from dskit.layers.engram import Table, folding
from dskit.layers.linear import Experts, Numerics
from dskit.layers.moe import Gate
from dskit.model import Model
from dskit.train import data
from dskit.train.skills import SKILLS
from dskit.train.trainer import Recipe, Trainer, prepare

CONTEXT = 4096  # tokens whose cache is counted
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t for 1, 2, ... degrees of freedom
Run = dict[str, Any]


# ---- what is compared --------------------------------------------------------------------------------------


class NoExpert(nn.Module):
    """In place of the shared expert: there is no answer to add."""

    def forward(self, x_TD: Tensor) -> None:
        """Nothing."""


def without_indexer(model: Model) -> None:
    """Nothing scores and nothing selects, so attention reads every visible entry."""
    for block in model.layers:
        if hasattr(block.attn, "indexer"):
            del block.attn.indexer


def without_shared_expert(model: Model) -> None:
    """Only routed experts answer."""
    for block in model.layers:
        block.ffn.shared_experts = NoExpert()


def with_equal_routers(model: Model) -> None:
    """Routers that say the same of every token: with as many experts as are chosen, a dense layer."""
    for module in model.modules():
        if isinstance(module, Gate):
            nn.init.zeros_(module.weight)


def experts_for_engram(config: ModelConfig) -> dict[str, int]:
    """As many more routed experts as Engram has parameters."""
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    projection = (columns * config.engram_head_dim + 2) * config.hidden_size
    engram = sum(config.engram_num_embeddings) * config.engram_head_dim
    engram += len(config.engram_layer_ids) * (projection * config.hc_mult + projection)
    expert = 3 * config.hidden_size * config.moe_intermediate_size * config.num_hidden_layers
    return dict(n_routed_experts=config.n_routed_experts + round(engram / expert))


def one_more_expert(config: ModelConfig) -> dict[str, int]:
    """One more routed expert, and one more per token."""
    return dict(n_routed_experts=config.n_routed_experts + 1,
                num_experts_per_tok=config.num_experts_per_tok + 1)


@dataclass(frozen=True)
class Variant:
    """A model without one mechanism: `disable` and `freeze` as in a Recipe, `fair` fields of the config that
    keep `held` equal, `edit` what no field of the config can say.
    """

    what: str
    held: str
    disable: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    fair: Callable[[ModelConfig], dict[str, int]] = lambda config: {}
    edit: Callable[[Model], None] = lambda model: None


VARIANTS = {
    "full": Variant("the full model", "it is what the others are compared with"),
    "engram": Variant("no Engram", "all parameters: routed experts take those of Engram",
                      disable=("engram",), fair=experts_for_engram),
    "mhc": Variant("plain residual instead of mHC", "widths and depth; mHC's own parameters are gone",
                   disable=("mhc",), freeze=("hc_",)),
    "moe": Variant("dense layers instead of experts", "parameters per token", disable=("moe",),
                   freeze=("ffn.gate",), edit=with_equal_routers),
    "global": Variant("window only", "widths and depth", disable=("global",)),
    "sharing": Variant("no sharing across layers", "widths and depth; every layer writes its own memory",
                       disable=("sharing",)),
    "indexer": Variant("no indexer: all entries are read", "widths and depth", edit=without_indexer),
    "shared": Variant("no shared expert", "all parameters and those per token: one more routed expert",
                      fair=one_more_expert, edit=without_shared_expert),
}


def small() -> ModelConfig:
    """Every mechanism in four narrow layers, for a study of minutes on a CPU."""
    return preset("demo").without_draft().replace(
        num_hidden_layers=4, compress_ratios=(0, 2, 1, 1), kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 3), candidate_source_layer_id=2, dspark_target_layer_ids=(),
        engram_layer_ids=(0,), engram_vocab_size=1009, engram_num_embeddings=(6126,),
        hidden_size=64, num_attention_heads=4, head_dim=64, q_lora_rank=32, o_groups=2, o_lora_rank=32,
        moe_intermediate_size=64, n_routed_experts=8, index_n_heads=2, index_topk=32,
        candidate_topk_blocks=16, sliding_window=32, max_position_embeddings=1024)


SMALL = Recipe(steps=40, lr=1e-2, lr_adam=1e-2, warmup=4, shapes=((512, 1, 1),), probes=16,
               disable=("rounding",))
LARGE = Recipe(steps=600, warmup=60, shapes=((1024, 32, 1),), disable=("rounding",))


# ---- one run -----------------------------------------------------------------------------------------------


class Ablation(Trainer):
    """The trainer of one variant. On a CPU it computes in float32, which is faster there than bfloat16."""

    quiet = True  # the study says which run it is at

    def __init__(self, name: str, config: ModelConfig, tokenizer: chat.Tokenizer, recipe: Recipe, out: Path,
                 device: str = "cpu", workers: int = 0):
        self.name, self.variant = name, VARIANTS[name]
        recipe = replace(recipe, disable=(*recipe.disable, *self.variant.disable),
                         freeze=(*recipe.freeze, *self.variant.freeze))
        config = config.replace(**self.variant.fair(config))
        super().__init__(config, tokenizer, recipe, out, device, workers)

    def _numerics(self, rounded: bool) -> Numerics:
        on_cpu = self.device.type == "cpu"
        return Numerics.of(self.config, "exact") if on_cpu else super()._numerics(rounded)

    def _model(self) -> Model:
        model = super()._model()
        self.variant.edit(model)
        return model

    def finish(self) -> None:
        """A study keeps figures and draws all runs together: no checkpoint, no plot of this one alone."""

    @property
    def skills(self) -> list[str]:
        """The skills of the evaluation that are trained."""
        return [skill for skill in SKILLS if skill in (self.recipe.mix or SKILLS)]

    def held_out(self) -> dict[str, dict[str, float]]:
        """Loss and share of answer tokens right, by trained skill, on conversations never trained on."""
        seq_len, rows, _ = self.recipe.shapes[-1]
        found = {}
        for skill in self.skills:
            batch = data.batch(self.tokenizer, 0, 0, seq_len, rows, {skill: 1.0}, split="eval")
            ids, start, said = (torch.from_numpy(a).to(self.device)
                                for a in (batch.ids, batch.doc_start, batch.loss))
            with torch.no_grad():
                _, logs = self.loss(ids.long(), start.long(), said, rounded=False, sparse=True)
            found[skill] = {"loss": logs["loss"].item(), "right": logs["accuracy"].item()}
        return found

    def exact(self, limit: int) -> dict[str, float]:
        """Share of exact answers to `limit` questions of each skill, greedy, as `dskit eval` judges."""
        from dskit.engine.llm import LLM

        model, longest = self.model, max(seq_len for seq_len, *_ in self.recipe.shapes)
        for module in model.modules():
            if hasattr(module, "numerics"):
                module.numerics = Numerics.of(self.config, "exact", device=self.device)
        if self.config.engram_layer_ids:
            model.folding = folding(self.config, self.tokenizer.backend)
        with ops.use("torch"), LLM(model, tokenizer=self.tokenizer) as llm:  # training's are for bfloat16
            report = evaluate.evaluate(llm, self.skills, limit, recall_tokens=int(0.8 * longest))
        return {skill: row["rate"] for skill, row in report["skills"].items()}

    def result(self, limit: int) -> Run:
        """What a finished run has found."""
        rows = list(csv.DictReader((self.out / "log.csv").open()))
        rates = [float(row["tokens_per_s"]) for row in rows]
        skills = self.held_out()
        on_gpu = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated() / 1e6 if on_gpu else None
        return {
            "variant": self.name, "seed": self.recipe.seed, "skills": skills,
            "loss": statistics.mean(one["loss"] for one in skills.values()),
            "exact": self.exact(limit) if limit else None,
            **dict(zip(("parameters", "active"), sizes(self.model), strict=True)),
            "cache_bytes": cache_bytes(self.model, CONTEXT), "peak_mb": peak,
            "tokens": self.step * statistics.mean(s * r for s, r, w in self.recipe.shapes for _ in range(w)),
            "tokens_per_s": statistics.median(rates[1:] or rates),
            "curve": [[int(row["step"]), float(row["loss"])] for row in rows],
        }


def sizes(model: Model) -> tuple[int, int]:
    """(parameters that learn, those of them in the products that one token takes part in)."""
    learning = [(model.get_submodule(name.rpartition(".")[0]), p)
                for name, p in model.named_parameters() if p.requires_grad]
    total, active = sum(p.numel() for _, p in learning), 0.0
    for owner, p in learning:
        if isinstance(owner, Experts):
            active += p.numel() * model.config.num_experts_per_tok / owner.experts
        elif not isinstance(owner, nn.Embedding | Table):  # those are looked up
            active += p.numel()
    return total, round(active)


def cache_bytes(model: Model, tokens: int) -> int:
    """Bytes that so many tokens of one request leave in the caches, in the release's formats."""
    config, how = model.config, Numerics.of(model.config, "release")
    row = {what: Packing.of(config, how, what).nbytes for what in ("window", "entry", "key")}
    total = config.num_hidden_layers * min(tokens, config.sliding_window) * row["window"]
    for source in config.kv_source_layer_ids:
        indexed = hasattr(model.layers[source].attn, "indexer")
        total += tokens // config.ratio(source) * (row["entry"] + indexed * row["key"])
    return total


# ---- a study -----------------------------------------------------------------------------------------------


def study(names: Sequence[str], seeds: Iterable[int], out: str | Path, *, config: ModelConfig | None = None,
          recipe: Recipe | None = None, device: str = "cpu", workers: int = 0, minutes: float = math.inf,
          limit: int = 0, say: Callable[[str], None] = lambda line: None) -> list[Run]:
    """Train the full model and the named variants, seed by seed; the finished runs, when done or out of time.

    What OUT holds already is not run again, so the same call goes on where the last one was stopped.
    """
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ValueError(f"no variant is called {unknown[0]!r}; there are {', '.join(VARIANTS)}")
    config, recipe, out = config or small(), recipe or SMALL, Path(out)
    _same_study(out, {"config": asdict(replace(config, raw={})), "recipe": asdict(replace(recipe, seed=0)),
                      "limit": limit, "device": device})
    tokenizer, began, runs = chat.Tokenizer(PRESETS_DIR / "demo"), time.perf_counter(), []
    for seed in seeds:
        for name in dict.fromkeys(("full", *names)):
            folder = out / f"{name}-{seed}"
            kept = folder / "result.json"
            if not kept.exists():
                left = minutes - (time.perf_counter() - began) / 60
                if left <= 0:
                    return runs
                say(f"{name}, seed {seed}")
                run = Ablation(name, config, tokenizer, replace(recipe, seed=seed), folder, device, workers)
                if not _finish(run, left, limit):
                    return runs
            runs.append(json.loads(kept.read_text()))
    return runs


def _same_study(out: Path, settings: dict[str, Any]) -> None:
    """Write down what is compared; raises ValueError where something else was."""
    text, file = json.dumps(settings, indent=1) + "\n", out / "study.json"
    if file.exists() and file.read_text() != text:
        raise ValueError(f"{file} belongs to another study; choose another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def _finish(run: Ablation, minutes: float, limit: int) -> bool:
    """Train to the end and keep the result; False when the minutes ran out before."""
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if (run.out / "state.pt").exists():
        run.resume()
    if not run.run(minutes=minutes):
        return False
    (run.out / "result.json").write_text(json.dumps(run.result(limit), indent=1) + "\n")
    (run.out / "state.pt").unlink()
    return True


def summary(runs: list[Run]) -> list[dict[str, Any]]:
    """One row per variant: means over seeds, each with its standard error."""
    full = {run["seed"]: run["loss"] for run in runs if run["variant"] == "full"}
    rows = []
    for name in dict.fromkeys(run["variant"] for run in runs):
        mine = [run for run in runs if run["variant"] == name]
        row: dict[str, Any] = {"variant": name, "what": VARIANTS[name].what, "held": VARIANTS[name].held,
                               "seeds": len(mine), "tokens": mine[0]["tokens"]}
        row |= {key: mine[0][key] for key in ("parameters", "active", "cache_bytes")}
        columns = {"loss": [run["loss"] for run in mine]}
        if name != "full":
            columns["worse"] = [run["loss"] - full[run["seed"]] for run in mine]
        for skill in mine[0]["skills"]:
            columns[skill] = [run["skills"][skill]["right"] for run in mine]
            columns[f"{skill}_exact"] = [run["exact"][skill] for run in mine if run["exact"]]
        for key in ("tokens_per_s", "peak_mb"):
            columns[key] = [run[key] for run in mine if run[key] is not None]
        for key, values in columns.items():
            row[key], row[f"{key}_se"] = mean_of(values)
        rows.append(row)
    return rows


def mean_of(values: Sequence[float]) -> tuple[float | None, float | None]:
    """(mean, its standard error), None for what so few values do not give."""
    if not values:
        return None, None
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return statistics.mean(values), error


def differs(row: dict[str, Any]) -> bool | None:
    """Whether the 95 % interval of `worse` leaves out zero; None where one seed gives no interval."""
    if row["worse_se"] is None:
        return None
    t = T95[min(row["seeds"] - 1, len(T95)) - 1]
    return abs(row["worse"]) > t * row["worse_se"]


def finding(row: dict[str, Any]) -> str:
    """What a row of the summary supports, in one sentence."""
    what, seeds = row["what"][0].upper() + row["what"][1:], f"{row['seeds']} seed{'s' * (row['seeds'] > 1)}"
    if row["worse_se"] is None:
        return f"{what}: loss {row['worse']:+.3f}, {seeds}, so nothing can be said."
    figures = f"{row['worse']:+.3f} (standard error {row['worse_se']:#.2g}, {seeds})"
    if not differs(row):
        return f"{what}: no difference in loss that these runs can show, {figures}."
    return f"{what}: the loss is {'higher' if row['worse'] > 0 else 'lower'}, {figures}."


def write(runs: list[Run], out: Path) -> list[dict[str, Any]]:
    """Write OUT/ablation.csv, .json and .png; gives the summary."""
    from dskit.viz import figures

    rows = summary(runs)
    (out / "ablation.json").write_text(json.dumps({"summary": rows, "runs": runs}, indent=1) + "\n")
    with (out / "ablation.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    picture = figures.ablation_effects([row for row in rows if row["variant"] != "full"] or rows)
    (out / "ablation.png").write_bytes(picture.bytes("png"))
    return rows


def main(args: Any) -> int:
    """`dskit train ablate`: exit status 0 when every run is complete, 1 when the minutes ran out before."""
    from rich.console import Console

    from dskit.table import Table

    device, workers = prepare(args.device)
    on_gpu = device.startswith("cuda")
    recipe, out = recipe_of(args, LARGE if on_gpu else SMALL), Path(args.out or "runs/ablate")
    names = [word for word in args.disable.split(",") if word] or list(VARIANTS)[1:]
    seeds = range(args.seed, args.seed + (args.seeds or 3))
    config = preset("demo").without_draft() if on_gpu else small()
    runs = study(names, seeds, out, config=config, recipe=recipe, device=device, workers=workers,
                 minutes=args.minutes or math.inf, limit=args.limit or 0,
                 say=lambda line: print(line, file=sys.stderr, flush=True))
    if runs:
        rows = write(runs, out)
        Console().print(Table(map(_short, rows), f"held-out loss, nats per answer token; {out}"))
        print("\n".join(finding(row) for row in rows if row["variant"] != "full"))
    return 0 if len(runs) == len(seeds) * len({"full", *names}) else 1


def recipe_of(args: Any, base: Recipe) -> Recipe:
    """The recipe that the flags ask for."""
    seq_len, rows, weight = base.shapes[0]
    recipe = replace(base, shapes=((args.seq_len or seq_len, args.batch_size or rows, weight),))
    if args.steps:
        recipe = replace(recipe, steps=args.steps, warmup=max(1, args.steps // 10))
    return replace(recipe, lr=args.lr, lr_adam=args.lr) if args.lr else recipe


def _short(row: dict[str, Any]) -> dict[str, str]:
    """A row of the summary for the terminal: what fits a line."""
    def with_error(key: str, form: str) -> str:
        value, error = row.get(key), row.get(f"{key}_se")
        text = "" if value is None else f"{value:{form}}"
        return text if error is None else f"{text} ± {error:{form}}"

    return {"variant": row["variant"], "loss": with_error("loss", ".3f"),
            "worse by": with_error("worse", ".3f"), **{s: with_error(s, ".0%") for s in SKILLS if s in row},
            "tokens/s": with_error("tokens_per_s", ",.0f"), "parameters": f"{row['parameters']:,}",
            "per token": f"{row['active']:,}", "cache KB": f"{row['cache_bytes'] / 1e3:,.0f}",
            "peak MB": with_error("peak_mb", ",.0f")}
