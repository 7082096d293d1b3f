"""ExpertLoad: how many tokens each expert of each layer gets, for one text or for all so far.

    ExpertLoad(llm, ["What does lamp mean?", "What is 47 + 85?"])

Idea: routers are tapped while the text is scored; counting their choices gives the rows. The colour scale is
set by the first picture and stays until "reset", so that texts can be compared.

State: `total` has the counts of all texts since the reset.
Errors: ValueError for an LLM without routers.
Try: notebooks/05_moe.ipynb
"""

from __future__ import annotations

import math
from typing import Any

import ipywidgets
import torch

from dskit.viz import figures
from dskit.viz.notebook import tap
from dskit.viz.widgets import Board, push_button

GATES = "layers.*.ffn.gate"


def counts(seen: dict[str, list], experts: int) -> dict[int, list[int]]:
    """{layer: tokens of each expert} from what a tap on the routers has seen."""
    found = {}
    for name, values in seen.items():
        chosen = torch.cat([topk_TJ.flatten() for topk_TJ, _ in values]).cpu()
        found[int(name.split(".")[1])] = chosen.bincount(minlength=experts).tolist()
    return found


def load_rows(loads: dict[int, list[int]]) -> list[dict[str, Any]]:
    """Rows of figures.expert_load: counts, the even load, max over mean, entropy (1: even)."""
    return [{"layer": layer, "loads": mine} | evenness(mine) for layer, mine in sorted(loads.items())]


def evenness(loads: list[int]) -> dict[str, float]:
    """The even load, the largest over it, and the entropy of the shares over that of even ones."""
    total = sum(loads)
    shares = [load / total for load in loads if load]
    entropy = -sum(share * math.log(share) for share in shares) / math.log(len(loads))
    mean = total / len(loads)
    return {"ideal": mean, "max_over_mean": max(loads) / mean, "entropy": entropy}


class ExpertLoad(Board):
    """A heat map of layers by experts for one of some texts, or for all that were run."""

    def __init__(self, llm: Any, texts: list[str]):
        self.llm, self.top, self.total = llm, None, {}
        self._batch: dict[int, list[int]] = {}
        self.text = ipywidgets.Dropdown(options=texts, description="text", tooltip="what the model reads")
        self.which = ipywidgets.ToggleButtons(options=["batch", "running"], description="count",
                                              tooltips=["this text alone", "all texts since the reset"])
        self.which.observe(lambda _: self._redraw(), "value")
        buttons = [push_button("run", "let the model read the text", lambda _: self.run()),
                   push_button("reset", "forget counts and scale", lambda _: self.reset())]
        super().__init__("expert_load", lambda rows: figures.expert_load(rows, self.top),
                         [ipywidgets.HBox([self.text, self.which, *buttons])])
        self.run()

    @property
    def code(self) -> str:
        """The lines that give the counts of the text."""
        return (f"with dskit.tap(llm, {GATES!r}) as seen: llm.logits(llm.encode({self.text.value!r}))")

    def run(self) -> None:
        """Let the model read the text, and count."""
        with tap(self.llm, GATES) as seen:
            self.llm.logits(self.llm.encode(self.text.value))
        self._batch = counts(seen, self.llm.config.n_routed_experts)
        for layer, mine in self._batch.items():
            before = self.total.get(layer, [0] * len(mine))
            self.total[layer] = [a + b for a, b in zip(before, mine, strict=True)]
        self._redraw()

    def reset(self) -> None:
        """Begin to count anew, with the text that is chosen, and set the scale by it."""
        self.total, self.top = {}, None
        self.run()

    def _redraw(self) -> None:
        loads = self.total if self.which.value == "running" else self._batch
        self.top = self.top or max(map(max, loads.values()))
        self.present(load_rows(loads))
