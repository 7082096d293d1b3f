"""Random operations on an engine of random sizes: submit, cancel, step, step by hand, fail, forget, look.

Underneath are the mock's own checks of every read and write, the canary's, and its books after each step:
no block or slot is lost, held twice or read by whom it does not belong to. At the end everybody has been
served once and the pools are as they were.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from dskit.engine.seq import SamplingParams

from .mock import VOCAB, engine

SYSTEM = [2 + (5 * i * i + i) % (VOCAB - 2) for i in range(30)]
tokens = st.integers(2, VOCAB - 1)


class Traffic(RuleBasedStateMachine):
    """One engine and the requests that were made of it."""

    @initialize(data=st.data())
    def start(self, data):
        exact = data.draw(st.booleans())
        self.engine = engine(
            exact_prefix=exact,
            enable_prefix_caching=data.draw(st.sampled_from([True, True, True, False])),
            replay=data.draw(st.sampled_from(["off", "compact"])),
            overlap=data.draw(st.booleans()),
            num_blocks=data.draw(st.sampled_from([20, 24, 40])),
            num_snapshots=data.draw(st.sampled_from([1, 2, 6])) if exact else 0,
            max_num_seqs=data.draw(st.sampled_from([1, 3, 5])),
            max_num_batched_tokens=data.draw(st.sampled_from([3 if exact else 10, 16, 64])),
            prefill_interval=data.draw(st.sampled_from([1, 4])),
            keep_tokens=18,
        )
        self.handles = []

    @rule(
        shared=st.sampled_from([0, 9, 17, 30]),
        rest=st.lists(tokens, min_size=1, max_size=12),
        choices=st.sampled_from([1, 1, 1, 3]),
        most=st.integers(1, 20),
        seed=st.integers(0, 3),
        priority=st.integers(0, 1),
        salt=st.sampled_from(["", "", "", "other"]),
    )
    def submit(self, shared, rest, choices, most, seed, priority, salt):
        for i in range(choices):
            params = SamplingParams(seed=seed + i, max_tokens=most)
            handle = self.engine.submit(SYSTEM[:shared] + rest, params, priority=priority, cache_salt=salt)
            self.handles.append(handle)

    @rule(ids=st.lists(tokens, min_size=1, max_size=40))
    def score(self, ids):
        if self.engine.cfg.replay == "off":
            self.handles.append(self.engine.submit(ids, scoring=True))

    @rule(which=st.integers(0, 1000))
    def cancel(self, which):
        if self.handles:
            self.handles[which % len(self.handles)].cancel()

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.engine.step()

    @rule()
    def step_by_hand(self):
        if (plan := self.engine.plan()) is not None:
            self.engine.commit(plan, self.engine.launch(plan))

    @rule()
    def fail(self):
        self.engine.runner.spoil[self.engine.runner.steps + 1] = RuntimeError("on purpose")
        self.engine.step()
        self.engine.runner.spoil.clear()

    @rule()
    def forget(self):
        self.engine.forget()

    @invariant()
    def books(self):
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.engine.step()
        stats = self.engine.stats()
        assert not self.engine.has_work
        assert stats["blocks_free"] == stats["blocks_total"]
        assert stats["slots_free"] == self.engine.cfg.max_num_seqs
        for handle in self.handles:
            reasons = [event.finish_reason for event in handle]
            assert reasons[-1] in ("stop", "length", "abort", "error") and not any(reasons[:-1])
        self.engine.forget()
        assert self.engine.scheduler.blocks.free_count == stats["blocks_total"]
        assert self.engine.scheduler.tree.snapshots.free_count == (self.engine.cfg.num_snapshots or 0)


def run(examples: int, steps: int):
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        Traffic,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=checks,
        ),
    )


def test_random_operations():
    run(8, 25)


@pytest.mark.slow
def test_ten_thousand_operations():
    run(200, 50)
