import json

import pytest

from alphaapollo.observability.timing import Timer
from alphaapollo.runs.run_history import make_metrics_record
from alphaapollo.utils.json_types import finite_or_none


def test_a_record_is_json_whatever_the_values():
    record = make_metrics_record(3, {"critic/score/mean": 0.5, "kl/mean": float("nan"), "a/b": float("inf"), "n/n": 2})
    assert record == {"step": 3, "critic/score/mean": 0.5, "kl/mean": None, "a/b": None, "n/n": 2.0}
    json.dumps(record, allow_nan=False)
    assert finite_or_none(-float("inf")) is None


def test_a_name_has_a_group():
    with pytest.raises(AssertionError, match="group/name"):
        make_metrics_record(1, {"reward": 1.0})


def test_timer_adds_up_phases_and_other_time():
    # start, generate 1-3, update 3-4, generate 5-6, metrics at 10
    ticks = iter([0.0, 1.0, 3.0, 3.0, 4.0, 5.0, 6.0, 10.0])
    timer = Timer(clock=lambda: next(ticks))
    for phase in ("generate", "update", "generate"):
        with timer(phase):
            pass
    assert timer.metrics() == {
        "timing/generate": 3.0,
        "timing/update": 1.0,
        "timing/other": 6.0,
        "timing/step": 10.0,
        "timing_share/generate": 0.3,
        "timing_share/update": 0.1,
        "timing_share/other": 0.6,
    }


def test_timer_counts_a_phase_that_fails():
    ticks = iter([0.0, 1.0, 3.0])
    timer = Timer(clock=lambda: next(ticks))
    with pytest.raises(KeyError), timer("update"):
        raise KeyError
    assert timer.seconds == {"update": 2.0}
