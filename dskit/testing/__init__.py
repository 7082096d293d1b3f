"""How an op is fed, judged and counted: the case tables that parity tests and benchmarks both read.

Idea
    `Cases` of an op say at which shapes it is tried (`edges` everywhere, `frozen` at the released widths),
    how arguments are made from a seed, how far a kernel may be off, and what the work costs at least.  A
    timed shape is therefore a tested shape.  The tables stand beside this file, one per stem.

Shapes
    A shape is a dict of named sizes, such as {"rows": 128, "width": 5120}.

Units
    Bytes and floating-point operations of one call; inputs and outputs counted once.

Errors
    AssertionError from `assert_close` names op, implementation, shape, the worst index and both values.

Source
    kernels.md 0.3 (tolerance classes), section 6 (inputs); style.md section 7.

Try
    from dskit.testing import all_cases, check; check(all_cases()["norm.rms"], {"rows": 3, "width": 96})
"""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from dskit import ops
from dskit.table import Table

Shape = dict[str, int]
GUARD = 64  # elements before and after a tensor that a kernel must leave alone


class Maker:
    """Seeded inputs on a device: the same seed and calls give the same values on any device.

    on_device draws them there, other values then, for inputs too large to be drawn on a CPU in time.
    """

    def __init__(self, device: torch.device | str = "cpu", seed: int = 0, on_device: bool = False):
        self.device = torch.device(device)
        self.source = self.device if on_device else torch.device("cpu")
        self.generator = torch.Generator(self.source).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        """Normal values of this scale."""
        drawn = torch.randn(shape, generator=self.generator, device=self.source)
        return (drawn * scale).to(self.device, dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0,
                dtype: torch.dtype = torch.float32) -> Tensor:
        """Values between low and high; integers, if of such a dtype, below high."""
        if not dtype.is_floating_point:
            return self.integers(int(high), *shape, low=int(low), dtype=dtype)
        drawn = torch.rand(shape, generator=self.generator, device=self.source)
        return drawn.mul_(high - low).add_(low).to(self.device, dtype)

    def integers(self, high: int, *shape: int, low: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers in [low, high)."""
        drawn = torch.randint(low, high, shape, generator=self.generator, device=self.source, dtype=dtype)
        return drawn.to(self.device)

    def bytes(self, *shape: int) -> Tensor:
        """Any bytes, uint8, drawn in place: for codes by the gigabyte."""
        drawn = torch.empty(shape, dtype=torch.uint8, device=self.source)
        return drawn.random_(generator=self.generator).to(self.device)

    def distinct(self, high: int, count: int) -> Tensor:
        """`count` different integers below `high`, int64."""
        return torch.randperm(high, generator=self.generator, device=self.source)[:count].to(self.device)


@dataclass(frozen=True)
class Cases:
    """An op's shapes, inputs, tolerance and cost.

    make(shape, maker) gives the positional arguments.  classes: one letter per output tensor, of which an op
    may leave out the last.  rounds: the
    op itself rounds, so that the oracle is the reference on the same arguments; otherwise it is the
    reference in float64.  grads: positions of the arguments whose gradients are compared.
    """

    op: str
    make: Callable[[Shape, Maker], tuple]
    classes: str
    edges: tuple[Shape, ...]
    frozen: tuple[Shape, ...] = ()
    tuned: tuple[Shape, ...] = ()  # beside the frozen ones, of layers whose kernels are tuned for them
    nbytes: Callable[[Shape], int] | None = None
    flop: Callable[[Shape], int] | None = None
    peak: str = "fp32"  # which peak binds the flop: fp32, tf32, bf16, fp8
    rounds: bool = False
    grads: tuple[int, ...] = ()

    def oracle(self, args: tuple) -> tuple[Tensor, ...]:
        """What is right for these arguments."""
        with ops.use("torch"):  # the fine ops inside a coarse reference are part of it
            return outputs(ops.find(self.op).reference(*(args if self.rounds else map(widen, args))))


def widen(value):
    """Floating tensors (and dtypes) as float64, everything else as it is."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    return value


def outputs(result) -> tuple[Tensor, ...]:
    """The tensors that an op returned, in order."""
    found = result if isinstance(result, tuple | list) else (result,)
    return tuple(tensor for tensor in found if isinstance(tensor, Tensor))


def all_cases() -> dict[str, Cases]:
    """Every op's cases by op name, from the tables beside this file."""
    found: dict[str, Cases] = {}
    for module in pkgutil.iter_modules(__path__):
        for cases in importlib.import_module(f"{__name__}.{module.name}").CASES:
            found[cases.op] = cases
    return found


# ---- judging -----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Verdict:
    """How far a result is from the oracle: passed or not, the figure that decided, and the worst element."""

    passed: bool
    figure: str
    worst: str


def judge(result: Tensor, oracle: Tensor, letter: str) -> Verdict:
    """Compare by tolerance class (kernels.md 0.3)."""
    if result.shape != oracle.shape:
        return Verdict(False, f"shape {tuple(result.shape)}, not {tuple(oracle.shape)}", "")
    if not result.numel():
        return Verdict(True, "empty", "")
    if letter == "X":
        wrong = _bits(result) != _bits(oracle)
        return Verdict(not wrong.any(), f"{int(wrong.sum())} differ", _worst(wrong.double(), result, oracle))
    if letter == "Q" and result.dtype == torch.uint8:
        off = _steps(result.int(), oracle.int()).double()
        equal, worst = float((off == 0).double().mean()), _worst(off, result, oracle)
        return Verdict(equal >= 0.999 and float(off.max()) <= 1, f"{equal:.5f} equal", worst)
    got, want = result.double(), oracle.double()
    if not torch.equal(got.isnan(), want.isnan()) or not torch.equal(got.isinf(), want.isinf()):
        wrong = (got.isnan() != want.isnan()) | (got.isinf() != want.isinf())
        return Verdict(False, "NaN or infinity", _worst(wrong.double(), result, oracle))
    got, want = got.nan_to_num(0, 0, 0), want.nan_to_num(0, 0, 0)
    off = (got - want).abs()
    worst = _worst(off, result, oracle)
    rms = float(off.pow(2).mean().sqrt() / want.pow(2).mean().sqrt().clamp_min(1e-30))
    row = want.abs().amax(dim=-1, keepdim=True) if want.dim() else want.abs()
    if letter == "E":
        scale = want.pow(2).mean(dim=-1, keepdim=True).sqrt() if want.dim() else want.abs()
        rounded = result.dtype == oracle.dtype == torch.bfloat16  # on either side of a tie: one step apart
        near = 2.0**-7 * torch.minimum(got.abs(), want.abs()) if rounded else 2.0**-8 * want.abs()
        beyond = off - (near + 1e-6 * scale + 1e-30)
        return Verdict(bool((beyond <= 0).all()), f"rms {rms:.1e}", _worst(beyond, result, oracle))
    if letter == "Q":  # nearly all equal; the others one step of their format apart
        equal = float((off <= 2.0**-9 * want.abs()).double().mean())
        return Verdict(equal >= 0.999 and bool((off <= row / 3).all()), f"{equal:.5f} equal", worst)
    limits = {"G": 1e-5 if result.dtype == torch.float32 else 2e-3, "A": 4e-3, "F": 1e-5}
    if letter == "M":
        return Verdict(float(off.max()) <= 2e-5, f"max {float(off.max()):.1e}", worst)
    far = 1.6e-2 if letter == "A" else 8e-3  # attention rounds its probabilities too
    passed = rms <= limits[letter] and bool((off <= far * row + 1e-30).all())
    return Verdict(passed, f"rms {rms:.1e}", worst)


def _steps(one: Tensor, other: Tensor) -> Tensor:
    """How many codes bytes are apart, read as e4m3, as two e2m1 or as an integer, whichever is least."""
    whole = ((one & 0x7F) - (other & 0x7F)).abs()
    halves = torch.maximum(((one & 7) - (other & 7)).abs(), ((one >> 4 & 7) - (other >> 4 & 7)).abs())
    integer = ((one - other + 128) % 256 - 128).abs()
    least = torch.minimum(torch.minimum(whole, halves), integer)
    return torch.where(one == other, 0, least.clamp(min=1))


def _bits(tensor: Tensor) -> Tensor:
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor if not tensor.is_floating_point() else tensor.contiguous().view(views[tensor.itemsize])


def _worst(off: Tensor, result: Tensor, oracle: Tensor) -> str:
    at = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape)) if off.dim() else ()
    return f"worst at {at}: {result[at].item():.6g}, oracle {oracle[at].item():.6g}"


def assert_close(result, oracle, classes: str, what: str) -> None:
    """Raise AssertionError, with `what` in front, unless every output is within its class."""
    result, oracle = outputs(result), outputs(oracle)
    assert len(result) == len(oracle), f"{what}: {len(result)} outputs, not {len(oracle)}"
    for i, (got, want, letter) in enumerate(zip(result, oracle, classes[: len(oracle)], strict=True)):
        verdict = judge(got, want, letter)
        assert verdict.passed, f"{what}, output {i}, class {letter}: {verdict.figure}; {verdict.worst}"


# ---- trying ------------------------------------------------------------------------------------------------

def guarded(tensor: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """A copy with the same strides, with a pattern before, after and between, and a check of that pattern."""
    if 0 in tensor.stride() or not tensor.numel():  # an expanded tensor has no copy of its own strides
        tensor = tensor.contiguous()
    extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    extent = extent if tensor.numel() else 0
    pattern = 0x5B if not tensor.is_floating_point() and tensor.itemsize == 1 else 77
    line = torch.full((extent + 2 * GUARD,), pattern, device=tensor.device).to(tensor.dtype)
    free = torch.ones(line.shape, dtype=torch.bool, device=tensor.device)
    copy, taken = (whole.as_strided(tensor.shape, tensor.stride(), GUARD) for whole in (line, free))
    copy.copy_(tensor)
    taken.fill_(False)
    bands = line[free]
    return copy, lambda: torch.equal(_bits(line[free]), _bits(bands))


def clone(args: tuple) -> tuple[tuple, list[Callable[[], bool]]]:
    """Copies of the tensors among the arguments between guard bands, and the checks of those bands."""
    pairs = [guarded(a) if isinstance(a, Tensor) else (a, None) for a in args]
    return tuple(a for a, _ in pairs), [intact for _, intact in pairs if intact]


def check(cases: Cases, shape: Shape, implementation: str = "triton", device: torch.device | str = "cpu",
          seed: int = 0, on_device: bool = False) -> None:
    """Run an implementation twice beside the oracle: right, the same bits again, nothing else touched.

    An op whose name ends in `_` may change its arguments, which are then compared too; others must not.
    Raises AssertionError.
    """
    op = ops.find(cases.op)
    run = op.implementation(implementation).function
    args = cases.make(shape, Maker(device, seed, on_device))
    what = f"{cases.op}[{implementation}] at {shape}"
    ours, bands = clone(args)
    theirs, _ = clone(args)
    oracle = cases.oracle(theirs)
    first = outputs(run(*ours))
    assert all(intact() for intact in bands), f"{what}: wrote outside an argument"
    assert_close(first, oracle, cases.classes, what)
    again, _ = clone(args)
    for i, (one, two) in enumerate(zip(first, outputs(run(*again)), strict=True)):
        assert torch.equal(_bits(one), _bits(two)), f"{what}: output {i} differs in a second run"
    changed = [i for i, (a, b) in enumerate(zip(args, ours, strict=True))
               if isinstance(a, Tensor) and not torch.equal(_bits(a), _bits(b))]
    if not cases.op.endswith("_"):
        assert not changed, f"{what}: argument {changed} was changed"


def check_gradients(cases: Cases, shape: Shape, implementation: str = "triton",
                    device: torch.device | str = "cpu", seed: int = 0, limit: float = 1e-2) -> None:
    """Gradients of the arguments named in `cases.grads` beside the float64 reference's, relative RMS."""
    op, maker = ops.find(cases.op), Maker(device, seed)
    args = cases.make(shape, maker)
    pushes = None
    found = []
    for function, wide in ((op.reference, True), (op.implementation(implementation).function, False)):
        mine = [widen(a) if wide else a for a in args]
        for i in cases.grads:
            mine[i] = mine[i].detach().clone().requires_grad_()
        with ops.use("torch"):
            results = [r for r in outputs(function(*mine)) if r.is_floating_point()]
        pushes = pushes or [maker.normal(*r.shape, dtype=torch.float32) for r in results]
        total = sum((r * p.to(r.dtype)).sum() for r, p in zip(results, pushes, strict=True))
        found.append(torch.autograd.grad(total, [mine[i] for i in cases.grads]))
    for i, want, got in zip(cases.grads, *found, strict=True):
        assert got.shape == want.shape
        if not want.numel():
            continue
        off = (got.double() - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt().clamp_min(1e-30)
        what = f"{cases.op}[{implementation}] at {shape}: gradient of argument {i}"
        assert float(off) <= limit, f"{what} is off by {float(off):.1e}, limit {limit:.0e}"


# ---- comparing ---------------------------------------------------------------------------------------------

def compare(name: str, *args, shape: Shape | None = None, only: Iterable[str] = (), repeat: int = 5,
            **kwargs) -> Table:
    """Run the implementations of an op on the same arguments: error against float64, time, bandwidth.

    Without arguments they come from the op's case table, at `shape` or at the last one that suits this
    machine; then the bytes are known, and so is the bandwidth. `only` names implementations; by default those
    that are there, so that `compile` joins once it has been used. Times are medians of calls that follow one
    another, caches warm (`dskit bench kernels` has them cold); an interpreted kernel has none. Raises
    UnknownOp, and ValueError for an op without a case table that was given no arguments.
    """
    ops.load_all()
    op, cases, nbytes = ops.find(name), all_cases().get(name), None
    if not args and not kwargs:
        args, nbytes, shape = _from_table(name, cases, shape)
    with torch.no_grad():
        values = {key: value if cases and cases.rounds else widen(value) for key, value in kwargs.items()}
        with ops.use("torch"):
            oracle = outputs(op.reference(*_fresh(op, args, wide=not (cases and cases.rounds)), **values))
        rows = []
        for which in only or dict.fromkeys([*op.implementations, "triton"]):
            reason, implementation = _available(op, which, args, kwargs)
            row: dict[str, Any] = {"implementation": which, "relative_rms": None, "time_ms": None}
            if implementation is not None:
                row |= _measured(implementation, _fresh(op, args), kwargs, oracle, nbytes, repeat)
                reason = "interpreted: no time" if row["time_ms"] is None else None
            rows.append(row | ({"refused": reason} if implementation is None else {"note": reason}))
    return Table(rows, name if shape is None else f"{name} at {shape}")


def _from_table(name: str, cases: Cases | None, shape: Shape | None) -> tuple[tuple, int | None, Shape]:
    if cases is None:
        raise ValueError(f"{name} has no case table in dskit.testing; give compare its arguments")
    on_gpu = torch.cuda.is_available() and cases.frozen
    shape = shape or (cases.frozen if on_gpu else cases.edges)[-1]
    nbytes = cases.nbytes(shape) if cases.nbytes else None
    return cases.make(shape, Maker("cuda" if torch.cuda.is_available() else "cpu")), nbytes, shape


def _fresh(op: ops.Op, args: tuple, wide: bool = False) -> tuple:
    """Arguments of a run: in float64, and copies for an op that writes into them."""
    args = clone(args)[0] if op.name.endswith("_") else args
    return tuple(map(widen, args)) if wide else args


def _available(op: ops.Op, which: str, args: tuple, kwargs: dict) -> tuple[str | None, Any]:
    """(reason why not, None) or (None, the implementation)."""
    try:
        found = op.implementation(which)
        reason = ops.not_here(which) or found.why_not(args, kwargs)
    except (ops.UnknownImplementation, ops.Unsupported) as error:
        reason = str(error)
    return (reason, None) if reason is not None else (None, found)


def _measured(implementation: ops.Implementation, args: tuple, kwargs: dict, oracle: tuple[Tensor, ...],
              nbytes: int | None, repeat: int) -> dict[str, Any]:
    results = outputs(implementation.function(*args, **kwargs))
    error = max(relative_rms(got, want) for got, want in zip(results, oracle, strict=True))
    if implementation.name == "triton" and ops.interpreting():
        return {"relative_rms": error, "time_ms": None, "bandwidth_gbs": None}
    time_ms = _milliseconds(lambda: implementation.function(*args, **kwargs), repeat)
    return {"relative_rms": error, "time_ms": time_ms,
            "bandwidth_gbs": nbytes / time_ms / 1e6 if nbytes else None}


def relative_rms(result: Tensor, oracle: Tensor) -> float:
    """RMS of the difference over that of the oracle; infinite where not the same values are finite."""
    if not oracle.numel():
        return 0.0
    got, want = result.double(), oracle.double()
    if not torch.equal(got.isfinite(), want.isfinite()):
        return float("inf")
    got, want = got.nan_to_num(0, 0, 0), want.nan_to_num(0, 0, 0)
    return float((got - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt().clamp_min(1e-30))


def _milliseconds(call: Callable[[], Any], repeat: int) -> float:
    """Median time of a call; on a GPU of ten in a row, so that a launch is hidden where it can be."""
    wait, times, count = torch.cuda.synchronize, [], 10
    if not torch.cuda.is_available():
        wait, count = (lambda: None), 1
    for _ in range(repeat):
        wait()
        start = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        times.append(1e3 * (time.perf_counter() - start) / count)
    return median(times)
