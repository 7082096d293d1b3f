"""What a first cell and a curious reader call: notebook(), show(), shapes(), tap(); Table comes along.

    import dskit
    dskit.notebook()                                   # device, seed, theme, interpreter; prints one line
    dskit.show(mla)                                    # the source of a module, class, function or op
    with dskit.tap(llm, "layers.3.ffn.gate") as seen:  # what a module returns, under the module's own name
        llm.generate("hello")
    with dskit.tap(llm, "layers.3:mhc.sinkhorn") as seen:  # what an op is given and gives inside a module
        llm.generate("hello")

State: `notebook` seeds torch, numpy and random, and sets TRITON_INTERPRET where there is no GPU, since a
kernel decides when it is decorated whether it is interpreted. `tap` holds copies until its `seen` is dropped.
Errors: ValueError for an unknown theme, module or op, with the nearest names; TypeError for what has no
source; RuntimeError when nothing that was tapped ran.
Try: notebooks/00_start.ipynb
"""

from __future__ import annotations

import copy
import difflib
import fnmatch
import html
import importlib.util
import inspect
import os
import random
import textwrap
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import dskit
from dskit import ops
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
    """Record what happens inside a model while the block runs: {name: [one value per call]}.

    A name is a module's own, or a glob ("layers.*.attn.wkv"), and its values are what the module returned.
    After a colon stands an op that the module itself calls ("layers.6.attn:indexer.topk"); its values are
    dicts of the arguments, under the names of the op's signature, and the "result". Tensors are copies
    without a gradient, in tuples, lists and dataclasses too; other values are kept as they are.
    """

    def __init__(self, model: Any, *names: str):
        root = model if isinstance(model, nn.Module) else model.model  # an LLM holds its model
        self.known = dict(root.named_modules())
        known_ops = ops.all_ops()
        self.calls = [name for name in names if ":" in name]
        for name in self.calls:
            module, _, op = name.partition(":")
            _matches("module", module, self.known)
            _matches("op", op, known_ops)
        modules = [each for name in names if ":" not in name for each in _matches("module", name, self.known)]
        self.names = names
        self.seen: dict[str, list] = {name: [] for name in modules}
        self.running: list[str] = []
        self.open = ExitStack()

    def __enter__(self) -> dict[str, list]:
        for name, values in self.seen.items():
            self._after(self.known[name], lambda out, keep=values.append: keep(_copy(out)))
        if self.calls:
            for name, module in self.known.items():
                before = module.register_forward_pre_hook(lambda *_, name=name: self.running.append(name))
                self.open.callback(before.remove)
                self._after(module, lambda _: self.running.pop(), always_call=True)
        self.open.enter_context(ops.watch(self._see))  # also so that modules run where a graph would
        return self.seen

    def _after(self, module: nn.Module, do: Callable[[Any], Any], **when: bool) -> None:
        """Do something with what a module returns, and leave that as it is."""

        def hook(_module: nn.Module, _inputs: tuple, out: Any) -> None:
            do(out)

        self.open.callback(module.register_forward_hook(hook, **when).remove)

    def _see(self, op: ops.Op, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Keep an op's call, if it was asked for, under the innermost module that runs."""
        name = f"{self.running[-1] if self.running else ''}:{op.name}"
        if any(fnmatch.fnmatchcase(name, wanted) for wanted in self.calls):
            given = inspect.signature(op.reference).bind(*args, **kwargs).arguments
            call = {**given, "result": result}
            self.seen.setdefault(name, []).append({key: _copy(value) for key, value in call.items()})

    def __exit__(self, failed: type | None, *_: Any) -> None:
        self.open.close()
        self.running.clear()
        if failed is None and not any(self.seen.values()):
            raise RuntimeError(
                f"tap: nothing of {', '.join(self.names)} ran; either nothing ran in the block, or a parent "
                "does the work without calling the module: tap the parent ('*:' and an op's name finds where "
                "the op runs)"
            )


def _matches(kind: str, pattern: str, known: Collection[str]) -> list[str]:
    """The names that a glob matches, at least one."""
    found = fnmatch.filter(known, pattern)
    if not found:
        near = ", ".join(difflib.get_close_matches(pattern, known, n=3))
        lists = "print(model)" if kind == "module" else "dskit.explain()"
        raise ValueError(f"tap: no {kind} is called {pattern!r}; nearest: {near or f'{lists} lists them'}")
    return found


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (tuple, list):
        return type(value)(_copy(part) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for each in fields(value):
            object.__setattr__(twin, each.name, _copy(getattr(value, each.name)))
        return twin
    return value
