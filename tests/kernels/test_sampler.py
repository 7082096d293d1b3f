"""Drawing beyond its case table: nuclei so wide that what was found is narrowed down first."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import dskit.engine.sampler  # noqa: F401 - registers the op
from dskit.kernels import sampler
from dskit.testing import Maker, all_cases

CASES = all_cases()["sampler.draw"]
WIDE = {"rows": 4, "vocab": 1100, "top_k": 0, "top_p": 950, "min_p": 0, "flat": 0, "grain": 0, "masked": 0}


@pytest.mark.parametrize("few", [sampler.WIDTH, 256])
@pytest.mark.parametrize("shape", [{}, {"grain": 4}, {"flat": 1, "top_p": 731}, {"top_k": 700, "top_p": 990},
                                   {"masked": 500, "min_p": 50}, {"vocab": 2 * sampler.WIDTH + 1}])
def test_a_wide_nucleus_gives_the_same_token(device, monkeypatch, few, shape):
    monkeypatch.setattr(sampler, "FLAT", few)
    args = CASES.make(WIDE | shape, Maker(device))
    assert torch.equal(sampler.draw(*args), *CASES.oracle(args))
