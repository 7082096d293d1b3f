"""What all tests share: interpreter switch, threads, seeds, poisoned memory, one loaded demo, one server.

A Triton kernel decides when it is decorated whether it is interpreted, so the switch is set before dskit
is imported. Fresh memory is filled with NaN, so that a row which is read before it is written shows.
"""

from __future__ import annotations

import os
import random
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")


def pytest_configure(config: pytest.Config) -> None:
    """Use the cores that are there, one for each of two workers, unless OMP_NUM_THREADS says otherwise."""
    cores = 1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 0)) or cores)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu say why they do not run where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


@pytest.fixture(autouse=True)
def seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test starts from the same random state, that of requests without a seed included."""
    from dskit.engine import seq

    torch.manual_seed(0)
    monkeypatch.setattr(seq, "secrets", SimpleNamespace(randbits=random.Random(0).getrandbits))


@pytest.fixture(autouse=True)
def poison():
    """Fill what torch.empty returns with NaN (integers: the largest value) while a test runs."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def tiny():
    """The small random model, loaded once."""
    from dskit.engine.llm import LLM

    with LLM("tiny") as llm:
        yield llm


@pytest.fixture(scope="session")
def demo():
    """The bundled model, loaded once."""
    from dskit.engine.llm import LLM

    with LLM("demo") as llm:
        yield llm


@pytest.fixture(scope="session")
def server(demo):
    """One running server over the loaded demo, on a free port; `server.url` is its address."""
    from dskit import serve

    running = serve.start(demo, port=0)
    yield running
    running.close()
