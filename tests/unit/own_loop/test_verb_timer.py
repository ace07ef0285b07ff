"""Time of the verbs of a loop of one's own."""

from __future__ import annotations

import pytest

from alphaapollo.own_loop.verb_timer import GENERATE, VerbTimer


def test_overlapping_calls_count_once() -> None:
    now = [0.0]
    timer = VerbTimer(lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    wait(1)
    with timer("sample"), timer(GENERATE):
        wait(2)
        with timer("sample"), timer("publish"):
            wait(3)
        timer.tokens += 100
    waiting = timer("sample")
    waiting.__enter__()
    wait(4)
    assert timer.take_metrics() == {
        "timing/other": 1.0,
        "timing/sample": 9.0,
        "timing/publish": 3.0,
        "timing/step": 10.0,
        "timing_share/other": 0.1,
        "timing_share/sample": 0.9,
        "timing_share/publish": 0.3,
        "rollout/tokens_per_second": 20.0,
    }
    wait(5)
    waiting.__exit__(None, None, None)
    wait(5)
    left = timer.take_metrics()
    assert left["timing/sample"] == left["timing/other"] == 5.0 and "rollout/tokens_per_second" not in left


def test_a_call_that_raises_ends() -> None:
    timer = VerbTimer(iter([0.0, 1.0, 3.0, 7.0]).__next__)
    with pytest.raises(ValueError, match="loss"), timer("forward_backward"):
        raise ValueError("loss")
    metrics = timer.take_metrics()
    assert metrics["timing/forward_backward"] == 2.0 and metrics["timing/other"] == 5.0
