"""Minutes of random traffic against one engine: asked, cancelled or refused, nothing is left behind.

`make soak`; SOAK_SECONDS (600) sets how long.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from dskit.engine.seq import RequestError, SamplingParams

SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
WRONG = (
    ([], {}),  # no prompt
    ([10**9], {}),  # an id outside the vocabulary
    ([5] * 100_000, {}),  # longer than any context
    ([5], {"temperature": -1.0}),
    ([5], {"max_tokens": 0}),
    ([5], {"stop": [""]}),
)


def resident_bytes() -> int:
    """Memory of this process that lies in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ask(llm, rng: random.Random):
    """Submit a random request; it may be cancelled at once."""
    prompt = rng.choices(range(3, 200), k=rng.choice((1, 2, 7, 31, 64, 150)))
    params = SamplingParams(
        temperature=rng.choice((0.0, 0.7, 1.5)),
        top_p=rng.choice((0.5, 1.0)),
        seed=rng.randrange(2**32),
        max_tokens=rng.randint(1, 24),
        logprobs=rng.choice((None, 0, 3)),
    )
    handle = llm.submit(prompt, params)
    if rng.random() < 0.1:
        handle.cancel()
    return handle


def refuse(llm, rng: random.Random) -> None:
    """A wrong request is refused and leaves no trace."""
    prompt, wrong = rng.choice(WRONG)
    with pytest.raises(RequestError):
        llm.submit(prompt, SamplingParams(**wrong))


@pytest.mark.soak
def test_random_traffic_leaves_nothing_behind(tiny):
    rng, open_handles, finished = random.Random(0), [], 0
    end, memory = time.monotonic() + SECONDS, 0
    while time.monotonic() < end or open_handles:
        if time.monotonic() < end and len(open_handles) < 24:
            open_handles.append(ask(tiny, rng))
            if rng.random() < 0.2:
                refuse(tiny, rng)
            continue
        handle = open_handles.pop(rng.randrange(len(open_handles)))
        if rng.random() < 0.2:
            handle.cancel()
        assert handle.result().finish_reason in ("stop", "length", "abort")
        finished += 1
        if finished == 20:
            memory = resident_bytes()
    stats = tiny.stats()
    assert stats["running"] == stats["waiting"] == 0
    assert stats["blocks_free"] == stats["blocks_total"]
    assert finished > 20, f"only {finished} requests in {SECONDS:.0f} s"
    assert resident_bytes() < 1.1 * memory + 50e6, "memory grew while requests came and went"
