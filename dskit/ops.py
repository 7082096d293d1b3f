"""The registry where a layer's formula and its fused kernel meet.

Idea: an op has one name (`mhc.sinkhorn`), one signature and several implementations. The reference in the
layer file is implementation `torch`; `compile` is torch.compile of that reference; a kernel file registers
`triton`. Layers call the op, never a kernel, and `use(mhc="triton")` swaps what the call runs.

Authority, highest first: `pin` (one module) > `use` > `--kernels` > `DSKIT_USE` > default (`torch` on a CPU,
`auto` on a GPU). An explicit choice that cannot be met raises; only `auto` falls back, and records why.

Errors: UnknownOp and UnknownImplementation name the nearest spellings; Unsupported names the op, the
implementation, the reason and the remedy.

    with dskit.use(mhc="compile"):
        llm.generate("hello")
"""

from __future__ import annotations

import difflib
import fnmatch
import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

CHOICES = ("torch", "compile", "triton", "auto")
PHASES = ("prefill", "decode")


class UnknownOp(KeyError):
    """No op or group has this name; the message lists the nearest ones."""

    def __str__(self) -> str:
        return self.args[0]


class UnknownImplementation(ValueError):
    """The op has no implementation of this name; the message lists those it has."""


class Unsupported(RuntimeError):
    """An implementation asked for by name cannot run these arguments on this machine."""


@dataclass
class Implementation:
    """One way to compute an op: `when(*args)` returns None, or the reason why it cannot."""

    name: str
    function: Callable
    when: Callable | None = None
    grad: bool = False


@dataclass
class Op:
    """A named operation; calling it runs the implementation selected now."""

    name: str
    group: str
    implementations: dict[str, Implementation] = field(default_factory=dict)
    selected: dict[str, tuple[str, str]] = field(default_factory=dict)  # phase -> implementation, decided by
    refusals: dict[str, str] = field(default_factory=dict)
    calls: int = 0
    last_shape: tuple[int, ...] | None = None
    run: Callable | None = None

    def __call__(self, *args, **kwargs):
        """Run the selected implementation."""
        if not torch.compiler.is_compiling():
            self.calls += 1
        return self.run(*args, **kwargs)

    @property
    def reference(self) -> Callable:
        """The plain PyTorch function of the layer file."""
        return self.implementations["torch"].function

    def implementation(self, name: str) -> Implementation:
        """Find an implementation, importing its kernel file or compiling the reference on first use."""
        if name == "triton" and name not in self.implementations:
            stem = self.name.split(".")[0]
            if importlib.util.find_spec(f"dskit.kernels.{stem}") is not None:
                importlib.import_module(f"dskit.kernels.{stem}")
        if name == "compile" and name not in self.implementations:
            compiled = torch.compile(self.reference, dynamic=None)
            self.implementations[name] = Implementation(name, compiled, grad=True)
        if name not in self.implementations:
            have = ", ".join(dict.fromkeys([*self.implementations, "compile"]))
            raise UnknownImplementation(f"op {self.name} has no implementation {name!r}; it has: {have}")
        return self.implementations[name]


_OPS: dict[str, Op] = {}
_STATE = {"phase": "prefill", "profiling": False}


def op(name: str, *, group: str | None = None, grad: bool = True) -> Callable[[Callable], Op]:
    """Define an op by its reference function; the op takes the function's place in the layer file."""

    def register(function: Callable) -> Op:
        new = Op(name, group or name.split(".")[0], {"torch": Implementation("torch", function, grad=grad)})
        new.__doc__, new.__wrapped__ = function.__doc__, function
        _OPS[name] = new
        _apply_rules([new])
        return new

    return register


def implement(name: str, implementation: str, *, when: Callable | None = None,
              grad: bool = False) -> Callable:
    """Register another implementation of an op; returns the function unchanged."""

    def register(function: Callable) -> Callable:
        find(name).implementations[implementation] = Implementation(implementation, function, when, grad)
        return function

    return register


def find(name: str) -> Op:
    """The op called `name`, or UnknownOp with the nearest names."""
    if name not in _OPS:
        raise UnknownOp(_no_such("op", name, _OPS))
    return _OPS[name]


def all_ops() -> dict[str, Op]:
    """Every op registered so far, by name."""
    return dict(_OPS)


def _no_such(kind: str, name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)
    return f"no {kind} is called {name!r}" + (f"; did you mean {', '.join(near)}?" if near else "")


# ---- choosing ----------------------------------------------------------------------------------------------

# (op or group or "*", implementation, phases, decided by)
_rules: list[tuple[str, str, tuple[str, ...], str]] = []


class use:  # noqa: N801 - reads as a verb: dskit.use(moe="triton")
    """Choose implementations by group or op name, for good or within a `with` block.

    `use("torch")` sets every group, `use(moe="triton")` one, `use({"moe.experts": "triton"})` one op, and
    `phase="decode"` limits the choice to decode steps. Raises UnknownOp, UnknownImplementation.
    """

    def __init__(self, choice: str | dict[str, str] | None = None, *, phase: str | None = None,
                 **groups: str):
        if phase is not None and phase not in PHASES:
            raise ValueError(f"phase must be one of {', '.join(PHASES)}, not {phase!r}")
        wanted = {"*": choice} if isinstance(choice, str) else dict(choice or {})
        self.before = list(_rules)
        _add_rules(wanted | groups, (phase,) if phase else PHASES, "use")

    def __enter__(self) -> use:
        return self

    def __exit__(self, *_) -> None:
        _rules[:] = self.before
        _apply_rules(_OPS.values())


def _add_rules(wanted: dict[str, str], phases: tuple[str, ...], decided_by: str) -> None:
    groups = {o.group for o in _OPS.values()}
    for target, choice in wanted.items():
        if target != "*" and target not in groups and target not in _OPS:
            raise UnknownOp(_no_such("op or group", target, [*groups, *_OPS]))
        names = sorted({*CHOICES, *(name for o in _OPS.values() for name in o.implementations)})
        if choice not in names:
            near = difflib.get_close_matches(choice, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; choose one of {', '.join(names)}"
            raise UnknownImplementation(f"no implementation is called {choice!r}{hint}")
        if choice not in ("torch", "auto") and target != "*":
            for o in _matching(target):
                o.implementation(choice)
    _rules.extend((target, choice, phases, decided_by) for target, choice in wanted.items())
    _apply_rules(_OPS.values())


def _matching(target: str) -> list[Op]:
    return [o for o in _OPS.values() if target in ("*", o.group, o.name)]


def check_environment() -> None:
    """Raise UnknownOp when `DSKIT_USE` names no op or group; for when all ops are registered."""
    groups = {o.group for o in _OPS.values()}
    for target, *_ in _environment_rules():
        if target != "*" and target not in groups and target not in _OPS:
            raise UnknownOp("DSKIT_USE: " + _no_such("op or group", target, [*groups, *_OPS]))


def read_words(words: str) -> dict[str, str]:
    """Parse `moe=triton,mla=torch`, the spelling of `DSKIT_USE` and `--kernels`."""
    pairs = [word.split("=", 1) for word in words.split(",") if word.strip()]
    bad = [p[0] for p in pairs if len(p) == 1 and p[0] not in CHOICES]
    if bad:
        raise ValueError(f"kernel choice {bad[0]!r} is not of the form group=implementation")
    return {(p[0].strip() if len(p) == 2 else "*"): p[-1].strip() for p in pairs}


def _apply_rules(targets: Iterable[Op]) -> None:
    default = "auto" if torch.cuda.is_available() else "torch"
    rules = [*_environment_rules(), *_rules]
    for o in targets:
        for phase in PHASES:
            o.selected[phase] = (default, "default")
            for target, choice, phases, by in rules:
                if phase in phases and target in ("*", o.group, o.name):
                    o.selected[phase] = (choice, by)
        _bind(o)


def _environment_rules() -> list[tuple[str, str, tuple[str, ...], str]]:
    words = read_words(os.environ.get("DSKIT_USE", ""))
    return [(target, choice, PHASES, "DSKIT_USE") for target, choice in words.items()]


def _bind(o: Op) -> None:
    """Point `o.run` at what the current phase has selected."""
    choice = o.selected[_STATE["phase"]][0]
    run = _automatic(o) if choice == "auto" else _strict(o, choice)
    o.run = _named(o, choice, run) if _STATE["profiling"] else run


def _strict(o: Op, choice: str) -> Callable:
    if choice == "torch":
        return o.reference
    implementation = o.implementation(choice)
    if implementation.when is None:
        return implementation.function

    def checked(*args, **kwargs):
        reason = implementation.when(*args, **kwargs)
        if reason is not None:
            raise Unsupported(f"op {o.name}: implementation {choice!r} cannot run here: {reason}; "
                              f"use({o.group}='torch') or use({o.group}='auto')")
        return implementation.function(*args, **kwargs)

    return checked


def _automatic(o: Op) -> Callable:
    """Triton where it exists and accepts the arguments, else the reference; each refusal is recorded once."""
    try:
        implementation = o.implementation("triton")
    except (UnknownImplementation, ImportError) as error:
        o.refusals.setdefault("triton", str(error))
        return o.reference

    def first_that_can(*args, **kwargs):
        reason = implementation.when(*args, **kwargs) if implementation.when else None
        if reason is None:
            return implementation.function(*args, **kwargs)
        o.refusals.setdefault("triton", reason)
        return o.reference(*args, **kwargs)

    return first_that_can


def _named(o: Op, choice: str, run: Callable) -> Callable:
    def ranged(*args, **kwargs):
        o.last_shape = next((tuple(a.shape) for a in args if isinstance(a, torch.Tensor)), None)
        with torch.profiler.record_function(f"dskit::{o.name}[{choice}]"):
            return run(*args, **kwargs)

    return ranged


def set_phase(phase: str) -> None:
    """Tell the registry which kind of step runs next; only phase-dependent choices rebind."""
    if phase != _STATE["phase"]:
        _STATE["phase"] = phase
        for o in _OPS.values():
            if o.selected["prefill"] != o.selected["decode"]:
                _bind(o)


@contextmanager
def named_ranges() -> Iterator[None]:
    """While open, every op call appears in torch.profiler as `dskit::<op>[<implementation>]`."""
    _STATE["profiling"] = True
    for o in _OPS.values():
        _bind(o)
    try:
        yield
    finally:
        _STATE["profiling"] = False
        for o in _OPS.values():
            _bind(o)


def pin(model: torch.nn.Module, pattern: str, **groups: str) -> Callable[[], None]:
    """Choose implementations for the modules whose name matches a glob; returns a function that unpins.

    Raises ValueError when the pattern matches nothing or a module is already pinned.
    """
    modules = {name: m for name, m in model.named_modules() if fnmatch.fnmatch(name, pattern)}
    if not modules:
        raise ValueError(f"pin: no module matches {pattern!r}")
    taken = [name for name, m in modules.items() if getattr(m, "_dskit_pin", None)]
    if taken:
        raise ValueError(f"pin: {taken[0]} is already pinned by {modules[taken[0]]._dskit_pin!r}")
    hooks = []
    for m in modules.values():
        scopes: list[use] = []
        m._dskit_pin = pattern
        hooks.append(m.register_forward_pre_hook(lambda *_, scopes=scopes: scopes.append(use(groups))))
        hooks.append(m.register_forward_hook(lambda *_, scopes=scopes: scopes.pop().__exit__(),
                                             always_call=True))

    def unpin() -> None:
        for hook in hooks:
            hook.remove()
        for m in modules.values():
            m._dskit_pin = None

    return unpin


# ---- looking -----------------------------------------------------------------------------------------------

def explain() -> list[dict[str, object]]:
    """One row per op: what is selected and by which rule, what else exists, refusals, calls."""
    rows = []
    for o in sorted(_OPS.values(), key=lambda o: o.name):
        choice, by = o.selected[_STATE["phase"]]
        rows.append({"op": o.name, "selected": choice, "decided_by": by,
                     "available": sorted({*o.implementations, "compile"}),
                     "refused": dict(o.refusals), "calls": o.calls, "last_shape": o.last_shape})
    return rows


def compare(name: str, *args, repeat: int = 5, **kwargs) -> list[dict[str, object]]:
    """Run every implementation of an op on the same arguments: error against float64, and milliseconds.

    Under the Triton interpreter the time is None: it says nothing about a GPU.
    """
    o = find(name)
    widen = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    oracle = _first_tensor(o.reference(*widen, **kwargs)).double()
    rows = []
    for which in dict.fromkeys([*o.implementations, "triton"]):
        try:
            implementation = o.implementation(which)
            reason = implementation.when(*args, **kwargs) if implementation.when else None
        except (UnknownImplementation, ImportError) as error:
            reason = str(error)
        if reason is not None:
            rows.append({"implementation": which, "refused": reason})
            continue
        result = _first_tensor(implementation.function(*args, **kwargs)).double()
        error = (result - oracle).pow(2).mean().sqrt() / oracle.pow(2).mean().sqrt().clamp_min(1e-30)
        interpreted = which == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        time_ms = None if interpreted else _milliseconds(implementation.function, args, kwargs, repeat)
        rows.append({"implementation": which, "relative_rms": error.item(), "time_ms": time_ms})
    return rows


def _first_tensor(result) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def _milliseconds(function: Callable, args, kwargs, repeat: int) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    function(*args, **kwargs)
    wait()
    start = time.perf_counter()
    for _ in range(repeat):
        function(*args, **kwargs)
    wait()
    return 1e3 * (time.perf_counter() - start) / repeat
