"""Curves and texts of the viewer, with numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from alphaapollo.observability.curve import Curve
from alphaapollo.plugins.viewer.curves import average_over_seeds, limit_band, make_traces, thin_out
from alphaapollo.plugins.viewer.samples import choose_colors, compare_texts, split_into_parts

CALL, RESPONSE = "<python_code>7 + 7</python_code>", "<tool_response>14</tool_response>"
JSON_CALL = '<tool_call>{"x": 1}</tool_call>'


def test_thinned_curve_keeps_peaks() -> None:
    values = np.zeros(10_000)
    values[[1234, 8765]] = 5, -5
    thin = thin_out(Curve("x", np.arange(10_000.0), values))
    assert len(thin.steps) <= 1002
    assert {1234.0, 8765.0, 0.0, 9999.0} <= set(thin.steps)
    assert (thin.values.max(), thin.values.min()) == (5, -5)


def test_seeds_are_averaged_where_all_have_values() -> None:
    first = Curve("a", np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 9.0]))
    second = Curve("b", np.array([1.0, 2.0]), np.array([3.0, 2.0]))
    mean = average_over_seeds("both", [first, second])
    assert (mean.steps.tolist(), mean.values.tolist()) == ([1.0, 2.0], [2.0, 2.0])
    # t(0.975, 1) * sqrt(2) / sqrt(2) = 12.706
    assert mean.band[:, 2].tolist() == pytest.approx([2 + 12.706, 2.0], rel=1e-3)
    widths = [trace["line"]["width"] for trace in make_traces(mean, 0)]
    assert widths == [1, 1, 2]  # both runs, their mean
    traces = make_traces(average_over_seeds("four", [first, second] * 2), 0)
    assert ["fill" in trace for trace in traces] == [True, False]


@pytest.mark.parametrize(
    ("metric", "high", "band"),
    [
        ("val/accuracy", 1.0, [0, 1]),
        ("groups/mixed", 1.0, [0, 1]),
        ("val/accuracy", 1.1, [-3, 5]),
        ("val/loss", 1, [-3, 5]),
        ("critic/vf_explained_var", 1, [-3, 5]),
        ("response_length/mean", 9, [0, 5]),
    ],
)
def test_intervals_of_accuracies_end_at_0_and_1(metric: str, high: float, band: list[float]) -> None:
    curve = Curve("a", np.array([0.0, 1.0]), np.array([0.25, high]), np.array([[0.0, -3.0, 5.0]]))
    assert limit_band(curve, metric).band.tolist() == [[0, *band]]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("begun in the prompt</think>14", [("thought", "begun in the prompt</think>"), ("text", "14")]),
        ("[THINK]a[/THINK]14", [("thought", "[THINK]a[/THINK]"), ("text", "14")]),
        (
            f"{CALL}{RESPONSE} <answer>14</answer>",
            [("tool", CALL), ("tool", RESPONSE), ("answer", "<answer>14</answer>")],
        ),
        ("a <b>bold</b> text", [("text", "a <b>bold</b> text")]),
        (f"a{CALL}b<think>never", [("text", "a"), ("tool", CALL), ("text", "b"), ("thought", "<think>never")]),
        (f"{JSON_CALL}b", [("tool", JSON_CALL), ("text", "b")]),
    ],
)
def test_parts_of_a_text(text: str, parts: list[tuple[str, str]]) -> None:
    assert list(split_into_parts(text)) == parts


def test_colors_are_relative_to_the_largest_values() -> None:
    assert choose_colors([None, 0.0, -1.0, 0.5, 1.0]) == [0, 0, -4, 2, 4]
    assert choose_colors([0.0, None]) == [0, 0]
    assert choose_colors([1e-6, 0.05, 1.0], min_scale=0.1)[:2] == [0, 0]
    assert choose_colors([1e-6, 0.05], min_scale=0.1) == [0, 2]


def test_difference_word_by_word() -> None:
    parts = [("same", "it is "), ("removed", "15 "), ("added", "14 "), ("same", "now")]
    assert compare_texts("it is 15 now", "it is 14 now") == parts
