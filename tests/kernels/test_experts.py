"""Ways of multiplying experts that no default takes: e4m3 of both operands, in one window and in two."""

from __future__ import annotations

import pytest

import dskit.model  # noqa: F401 - registers the ops
from dskit.kernels import common, experts
from dskit.testing import all_cases, check

SHAPE = {"rows": 3, "width": 256, "experts": 2, "k": 1, "inner": 256}


@pytest.mark.parametrize(("windows", "more"), [(2, {}), (1, {"rows": 1}), (1, {"extreme": 1})],
                         ids=["many", "alone", "extreme"])
def test_products_of_e4m3_give_what_bfloat16_gives(windows, more):
    config = experts.CONFIGS[0] | {"tokens": 16 // windows, "features": 256, "windows": windows}
    with common.trial({"moe.experts/up": config, "moe.experts/down": config}):
        check(all_cases()["moe.experts"], SHAPE | more)
