"""What a first cell and a curious reader call: notebook(), show(), shapes(), tap(); Table comes along.

    import dskit
    dskit.notebook()                                   # device, seed, theme, interpreter; prints one line
    dskit.show(mla)                                    # the source of a module, class, function or op
    with dskit.tap(llm, "layers.3.ffn.gate") as seen:  # what a module returns, under the module's own name
        llm.generate("hello")

State: `notebook` seeds torch, numpy and random, and sets TRITON_INTERPRET where there is no GPU, since a
kernel decides when it is decorated whether it is interpreted. `tap` holds copies until its `seen` is dropped.
Errors: ValueError for an unknown theme or module name, with the nearest names; TypeError for what has no
source; RuntimeError when none of the tapped modules ran.
Try: notebooks/00_start.ipynb
"""

from __future__ import annotations

import difflib
import fnmatch
import html
import importlib.util
import inspect
import os
import random
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import dskit
from dskit.table import Table  # noqa: F401 - notebooks take it from here

PACKAGE = Path(dskit.__file__).parent


# ---- the first cell --------------------------------------------------------------------------------------


def notebook(seed: int = 0, theme: str = "auto") -> None:
    """Set device, seed, theme ("auto", "light", "dark") and interpreter flag of a notebook; print one line.

    It must come before anything that imports Triton kernels. Figures are white cards in "auto", and
    transparent with dark or bright ink in "light" and "dark".
    """
    from dskit.viz import figures

    figures.set_theme(theme)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    print(f"dskit {dskit.__version__} on {_device()}, seed {seed}, theme {theme}, {_triton()}")  # noqa: T201


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"cpu ({threads} thread{'s' * (threads > 1)})"


def _triton() -> str:
    if importlib.util.find_spec("triton") is None:
        return "triton not installed"
    if torch.cuda.is_available():
        return "triton compiled"
    os.environ["TRITON_INTERPRET"] = "1"
    return "triton interpreted"


@dataclass(frozen=True)
class Shapes:
    """Sizes that suit this machine: large on a GPU, small on a CPU, the widths the same on both."""

    device: str
    prefill_tokens: int
    decode_requests: int
    repeat: int

    def __str__(self) -> str:
        small = "" if self.device == "cuda" else " These times compare shapes, not machines."
        sizes = f"prefill {self.prefill_tokens} tokens, decode {self.decode_requests} requests"
        return f"{sizes}, {self.device}.{small}"


def shapes() -> Shapes:
    """The sizes that notebooks measure with on this machine."""
    if torch.cuda.is_available():
        return Shapes("cuda", 4096, 128, 20)
    return Shapes("cpu", 64, 4, 3)


# ---- reading ---------------------------------------------------------------------------------------------


class Source:
    """Source text that displays itself, coloured, under its file and line."""

    def __init__(self, where: str, text: str):
        self.where, self.text = where, text

    def __repr__(self) -> str:
        return f"# {self.where}\n{self.text}"

    def _repr_html_(self) -> str:
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import PythonLexer

        from dskit.viz import figures

        dark = figures.theme() is figures.THEMES["dark"]
        style = "nord" if dark else "default"
        formatter = HtmlFormatter(noclasses=True, style=style, prestyles="font-family:monospace")
        code = highlight(self.text, PythonLexer(), formatter)
        frame = "max-height:32em;overflow:auto;border:1px solid #8885;border-radius:4px;padding:0 0.6em"
        return f'<div><b>{html.escape(self.where)}</b></div><div tabindex="0" style="{frame}">{code}</div>'


def show(thing: Any) -> Source:
    """The source of a module, class, function, method or op (its reference), as it runs."""
    thing = inspect.unwrap(thing)  # an op's reference is what it wraps
    if isinstance(thing, nn.Module):
        thing = type(thing)
    try:
        lines, first = inspect.getsourcelines(thing)
        file = inspect.getsourcefile(thing)
    except (TypeError, OSError) as error:
        text = f"{thing!r} has no Python source to show; give a module, class, function or op"
        raise TypeError(text) from error
    path = Path(file)
    name = path.relative_to(PACKAGE.parent).as_posix() if path.is_relative_to(PACKAGE) else path.name
    return Source(name if first == 0 else f"{name}, line {first}", textwrap.dedent("".join(lines)).rstrip())


# ---- looking inside --------------------------------------------------------------------------------------


class tap:  # noqa: N801 - reads as a verb: with dskit.tap(llm, "layers.3.ffn.gate") as seen
    """Record what modules return while the block runs: {name: [one value per call]}.

    `names` are the module's own names or globs ("layers.*.attn.wkv"). Tensors are copies without a gradient;
    tuples and lists of them keep their form, other values are kept as they are.
    """

    def __init__(self, model: Any, *names: str):
        root = model if isinstance(model, nn.Module) else model.model  # an LLM holds its model
        known = dict(root.named_modules())
        self.modules = {}
        for name in names:
            found = fnmatch.filter(known, name)
            if not found:
                near = ", ".join(difflib.get_close_matches(name, known, n=3)) or "print(model) lists them"
                raise ValueError(f"tap: no module is called {name!r}; nearest: {near}")
            self.modules |= {each: known[each] for each in found}
        self.seen: dict[str, list] = {name: [] for name in self.modules}
        self.hooks: list = []

    def __enter__(self) -> dict[str, list]:
        for name, module in self.modules.items():
            keep = self.seen[name].append
            self.hooks.append(module.register_forward_hook(lambda _m, _in, out, keep=keep: keep(_copy(out))))
        return self.seen

    def __exit__(self, failed: type | None, *_: Any) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        if failed is None and not any(self.seen.values()):
            raise RuntimeError(
                f"tap: none of {', '.join(self.modules)} was called; either nothing ran in the block, or the "
                "parent module reads their weights without calling them: tap the parent"
            )


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (tuple, list):
        return type(value)(_copy(part) for part in value)
    return value
