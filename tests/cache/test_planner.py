"""Load-or-recompute: what the planner makes of what it observes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.cache.planner import LEAST_PATIENCE, Planner
from tests.blocks import small_spec

SPEC = small_spec()
MB = 1_000_000


def test_many_short_prefills_say_nothing_about_a_long_one() -> None:
    planner = Planner()
    planner.observe_prefill(SPEC, 0, 4096, 9.0)
    for _ in range(100):
        planner.observe_prefill(SPEC, 4095, 1, 0.05)
    assert planner.prefill_seconds(SPEC, 0, 4096) == pytest.approx(9.0, rel=0.05)
    assert planner.prefill_seconds(SPEC, 4095, 1) == pytest.approx(0.05, rel=0.2)


def test_single_tokens_behind_a_loaded_prompt_are_not_taken_for_a_prefill() -> None:
    planner = Planner()
    for _ in range(5):
        planner.observe_prefill(SPEC, 511, 1, 0.1)
    assert planner.prefill_seconds(SPEC, 0, 512) is None, "512 times as long it is not"
    planner.observe_prefill(SPEC, 0, 512, 1.3)
    planner.observe_prefill(SPEC, 511, 1, 0.1)
    assert planner.prefill_seconds(SPEC, 0, 512) == pytest.approx(1.3, rel=0.05)
    assert planner.prefill_seconds(SPEC, 511, 1) == pytest.approx(0.1, rel=0.2)


@pytest.mark.parametrize(("before", "after"), [(0.01, 2.0), (2.0, 0.01)])
def test_a_tier_that_has_changed_is_known_after_three_observations(before: float, after: float) -> None:
    planner = Planner()
    for _ in range(20):
        planner.observe_load("redis", 2, 20 * MB, before)
    for _ in range(3):
        planner.observe_load("redis", 2, 20 * MB, after)
    assert planner.load_seconds("redis", 2, 20 * MB) == pytest.approx(after, rel=0.1)


@settings(deadline=None, max_examples=50)
@given(st.floats(1e-4, 0.2), st.floats(1e6, 1e10))
def test_two_sizes_tell_latency_and_bandwidth_apart(latency: float, bandwidth: float) -> None:
    planner = Planner()
    for size in (16 << 10, 512 << 10, 12 * MB):
        planner.observe_load("redis", 1, size, latency + size / bandwidth)
    predicted = planner.load_seconds("redis", 4, 40 * MB)
    assert predicted == pytest.approx(4 * latency + 40 * MB / bandwidth, rel=0.1)


def test_a_load_that_was_given_up_counts_as_slow() -> None:
    planner = Planner()
    planner.observe_prefill(SPEC, 0, 512, 1.0)
    blocks = [(0, 256, [("redis", 12 * MB)]), (256, 255, [("redis", 12 * MB)])]
    assert planner.best_prefix(SPEC, blocks, 512) == 2, "what is not known is loaded"
    planner.observe_load("redis", 2, 24 * MB, 1.0, complete=False)
    assert planner.best_prefix(SPEC, blocks, 512) == 0


def test_a_load_is_worth_waiting_for_as_long_as_computing_takes() -> None:
    planner = Planner()
    assert planner.patience(SPEC, 0, 512) is None
    planner.observe_prefill(SPEC, 0, 4096, 9.0)
    assert planner.patience(SPEC, 0, 4096) == pytest.approx(9.0, rel=0.01)
    assert planner.patience(SPEC, 0, 16) == LEAST_PATIENCE


def test_probes_are_rare() -> None:
    planner = Planner()
    assert planner.may_probe("redis")
    assert not planner.may_probe("redis"), "one at a time"
    planner.probed("redis", 0.001)
    assert not planner.may_probe("redis")
    assert planner.may_probe("disk")
