"""A stem's kernels once each, for a tool that watches a process: `python -m tests.kernels.once moe`.

The last edge shape of each case table is run; backward too, where there is one.
"""

from __future__ import annotations

import sys

import torch

from dskit import ops
from dskit.testing import Maker, all_cases, outputs


def main(stem: str) -> None:
    """Run a stem's ops, waiting for each, so that what the tool says follows the name of the op."""
    ops.load_all()
    for name, cases in all_cases().items():
        if not name.startswith(f"{stem}."):
            continue
        try:
            implementation = ops.find(name).implementation("triton")
        except ops.UnknownImplementation:
            continue
        args = list(cases.make(cases.edges[-1], Maker("cuda")))
        for i in cases.grads if implementation.grad else ():
            args[i] = args[i].detach().requires_grad_()
        reason = implementation.why_not(tuple(args), {})
        print(f"op {name}" + (f": refused, {reason}" if reason else ""), flush=True)
        if reason is None:
            results = [r for r in outputs(implementation.function(*args)) if r.requires_grad]
            if results:
                torch.autograd.backward(results, [torch.ones_like(r) for r in results])
            torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
