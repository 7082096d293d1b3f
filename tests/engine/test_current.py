"""Whatever a model does happens where its GPU is the thread's current one: Triton and events go there."""

import contextlib
import threading

import pytest
import torch

from dskit import LLM, SamplingParams, checkpoint
from dskit.engine import llm as llms
from dskit.engine import loop, sampler
from dskit.engine.draft import Drafter
from dskit.engine.runner import ModelRunner

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
ON_DEVICE = ((checkpoint, "load"), (ModelRunner, "__init__"), (ModelRunner, "run"), (Drafter, "_propose"),
             (sampler, "start"))


@pytest.fixture
def seen(monkeypatch):
    """Who worked for a model, and in which threads; nobody did while its device was not the current one."""
    here, found = threading.local(), set()

    @contextlib.contextmanager
    def stand_in(device):
        assert torch.device(device).type == "cpu"
        here.depth = getattr(here, "depth", 0) + 1
        yield
        here.depth -= 1

    def watched(work, name):
        def call(*args, **kwargs):
            assert getattr(here, "depth", 0), f"{name} where any device may be the current one"
            found.add((name, threading.current_thread().name))
            return work(*args, **kwargs)
        return call

    for module in (loop, llms):
        monkeypatch.setattr(module, "current", stand_in)
    for owner, name in ON_DEVICE:
        monkeypatch.setattr(owner, name, watched(getattr(owner, name), name))
    return found



def test_loading_and_every_way_to_take_a_step(seen):
    with LLM("tiny", device="cpu", max_num_seqs=2) as llm:
        llm.generate([3, 4, 5], PARAMS)
        llm.logits([3, 4, 5])
        llm.submit([5, 6], PARAMS, start=False)
        while (plan := llm.engine.plan()) is not None:
            llm.engine.commit(plan, llm.engine.launch(plan))
        llm.swap("torch")
        llm.submit([7, 8], PARAMS).result()
    names = {name for name, _ in seen}
    assert names == {name for _, name in ON_DEVICE}
    assert ("run", "dskit-engine") in seen and ("run", threading.current_thread().name) in seen


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
@pytest.mark.parametrize("eager", [False, True])
def test_a_model_on_the_second_gpu_says_the_same_and_leaves_the_first_alone(eager):
    said = {}
    for device in ("cuda:0", "cuda:1"):
        before = torch.cuda.memory_allocated(0)
        with LLM("tiny", device=device, batch_invariant=True, enforce_eager=eager) as llm:
            said[device] = [r.token_ids for r in llm.generate([[3, 4, 5], [6, 7]], PARAMS)]
            said[device].append(llm.submit([9, 8], PARAMS).result().token_ids)
            assert device == "cuda:0" or torch.cuda.memory_allocated(0) == before
        assert torch.cuda.current_device() == 0
    assert said["cuda:0"] == said["cuda:1"]
