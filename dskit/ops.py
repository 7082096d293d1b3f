"""The registry where a layer's formula and its fused kernel meet.

Idea: an op has one name (`mhc.sinkhorn`), one signature and several implementations. The reference in the
layer file is implementation `torch`; `compile` is torch.compile of that reference; a kernel file registers
`triton`. Layers call the op, never a kernel, and `use(mhc="triton")` swaps what the call runs. Fine ops are
the formulas; a coarse op (`moe.experts`) is what a kernel fuses, and its reference calls the fine ones, so
that a swap can be made at either grain.

Authority, highest first: `pin` (one module) > `use` > `--kernels` > `DSKIT_USE` > default (`torch` on a CPU,
`auto` on a GPU). Among words of one source the later wins; within one call an op beats its group beats all.
An explicit choice that cannot be met raises. A group's choice reaches the ops that have the implementation,
and names those that have not. Only `auto` falls back, and records why; it never takes an interpreted kernel,
nor one that no run on this kind of GPU has proven (`dskit bench kernels --prove`), and inside torch.compile
it takes the reference, which the compiler fuses by itself. An op that is not `traced`, since its loop depends
on values and the compiler would make a program for each of them, is called in there as it is.

State: one selection for the process, seen by every thread. A step holds it (`step`), and a choice made
meanwhile waits for the step's end. A check (`when`) is asked once per shape class: the dtypes and sizes of
the tensors, the device of the first, whether gradients are wanted, and every other argument. It may look at
nothing else.

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
import json
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dskit.table import Table

CHOICES = ("torch", "compile", "triton", "auto")
PROVEN = Path(__file__).parent / "kernels" / "proven.json"  # GPU -> the run, and the ops whose kernels passed
AUTO = ("triton",)  # what `auto` tries, in this order, before the reference
PHASES = ("prefill", "decode")
HOMES = ("dskit.model", "dskit.engine.exchange", "dskit.engine.sampler")  # importing these registers every op
INTERPRETED = ("the Triton interpreter checks kernels and is no way to run a model: auto leaves it alone, a "
               "choice by name takes it")

logger = logging.getLogger("dskit.ops")


class UnknownOp(KeyError):
    """No op or group has this name; the message lists the nearest ones."""

    def __str__(self) -> str:
        return self.args[0]


class UnknownImplementation(ValueError):
    """The op has no implementation of this name; the message lists those it has."""


class Unsupported(RuntimeError):
    """An implementation asked for by name cannot run these arguments on this machine."""


# ---- an op and its implementations -------------------------------------------------------------------------


@dataclass(eq=False)
class Implementation:
    """One way to compute an op: `when(*args)` returns None, or the reason why it cannot."""

    name: str
    function: Callable
    when: Callable | None = None
    grad: bool = False
    calls: int = 0

    @property
    def unconditional(self) -> bool:
        """True when no argument can be refused."""
        return self.when is None and (self.grad or self.name == "torch")

    def why_not(self, args: tuple, kwargs: dict[str, Any]) -> str | None:
        """The reason why it cannot take these arguments, or None."""
        if not self.grad and torch.is_grad_enabled() and any(
                isinstance(a, Tensor) and a.requires_grad for a in (*args, *kwargs.values())):
            return "it has no backward, and an argument requires a gradient"
        return self.when(*args, **kwargs) if self.when else None


_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype))
_grad_enabled, _compiling = torch.is_grad_enabled, torch.compiler.is_compiling  # looked up once


def _shape_class(args: tuple, kwargs: dict[str, Any]) -> tuple:
    """What a check may depend on, as a key; other objects by weak reference, so that weights can be freed."""
    grad, device, parts = _grad_enabled(), None, []
    add = parts.append
    for a in (*args, *kwargs.values()) if kwargs else args:
        kind = a.__class__
        if kind in _PLAIN:
            add(a)
        elif kind is Tensor or isinstance(a, Tensor):
            add(a.dtype)
            add(a.shape)
            if grad:
                add(a.requires_grad)
            if device is None:
                device = a.device
        elif kind is tuple:
            add(_shape_class(a, {}))
        else:
            add(weakref.ref(a))
    return (grad, device, *parts, *kwargs)


class Op:
    """A named operation; calling it runs the implementation selected now."""

    def __init__(self, name: str, group: str, reference: Implementation, traced: bool = True):
        self.name, self.group, self.traced = name, group, traced
        self.__doc__, self.__wrapped__ = reference.function.__doc__, reference.function
        self.implementations = {"torch": reference}
        self.selected: dict[str, tuple[str, str]] = {}  # phase -> implementation, decided by
        self.refusals: dict[str, str] = {}
        self.last_shape: tuple[int, ...] | None = None
        self.pinned: list[str] = []  # the choice of a pinned module while it runs
        self.choice = "torch"  # the implementation selected now, or auto
        self._able: list[Implementation] | None = None  # what `auto` may try here; None: not yet looked up
        self._decisions: dict[str, dict[tuple, Implementation]] = {}  # choice -> shape class -> what runs
        self._decided: dict[tuple, Implementation] = {}  # those of the present choice
        self._ready: Implementation | None = None  # what runs whatever the arguments; None: they decide
        self._traced: Callable = reference.function  # what torch.compile sees

    def __call__(self, *args, **kwargs):
        """Run the selected implementation."""
        if _compiling():
            return self._traced(*args, **kwargs)
        chosen = self._ready or self._choose(args, kwargs)
        chosen.calls += 1
        self.last_shape = args[0].shape if args and isinstance(args[0], Tensor) else None
        if _state.ranging or _state.watchers:
            return self._watched(chosen, args, kwargs)
        return chosen.function(*args, **kwargs)

    def _watched(self, chosen: Implementation, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call in sight of open profiles and watchers."""
        with _range(f"dskit::{self.name}[{chosen.name}]"):
            result = chosen.function(*args, **kwargs)
        for see in _state.watchers:
            see(self, args, kwargs, result)
        return result

    @property
    def reference(self) -> Callable:
        """The plain PyTorch function of the layer file."""
        return self.implementations["torch"].function

    @property
    def calls(self) -> int:
        """Calls since the start, by whichever implementation; replays of a CUDA graph are not seen."""
        return sum(each.calls for each in self.implementations.values())

    def implementation(self, name: str) -> Implementation:
        """Find an implementation, importing its kernel file or compiling the reference on first use.

        Raises UnknownImplementation, and Unsupported where the kernel file cannot be imported.
        """
        if name == "triton" and name not in self.implementations:
            self._import_kernels()
        if name == "compile" and name not in self.implementations:
            self.implementations[name] = Implementation(name, compiled(self, dynamic=None), grad=True)
        if name not in self.implementations:
            have = ", ".join(dict.fromkeys([*self.implementations, "compile"]))
            raise UnknownImplementation(f"op {self.name} has no implementation {name!r}; it has: {have}")
        return self.implementations[name]

    def _import_kernels(self) -> None:
        home = f"dskit.kernels.{self.name.split('.')[0]}"
        if importlib.util.find_spec(home) is not None:
            try:
                importlib.import_module(home)
            except ImportError as error:
                raise Unsupported(self._cannot("triton", str(error))) from error

    def bind(self) -> None:
        """Work out, as far as no argument is needed, what the present choice runs."""
        self.choice = self.pinned[-1] if self.pinned else self.selected[_state.phase][0]
        known = self.implementations.get(self.choice)
        self._ready = known if known and known.unconditional else None
        self._traced = known.function if known and known.name != "compile" else self.reference
        if _state.compiles and not self.traced and self._traced is self.reference:
            self._traced = torch.compiler.disable(self.reference)
        self._decided = self._decisions.setdefault(self.choice, {})

    def forget(self) -> None:
        """Ask every check anew: a choice or an implementation has changed."""
        self._able = None
        self._decisions.clear()

    def _choose(self, args: tuple, kwargs: dict[str, Any]) -> Implementation:
        """What the present choice makes of these arguments: asked once per shape class."""
        try:
            key = _shape_class(args, kwargs)
            known = self._decided.get(key)
        except TypeError:  # an argument that can be no key, such as a list
            key = known = None
        return known or self._decide(key, args, kwargs)

    def _decide(self, key: tuple | None, args: tuple, kwargs: dict[str, Any]) -> Implementation:
        if self.choice not in ("auto", *self.implementations) and not _state.checked:
            check_environment()  # its words were read before this op's kernel file could be
            return self._ready or self._choose(args, kwargs)
        decide = self._first_that_can if self.choice == "auto" else self._as_told
        chosen = decide(args, kwargs)
        if len(self._decided) >= 4096:  # lengths of prompts come and go
            self._decided.clear()
        if key is not None:
            self._decided[key] = chosen
        return chosen

    def _as_told(self, args: tuple, kwargs: dict[str, Any]) -> Implementation:
        chosen = self.implementation(self.choice)
        reason = chosen.why_not(args, kwargs)
        if reason is not None:
            raise Unsupported(self._cannot(chosen.name, reason))
        return chosen

    def _first_that_can(self, args: tuple, kwargs: dict[str, Any]) -> Implementation:
        """What `auto` runs; each refusal is recorded once."""
        if self._able is None:
            self._able = [self.implementations[name] for name in AUTO if not self._absent(name)]
            if not self._able:
                self._ready = self.implementations["torch"]
        for each in self._able:
            reason = each.why_not(args, kwargs)
            if reason is None:
                return each
            self._refused(each.name, reason)
        return self.implementations["torch"]

    def aside(self, name: str) -> str | None:
        """Why `auto` leaves an implementation aside whatever the arguments; None: it may take it."""
        try:
            return (not_here(name) or (INTERPRETED if name == "triton" and interpreting() else None)
                    or unproven(self.name, self.implementation(name)))
        except (UnknownImplementation, Unsupported) as error:
            return str(error)

    def _absent(self, name: str) -> bool:
        """True, and the reason recorded, when `auto` cannot take an implementation whatever the arguments."""
        reason = self.aside(name)
        if reason is not None:
            self._refused(name, reason)
        return reason is not None

    def _refused(self, name: str, reason: str) -> None:
        if name not in self.refusals:
            logger.info("auto: op %s leaves %s aside: %s", self.name, name, reason)
            self.refusals[name] = reason

    def _cannot(self, name: str, reason: str) -> str:
        return (f"op {self.name}: implementation {name!r} cannot run here: {reason}; "
                f"use({self.group}='torch') or use({self.group}='auto')")


def compiled(o: Op, **how: Any) -> Callable:
    """torch.compile of an op's reference."""
    if not _state.compiles:
        _state.compiles = True
        for each in _ops.values():
            each.bind()
    return torch.compile(o.reference, **how)


def not_here(name: str) -> str | None:
    """Why this machine, as this process was started, cannot run an implementation at all; None: it may."""
    if name != "triton" or torch.cuda.is_available() or interpreting():
        return None
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 was set after dskit.kernels was imported; set it before, and start again"
    return ("there is no GPU, and a CPU interprets kernels only when TRITON_INTERPRET=1 is set before "
            "dskit.kernels is imported")


def unproven(name: str, implementation: Implementation) -> str | None:
    """Why `auto` does not trust a kernel of dskit's on this GPU yet; None once a run has proven it there."""
    if not implementation.function.__module__.startswith("dskit.kernels.") or not torch.cuda.is_available():
        return None
    gpu = "sm_{}{}".format(*torch.cuda.get_device_capability())
    if name in json.loads(PROVEN.read_text()).get(gpu, {}).get("ops", ()):
        return None
    return (f"no run has proven it on {gpu} yet; `dskit bench kernels --prove` checks every kernel at its "
            "released widths and lets auto take those that are right")


def interpreting() -> bool:
    """True when kernels of this process run in the Triton interpreter."""
    common = sys.modules.get("dskit.kernels.common")  # read its own switch once it is there
    return common.INTERPRET if common else os.environ.get("TRITON_INTERPRET") == "1"


# ---- registering -------------------------------------------------------------------------------------------

_ops: dict[str, Op] = {}


def op(name: str, *, group: str | None = None, grad: bool = True,
       traced: bool = True) -> Callable[[Callable], Op]:
    """Define an op by its reference function; the op takes the function's place in the layer file.

    traced: whether torch.compile may look into the reference where another op calls it.
    """

    def register(function: Callable) -> Op:
        new = Op(name, group or name.split(".")[0], Implementation("torch", function, grad=grad), traced)
        _ops[name] = new
        _apply([new])
        return new

    return register


def implement(name: str, implementation: str, *, when: Callable | None = None,
              grad: bool = False) -> Callable:
    """Register another implementation of an op; returns the function unchanged.

    when: gets the arguments and returns None, or the reason why it cannot take them. grad: has a backward;
    without one, arguments that require a gradient are refused.
    """

    def register(function: Callable) -> Callable:
        found = find(name)
        if implementation in found.implementations:  # a notebook cell that ran twice
            logger.warning("%s: implementation %r is replaced", name, implementation)
        found.implementations[implementation] = Implementation(implementation, function, when, grad)
        found.refusals.pop(implementation, None)
        _apply([found])
        return function

    return register


def find(name: str) -> Op:
    """The op called `name`, or UnknownOp with the nearest names."""
    if name not in _ops:
        raise UnknownOp(_no_such("op", name, _ops))
    return _ops[name]


def all_ops() -> dict[str, Op]:
    """Every op registered so far, by name."""
    return dict(_ops)


def _no_such(kind: str, name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)
    return f"no {kind} is called {name!r}" + (f"; did you mean {', '.join(near)}?" if near else "")


# ---- choosing ----------------------------------------------------------------------------------------------

# lowest authority first; what a command prefers is a default that explain() names
SOURCES = ("command", "DSKIT_USE", "--kernels", "use")


@dataclass(eq=False)
class Rule:
    """One word of a choice: which ops, which implementation, in which phases, decided by whom."""

    target: str  # op, group or *
    choice: str
    phases: tuple[str, ...]
    source: str
    by: str
    scoped: bool = False  # holds within a `with` block

    def covers(self, o: Op, phase: str) -> bool:
        """True when this rule decides the op, which must have the implementation."""
        return (phase in self.phases and self.target in ("*", o.group, o.name)
                and (self.choice in ("torch", "auto") or self.choice in o.implementations
                     or self.source == "DSKIT_USE" and not _state.checked))


_rules: list[Rule] = []
_told: set[tuple[str, str]] = set()  # words whose ops without the implementation have been named


@dataclass(eq=False)
class _Ranges:
    """What steps and ops are ranges of, in one step of `every`; with 1 also outside steps."""

    around: Callable[[str], AbstractContextManager]
    every: int
    steps: int = 0

    def due(self) -> bool:
        """Count a step; True for the first, and for every `every`-th after it."""
        self.steps += 1
        return (self.steps - 1) % self.every == 0


@dataclass
class _State:
    """What all ops share: the phase of the running step, who looks on, how often a choice has changed."""

    phase: str = "prefill"
    ranges: list[_Ranges] = field(default_factory=list)  # open profiles
    ranging: list[Callable[[str], AbstractContextManager]] = field(default_factory=list)  # those in force
    watchers: tuple[Callable, ...] = ()
    revision: int = 0
    compiles: bool = False  # torch.compile, whose import takes seconds, has been asked for
    checked: bool = False  # the words of DSKIT_USE have been
    turn: Any = field(default_factory=threading.RLock)  # held by a step, and by whoever changes a choice
    phased: list[Op] = field(default_factory=list)  # ops whose choice differs between phases


_state = _State()


class use:  # noqa: N801 - reads as a verb: dskit.use(moe="triton")
    """Choose implementations by group or op name, for good or within a `with` block.

    `use("torch")` sets every group, `use(moe="triton")` one, `use({"moe.experts": "triton"})` one op, and
    `phase="decode"` limits the choice to decode steps. A running step is waited for. Raises UnknownOp,
    UnknownImplementation, Unsupported.
    """

    def __init__(self, choice: str | dict[str, str] | None = None, *, phase: str | None = None,
                 **groups: str):
        if phase is not None and phase not in PHASES:
            raise ValueError(f"phase must be one of {', '.join(PHASES)}, not {phase!r}")
        self._rules = _add(_words(choice, groups), (phase,) if phase else PHASES, "use", "use")

    def __enter__(self) -> use:
        for rule in self._rules:
            rule.scoped = True
        return self

    def __exit__(self, *_) -> None:
        with _state.turn:  # what others chose since then stays
            _rules[:] = [rule for rule in _rules if rule not in self._rules]
            _apply(_ops.values())

    def __repr__(self) -> str:
        words = ", ".join(f"{rule.target}={rule.choice}" for rule in self._rules)
        return f"use({words})"


def prefer(choice: dict[str, str], by: str) -> None:
    """Defaults of a command, such as training's, under everything that a user says; `by` names it."""
    _add(_words(choice, {}), PHASES, "command", by)


def choose_by_flag(words: str) -> None:
    """Apply `--kernels`: over DSKIT_USE, under `use`."""
    _add(read_words(words), PHASES, "--kernels", "--kernels")


def check_environment() -> None:
    """Raise when `DSKIT_USE` names what does not exist or cannot run; for when all ops are registered."""
    rules = _environment_rules()
    if not rules:
        return
    try:
        for rule in rules:
            _check(rule.target, rule.choice)
    except (UnknownOp, UnknownImplementation, Unsupported) as error:
        raise type(error)(f"DSKIT_USE: {error}") from error
    _state.checked = True
    _apply(_ops.values())


def read_words(words: str) -> dict[str, str]:
    """Parse `moe=triton,mla=torch`, the spelling of `DSKIT_USE` and `--kernels`."""
    pairs = [word.split("=", 1) for word in words.split(",") if word.strip()]
    bad = [p[0] for p in pairs if len(p) == 1 and p[0] not in CHOICES]
    if bad:
        raise ValueError(f"kernel choice {bad[0]!r} is not of the form group=implementation")
    return {(p[0].strip() if len(p) == 2 else "*"): p[-1].strip() for p in pairs}


def choices() -> list[Rule]:
    """What has been chosen in this process, for another one to `adopt`."""
    return list(_rules)


def adopt(rules: list[Rule]) -> None:
    """Choose what another process has chosen."""
    for rule in rules:
        _check(rule.target, rule.choice)
    with _state.turn:
        _rules[:] = rules
        _apply(_ops.values())


def revision() -> int:
    """A number that grows with every change of a choice: a graph captured under another one is stale."""
    return _state.revision


def selection() -> dict[str, str]:
    """The implementation chosen for each op, for the header of a result; both where phases differ."""
    chosen = {name: [o.selected[phase][0] for phase in PHASES] for name, o in sorted(_ops.items())}
    return {name: "/".join(dict.fromkeys(both)) for name, both in chosen.items()}


def _words(choice: str | dict[str, str] | None, groups: dict[str, str]) -> dict[str, str]:
    return ({"*": choice} if isinstance(choice, str) else dict(choice or {})) | groups


def _by_width(wanted: dict[str, str]) -> list[tuple[str, str]]:
    """Words of one call, the widest first: everything, then groups, then ops."""
    return sorted(wanted.items(), key=lambda pair: (pair[0] != "*", pair[0] in _ops))


def _add(wanted: dict[str, str], phases: tuple[str, ...], source: str, by: str) -> list[Rule]:
    for target, choice in wanted.items():
        _check(target, choice)
    new = [Rule(target, choice, phases, source, by) for target, choice in _by_width(wanted)]
    with _state.turn:
        _rules[:] = [*_living(_rules), *new]
        _apply(_ops.values())
    return new


def _living(rules: list[Rule]) -> list[Rule]:
    """Rules without those that a later rule for good has overruled, so that years of swaps leave no trail."""
    last = {(rule.source, rule.target, rule.phases): rule for rule in rules if not rule.scoped}
    return [rule for rule in rules if rule.scoped or rule in last.values()]


def _check(target: str, choice: str) -> list[Op]:
    """The ops that a word reaches: those that have the implementation. Raises when there is none."""
    matching = _matching(target)
    known = {*CHOICES, *(name for o in _ops.values() for name in o.implementations)}
    if choice not in known:
        near = difflib.get_close_matches(choice, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; choose one of {', '.join(sorted(known))}"
        raise UnknownImplementation(f"no implementation is called {choice!r}{hint}")
    if choice in ("torch", "auto"):
        return matching
    if reason := not_here(choice):
        raise Unsupported(matching[0]._cannot(choice, reason))
    without = [o for o in matching if not _has(o, choice)]
    if len(without) == len(matching):
        matching[0].implementation(choice)  # raises, and lists what there is
    if without and target != "*" and (target, choice) not in _told:
        _told.add((target, choice))
        names = ", ".join(o.name for o in without)
        logger.warning("%s=%s: %s keep their choice, having no %s", target, choice, names, choice)
    return [o for o in matching if o not in without]


def _has(o: Op, choice: str) -> bool:
    try:
        return o.implementation(choice) is not None
    except UnknownImplementation:
        return False


def _matching(target: str) -> list[Op]:
    """Ops under a word; importing the layers when it is not known yet. Raises UnknownOp."""
    for load in (False, True):
        if load:
            load_all()
        found = [o for o in _ops.values() if target in ("*", o.group, o.name)]
        if found and (load or target != "*"):
            return found
    raise UnknownOp(_no_such("op or group", target, [*{o.group for o in _ops.values()}, *_ops]))


def load_all() -> None:
    """Import every module that defines ops."""
    for home in HOMES:
        importlib.import_module(home)


def _apply(targets: Iterable[Op]) -> None:
    """Work out who decides each op in each phase."""
    default = "auto" if torch.cuda.is_available() else "torch"
    rules = sorted([*_environment_rules(), *_rules], key=lambda rule: SOURCES.index(rule.source))
    for o in targets:
        for phase in PHASES:
            o.selected[phase] = (default, "default")
            for rule in rules:
                if rule.covers(o, phase):
                    o.selected[phase] = (rule.choice, rule.by)
        o.forget()
        o.bind()
    _state.phased = [o for o in _ops.values() if o.selected["prefill"][0] != o.selected["decode"][0]]
    _state.revision += 1


def _environment_rules() -> list[Rule]:
    words = os.environ.get("DSKIT_USE", "")
    return [Rule(target, choice, PHASES, "DSKIT_USE", "DSKIT_USE")
            for target, choice in _by_width(read_words(words))] if words else []


# ---- steps and profiles ------------------------------------------------------------------------------------


@contextmanager
def step(phase: str) -> Iterator[None]:
    """Hold the selection while a step of this phase runs; only phase-dependent choices rebind."""
    with _state.turn:
        before = _state.phase
        _set_phase(phase)
        _state.ranging = [ranges.around for ranges in _state.ranges if ranges.due()]
        try:
            with _range(f"dskit::step[{phase}]"):
                yield
        finally:
            _range_outside_steps()
            _set_phase(before)


def _set_phase(phase: str) -> None:
    if phase != _state.phase:
        _state.phase = phase
        for o in _state.phased:
            o.bind()


@contextmanager
def named_ranges(around: Callable[[str], AbstractContextManager] = torch.profiler.record_function,
                 every: int = 1) -> Iterator[None]:
    """While open, steps and op calls run inside `around("dskit::<op>[<implementation>]")`.

    By default torch.profiler sees them so. With `every` above 1 only those of one step in so many do, and
    the others cost nothing.
    """
    ranges = _Ranges(around, every)
    with _state.turn:
        _state.ranges.append(ranges)
        _range_outside_steps()
    try:
        yield
    finally:
        with _state.turn:
            _state.ranges.remove(ranges)
            _range_outside_steps()


def _range_outside_steps() -> None:
    _state.ranging = [ranges.around for ranges in _state.ranges if ranges.every == 1]


def watched() -> bool:
    """Whether anyone sees the calls of this step: then they are made, where a graph would repeat them."""
    return bool(_state.ranging or _state.watchers)


@contextmanager
def _range(label: str) -> Iterator[None]:
    with ExitStack() as stack:
        for around in _state.ranging:
            stack.enter_context(around(label))
        yield


@contextmanager
def watch(see: Callable[[Op, tuple, dict[str, Any], Any], None]) -> Iterator[None]:
    """While open, `see(op, args, kwargs, result)` follows every call; not inside torch.compile."""
    with _state.turn:
        _state.watchers = (*_state.watchers, see)
    try:
        yield
    finally:
        with _state.turn:
            _state.watchers = tuple(each for each in _state.watchers if each is not see)


# ---- one module --------------------------------------------------------------------------------------------

_pins: weakref.WeakSet[pin] = weakref.WeakSet()


def pinned() -> bool:
    """Whether a module has a choice of its own, which holds only while its `forward` runs."""
    return bool(_pins)


class pin:  # noqa: N801 - reads as a verb: dskit.pin(model, "layers.3.*", moe="torch")
    """Choose implementations for the modules whose name matches a glob, over every other choice.

    model: a module, or an LLM that holds one. Call the pin to take it back, or use it in a `with` block.
    Raises ValueError when the pattern matches nothing, or when another pin decides one of these ops in one of
    these modules; UnknownOp, UnknownImplementation, Unsupported.
    """

    def __init__(self, model: Any, pattern: str, choice: str | dict[str, str] | None = None, **groups: str):
        root = model if isinstance(model, torch.nn.Module) else model.model
        self.pattern, self.calls = pattern, 0
        self.choices: dict[Op, str] = {}
        for target, word in _by_width(_words(choice, groups)):
            self.choices |= dict.fromkeys(_check(target, word), word)
        self.modules = _topmost(root, pattern)
        self._refuse_overlap(root)
        self._hooks = []
        with _state.turn:
            for module in self.modules.values():
                module._dskit_pins = [*getattr(module, "_dskit_pins", ()), self]
                self._hooks += [module.register_forward_pre_hook(self._enter),
                                module.register_forward_hook(self._leave, always_call=True)]
            _pins.add(self)
            _state.revision += 1

    def _refuse_overlap(self, root: torch.nn.Module) -> None:
        mine = {part for module in self.modules.values() for part in module.modules()}
        for name, module in root.named_modules():
            for other in getattr(module, "_dskit_pins", ()):
                both = sorted(o.name for o in self.choices.keys() & other.choices.keys())
                if both and not mine.isdisjoint(module.modules()):
                    raise ValueError(f"pin: {name} is already pinned by {other.pattern!r}, which decides "
                                     f"{both[0]} there too; take that pin back first")

    def _enter(self, *_) -> None:
        self.calls += 1
        for o, choice in self.choices.items():
            o.pinned.append(choice)
            o.bind()

    def _leave(self, *_) -> None:
        for o in self.choices:
            o.pinned.pop()
            o.bind()

    def __call__(self) -> None:
        """Take the pin back; calling it twice is fine."""
        with _state.turn:
            for hook in self._hooks:
                hook.remove()
            for module in self.modules.values():
                module._dskit_pins = [other for other in module._dskit_pins if other is not self]
            _pins.discard(self)
            _state.revision += 1

    def __enter__(self) -> pin:
        return self

    def __exit__(self, *_) -> None:
        self()

    def __repr__(self) -> str:
        words = ", ".join(f"{o.name}={choice}" for o, choice in self.choices.items())
        return f"pin({self.pattern!r}, {words})"


def _topmost(root: torch.nn.Module, pattern: str) -> dict[str, torch.nn.Module]:
    """Modules whose name matches and that lie under no other such module."""
    found: dict[str, torch.nn.Module] = {}
    for name, module in root.named_modules():
        parents = {name.rsplit(".", k)[0] for k in range(1, name.count(".") + 1)}
        if fnmatch.fnmatch(name, pattern) and found.keys().isdisjoint(parents):
            found[name] = module
    if not found:
        raise ValueError(f"pin: no module matches {pattern!r}; print(model) lists them")
    return found


# ---- looking -----------------------------------------------------------------------------------------------


def explain() -> Table:
    """What each op runs and who decided it, what else there is, what `auto` refused, what ran how often.

    One row per op, two where prefill and decode differ, then one per pinned op.
    """
    load_all()
    rows = []
    for o in sorted(_ops.values(), key=lambda o: o.name):
        available, refused = _standing(o)
        rest = {"available": available, "refused": refused,
                "ran": {each.name: each.calls for each in o.implementations.values() if each.calls},
                "calls": o.calls, "last_shape": tuple(o.last_shape) if o.last_shape is not None else None}
        same = o.selected["prefill"] == o.selected["decode"]
        for where in ("everywhere",) if same else PHASES:
            choice, by = o.selected["prefill" if same else where]
            rows.append({"op": o.name, "where": where, "selected": choice, "decided_by": by, **rest})
    for one in sorted(_pins, key=lambda one: one.pattern):
        rows += [{"op": o.name, "where": one.pattern, "selected": choice, "decided_by": "pin",
                  "calls": one.calls} for o, choice in one.choices.items()]
    return Table(rows, "Ops and what they run")


def _standing(o: Op) -> tuple[list[str], dict[str, str]]:
    """Implementations that could be chosen, and the reason for each that cannot; those of `auto` included."""
    refused = dict(o.refusals)
    reason = not_here("triton")
    try:
        if reason is None:
            o.implementation("triton")
    except (UnknownImplementation, Unsupported) as error:
        reason = str(error)
    if reason is not None:
        refused.setdefault("triton", reason)
    names = {*o.implementations, "compile", "triton"} - ({"triton"} if reason else set())
    return sorted(names), refused
