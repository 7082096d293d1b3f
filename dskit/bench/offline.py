"""The compiler's report without a GPU: what every kernel takes in registers, stack and shared memory.

Idea
    Triton compiles for any target; only the launch needs the device.  A stand-in driver names the target,
    every launch is turned into a compilation, and the wrappers are called at the shapes of the case tables
    with tensors on the CPU.  What the interpreter lets pass - types that do not fit, tiles that are too small
    for a tensor core, too much shared memory - shows here.

Shapes
    One row per kernel and configuration that an op compiles, as a dict; `main` prints a table to stderr and
    JSON to stdout.

Units
    registers per thread; bytes of stack per thread (0: nothing spilled) and of shared memory per program;
    counts of instructions in the PTX; bits of the widest access to global memory.

Errors
    RuntimeError when TRITON_INTERPRET=1 is set.  A case that does not compile is a row with `error`; one that
    the kernel's `when` refuses is a row with `refused`.

Source
    The resource report of cuobjdump, which Triton brings along.

Try
    python -m dskit.bench.offline --arch 90 --op norm.rms
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dskit import ops
from dskit.bench import tune
from dskit.testing import Cases, Maker, Shape, all_cases, outputs

Row = dict[str, Any]
PARTS = {80: (108, 166_912), 90: (132, 232_448)}  # multiprocessors, shared memory of one program
ACCESS = r"\b(ld|st)\.global(?:\.[\w:]+?)*?(?:\.v([248]))?\.[bfsu](\d+)\b"
COPY = r"\bcp\.async\.c[ag]\.shared\.global[^;]*?, 0x([0-9a-f]+)"
LEFT_OUT = "left out"
LARGEST = 1 << 33  # bytes of one call: beyond it a frozen shape is left out


class Hollow(Maker):
    """Arguments of the right shape and dtype whose floats were never written: memory that costs nothing."""

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
        """Memory of this shape."""
        return torch.empty(shape, dtype=dtype)

    def bytes(self, *shape: int) -> torch.Tensor:
        """Memory of this shape."""
        return torch.empty(shape, dtype=torch.uint8)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0,
                dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Memory of this shape."""
        return torch.empty(shape, dtype=dtype)


class Launches:
    """Takes the place of `JITFunction.run`: compiles, launches nothing, and keeps what was compiled."""

    def __init__(self, arch: int, processors: int = 0):
        from triton.backends.compiler import GPUTarget
        from triton.runtime import JITFunction, driver

        from dskit.kernels import common

        if common.INTERPRET:
            raise RuntimeError("TRITON_INTERPRET=1 runs kernels instead of compiling them; unset it")
        common.pretend(arch, processors or PARTS[arch][0])
        self.arch, self.compiled = arch, []  # pairs of kernel and grid
        run = JITFunction.run
        target = GPUTarget("cuda", arch, 32)
        driver.set_active(SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0,
            get_current_stream=lambda device: 0, get_active_torch_device=lambda: torch.device("cpu")))

        def compile_only(function: Any, *args, grid: Any, warmup: bool = False, **kwargs) -> Any:
            kernel = run(function, *args, grid=grid, warmup=True, **kwargs)
            self.compiled.append((kernel, grid))
            return kernel

        JITFunction.run = compile_only
        torch.mm, torch.bmm = _shape_of_product, _shape_of_product  # a library's, which nobody compiles here

    def take(self) -> list[tuple[Any, Any]]:
        """What was compiled since the last call."""
        taken, self.compiled = self.compiled, []
        return taken


def _shape_of_product(a: torch.Tensor, b: torch.Tensor, **how: Any) -> torch.Tensor:
    """Memory of the product's shape."""
    return a.new_empty(*a.shape[:-1], b.shape[-1])


# ---- reading a compiled kernel -----------------------------------------------------------------------------

def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack and shared memory as cuobjdump reports them."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        said = subprocess.run([knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)],
                              capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"\b(REG|STACK|SHARED):(\d+)", said))
    return {"registers": int(found["REG"]), "stack_bytes": int(found["STACK"])}


def instructions(ptx: str) -> dict[str, int]:
    """How often tensor cores and asynchronous copies are used, and the widest load and store in bits."""
    widths = [(kind, int(vector or 1) * int(bits)) for kind, vector, bits in re.findall(ACCESS, ptx)]
    copies = [8 * int(size, 16) for size in re.findall(COPY, ptx)]
    return {"wgmma": len(re.findall(r"\bwgmma\.mma_async", ptx)), "mma": len(re.findall(r"\bmma\.sync", ptx)),
            "cp_async": len(re.findall(r"\bcp\.async\.c[ag]\b", ptx)),
            "tma": len(re.findall(r"\bcp\.async\.bulk\.tensor", ptx)),
            "load_bits": max([w for kind, w in widths if kind == "ld"] + copies, default=0),
            "store_bits": max([w for kind, w in widths if kind == "st"], default=0)}


def describe(kernel: Any, grid: Any, arch: int) -> Row:
    """One row of the report."""
    names = kernel.src.fn.arg_names
    constants = {names[at[0]]: value for at, value in kernel.src.constants.items()
                 if isinstance(value, int) and names[at[0]].isupper()}
    shared = kernel.metadata.shared
    row = {"kernel": kernel.metadata.name, "constants": constants, "num_warps": kernel.metadata.num_warps,
           "num_stages": kernel.metadata.num_stages, "grid": list(grid) if isinstance(grid, tuple) else None,
           "shared_bytes": shared, **resources(kernel.asm["cubin"]), **instructions(kernel.asm["ptx"])}
    if shared > PARTS[arch][1]:
        row["error"] = f"{shared} bytes of shared memory; sm_{arch} has {PARTS[arch][1]} for a program"
    return row


# ---- calling the wrappers ----------------------------------------------------------------------------------

def call(cases: Cases, shape: Shape, maker: Maker, tried: bool = False) -> str | None:
    """Call an op's wrapper, and its backward where it has one, or with `tried` once in each configuration
    worth timing; returns why the kernel refuses, or None.
    """
    implementation = ops.find(cases.op).implementation("triton")
    args = list(cases.make(shape, maker))
    if cases.grads and implementation.grad:
        for i in cases.grads:
            args[i] = args[i].detach().requires_grad_()
    refused = implementation.why_not(tuple(args), {})
    if refused is None and tried:
        with torch.no_grad():
            for name in tune.wanted(implementation.function, tuple(args)):
                for config in tune.candidates()[name]:
                    tune.under({name: config}, implementation.function)(*args)
    elif refused is None:
        results = [r for r in outputs(implementation.function(*args)) if r.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.empty_like(r) for r in results])
    return refused


def shapes_of(cases: Cases, which: str) -> Iterator[tuple[Shape, Maker]]:
    """The shapes to try, each with what makes its arguments: edges with values, frozen ones without."""
    if which == "one":
        usual = [shape for shape in cases.frozen if shape.get("rows") == 128] or [*cases.frozen[-1:]]
        yield (usual[0], Hollow()) if usual else (cases.edges[-1], Maker())
    if which in ("edges", "all"):
        yield from ((shape, Maker()) for shape in cases.edges)
    if which in ("frozen", "all"):
        yield from ((shape, Hollow()) for shape in cases.frozen)


def survey(arch: int, name: str = "", which: str = "all", tried: bool = False) -> Iterator[Row]:
    """Compile the ops whose names start with `name`, or with one of several behind commas: a row per kernel
    and configuration, and per failure; with `tried` in all configurations worth timing.
    """
    ops.load_all()
    launches = Launches(arch)
    for cases in (c for op, c in all_cases().items() if op.startswith(tuple(name.split(",")))):
        seen: set[str] = set()
        for shape, maker in shapes_of(cases, which):
            try:
                yield from compiled(launches, cases, shape, maker, seen, tried)
            except ops.UnknownImplementation:
                break


def compiled(launches: Launches, cases: Cases, shape: Shape, maker: Maker, seen: set[str], tried: bool
             ) -> Iterator[Row]:
    """The rows of one call: kernels not seen before, and why there is none."""
    at = {"op": cases.op, "shape": shape}
    if cases.nbytes and cases.nbytes(shape) > LARGEST:
        yield at | {"refused": f"{LEFT_OUT}: {cases.nbytes(shape):.1e} bytes"}
        return
    try:
        refused = call(cases, shape, maker, tried)
        if refused:
            yield at | {"refused": refused}
    except ops.UnknownImplementation:
        raise
    except Exception as error:
        yield at | {"error": _last_lines(error)}
    for kernel, grid in launches.take():
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            yield at | describe(kernel, grid, launches.arch)


def _last_lines(error: Exception) -> str:
    """What failed and where: the innermost frames, and the causes that Triton chains."""
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    where = ", ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
    chain, said = error, []
    while chain is not None:
        said.append(f"{type(chain).__name__}: {chain}".strip())
        chain = chain.__cause__
    return f"{' <- '.join(said)} ({where})"


# ---- printing ----------------------------------------------------------------------------------------------

COLUMNS = {"registers": "regs", "stack_bytes": "stack", "shared_bytes": "shared", "wgmma": "wgmma",
           "mma": "mma", "cp_async": "cp", "tma": "tma", "load_bits": "ld", "store_bits": "st"}
HEAD = f"{'kernel':<34} {'warps':>5} {'stages':>6} {' '.join(f'{head:>6}' for head in COLUMNS.values())}"


def line(row: Row) -> str:
    """A row of the table, or what went wrong."""
    where = f"{row['op']} at {' '.join(f'{name}={size}' for name, size in row['shape'].items())}"
    if "kernel" not in row:
        kind = "error" if "error" in row else "refused"
        return f"{kind}: {where}: {row[kind]}"
    numbers = " ".join(f"{row[column]:>6}" for column in COLUMNS)
    constants = " ".join(f"{name}={value}" for name, value in row["constants"].items())
    name = row["kernel"].strip("_").removesuffix("_kernel")
    trouble = f"  error: {row['error']}" if "error" in row else ""
    return (f"{name:<34} {row['num_warps']:>5} {row['num_stages']:>6} {numbers}  {constants}  "
            f"({where}, grid {row['grid']}){trouble}")


def main(argv: list[str] | None = None) -> int:
    """Print the report; 1 when something does not compile."""
    parser = argparse.ArgumentParser(prog="python -m dskit.bench.offline",
                                     description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, choices=sorted(PARTS), default=90)
    parser.add_argument("--op", default="", help="starts of the ops' names: mhc,norm.rms")
    parser.add_argument("--shapes", choices=("one", "edges", "frozen", "all"), default="all")
    parser.add_argument("--candidates", action="store_true", help="in every configuration worth timing")
    args = parser.parse_args(argv)
    print(HEAD, file=sys.stderr)
    rows = []
    for row in survey(args.arch, args.op, args.shapes, args.candidates):
        rows.append(row)
        print(line(row), file=sys.stderr, flush=True)
    print(json.dumps(rows))
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
