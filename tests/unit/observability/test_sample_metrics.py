import csv
import json
import math
from io import StringIO
from pathlib import Path

import pytest

from alphaapollo.observability.sample_metrics import (
    SampleResult,
    convert_to_sample_result,
    merge_repeated_prompts,
    read_sample_result,
    summarize,
)
from alphaapollo.observability.terminal import Terminal
from alphaapollo.runs.rollout_log import format_trajectory_lines
from alphaapollo.trainer.evaluation.report import format_outcome_line, print_summary, write_summary
from alphaapollo.types import EpisodeEnd, Outcome, Prompt, Score
from tests.builders import make_group, make_trajectory, make_turn


def result(problem: int, sample: int, accuracy: float | None, answer: str | None = None, **more) -> SampleResult:
    """accuracy None: the grader failed."""
    failed = accuracy is None
    value = math.nan if accuracy is None else accuracy
    outcome = Outcome.GRADER_FAILED if failed else Outcome.SCORED
    fields = {"data_source": "a", "outcome": outcome, "reward": 2 * value, "accuracy": value}
    fields |= {"num_tokens": 10, "end": EpisodeEnd.DONE}
    return SampleResult(problem_id=problem, sample_index=sample, answer=answer, **(fields | more))


TWO_PROBLEMS = [
    result(0, 0, 1.0, "7"),
    result(0, 1, 0.0, "8"),
    result(0, 2, 1.0, "7"),
    result(0, 3, 0.0, None),
    result(1, 0, 0.0, "1"),
    result(1, 1, 0.5, "2"),  # half a point is not correct
    result(1, 2, 0.0, "1"),
    result(1, 3, 0.0, "3", num_tokens=30),
]


def test_figures_by_hand() -> None:
    everything, sources = summarize(TWO_PROBLEMS)
    assert list(sources) == ["a"] and everything is sources["a"]
    expected = {
        "avg@4": (2 / 4 + 0.5 / 4) / 2,
        "pass@1": (1 / 2 + 0) / 2,
        "pass@2": (1 - (2 * 1) / (4 * 3)) / 2,
        "pass@3": 1 / 2,
        "pass@4": 1 / 2,
        "maj@4": (1 + 0) / 2,
        "reward": 2 * (2 / 4 + 0.5 / 4) / 2,
        "response_length": (10 + 15) / 2,
    }
    assert {name: figure.value for name, figure in everything.figures.items()} == pytest.approx(expected)
    assert (everything.problems, everything.samples, everything.num_failed) == (2, 8, 0)
    assert everything.outcomes == {"scored": 8} and everything.ends == {"done": 8}
    low, high = everything.figures["avg@4"].low, everything.figures["avg@4"].high
    assert (low, high) == (0.125, 0.5)  # of the four draws of two problems, one in four is all the first


def test_failures_are_excluded_and_counted() -> None:
    failed = [result(0, 1, None), result(0, 3, None, outcome=Outcome.ENVIRONMENT_FAILED), result(2, 0, None)]
    kept = [one for one in TWO_PROBLEMS if one.problem_id == 1 or one.accuracy]
    everything, _ = summarize([*kept, *failed])
    figures = everything.figures
    assert figures["avg@4"].value == pytest.approx((1.0 + 0.125) / 2)
    assert figures["avg@4"].problems == 2, "a problem without any score is in no figure"
    assert figures["pass@2"].value == pytest.approx((1.0 + 0.0) / 2)
    assert figures["pass@2"].problems == 2 and "pass@3" not in figures, "fewer than half of the problems have 3 samples"
    assert figures["response_length"].problems == 3
    assert everything.num_failed == 3
    assert everything.outcomes == {"scored": 6, "grader_failed": 2, "environment_failed": 1}

    nothing, _ = summarize([result(0, 0, None, num_tokens=None), result(1, 0, None, num_tokens=None)])
    assert nothing.figures == {} and nothing.num_failed == 2


def test_wrong_format_is_a_zero_and_not_a_failure() -> None:
    everything, _ = summarize([result(0, 0, 0.0, outcome=Outcome.WRONG_FORMAT), result(1, 0, 1.0)])
    assert everything.figures["avg@1"].value == 0.5 and everything.num_failed == 0
    assert everything.outcomes == {"wrong_format": 1, "scored": 1}


def test_sources_apart_and_together() -> None:
    """Each data source has its own n."""
    other = [result(7, sample, 1.0, "x", data_source="b") for sample in range(4)]
    alone = result(9, 0, 1.0, data_source="c")
    everything, sources = summarize([*other, *TWO_PROBLEMS, alone])
    assert list(sources) == ["a", "b", "c"]
    assert [own.figures["pass@1"].value for own in sources.values()] == [0.25, 1.0, 1.0]
    assert sources["c"].figures["avg@1"].value == 1.0 and "pass@2" not in sources["c"].figures
    assert everything.data_source == "all" and everything.problems == 4
    assert everything.figures["pass@1"].value == pytest.approx((0.5 + 0 + 1 + 1) / 4)
    assert (everything.figures["pass@1"].problems, everything.figures["pass@4"].problems) == (4, 3)


def test_rows_that_repeat_a_problem_are_further_samples_of_it() -> None:
    def row(number: int, source: str, text: str, index: int | None) -> Prompt:
        return Prompt(number, source, text, "7", {} if index is None else {"index": index})

    prompts = [row(0, "a", "x", 0), row(1, "a", "x", 0), row(2, "a", "y", 1), row(3, "b", "x", 0)]
    prompts += [row(4, "a", "x", 5), row(5, "a", "x", None), row(6, "a", "x", None)]  # alike, but no repeats
    results = [result(prompt.id, sample, 0.0) for prompt in prompts for sample in (0, 1)]
    joined = [(one.problem_id, one.sample_index) for one in merge_repeated_prompts(results, prompts)]
    assert joined[:8] == [(0, 0), (0, 1), (0, 2), (0, 3), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert joined[8:] == [(4, 0), (4, 1), (5, 0), (5, 1), (6, 0), (6, 1)]


def test_a_record_read_back_is_the_same_result() -> None:
    prompt = Prompt(5, "openai/gsm8k", [{"role": "user", "content": "?"}], "7")
    samples = [
        (Score(0.3, {"accuracy": 1.0}), ["<think>", "so \\boxed{7}"]),
        (Score(math.nan, outcome=Outcome.ENVIRONMENT_FAILED, reason="it broke"), []),
        (Score(0.0, outcome=Outcome.WRONG_FORMAT, reason="no answer"), ["?"]),
    ]
    fields = {"prompt_id": 5, "end": EpisodeEnd.TURN_LIMIT}
    trajectories = [
        make_trajectory(*(make_turn(len(text), text=text) for text in texts), score=score, sample=i, **fields)
        for i, (score, texts) in enumerate(samples)
    ]
    fresh = [convert_to_sample_result(prompt, one) for one in trajectories]
    lines = format_trajectory_lines(0, [make_group(*trajectories, prompt=prompt)])
    read = [read_sample_result(json.loads(line)) for line in lines]
    assert [str(one) for one in read] == [str(one) for one in fresh]  # nan is not equal to itself
    first, second, third = fresh
    assert (first.accuracy, first.reward, first.answer, first.num_tokens) == (1.0, 0.3, "7", 19)
    assert second.outcome.failed and math.isnan(second.accuracy) and math.isnan(second.reward)
    assert second.failure_reason == "it broke"
    assert (third.accuracy, third.answer) == (0.0, "?")


def test_table_json_and_csv(tmp_path: Path) -> None:
    name = "b/" + "long" * 20
    everything, sources = summarize(
        [*TWO_PROBLEMS, result(7, 0, 1.0, data_source=name), result(7, 1, None, data_source="b/x")]
    )
    out = StringIO()
    print_summary(everything, sources, Terminal(file=out, width=60))
    lines = out.getvalue().splitlines()
    assert lines[1].split() == ["a", "avg@4", "0.3125", "0.1250", "to", "0.5000", "2"]
    assert name in out.getvalue(), "names are not cut"
    (failed,) = (line for line in lines if line.startswith("b/x: "))
    assert "1 samples of 1 problems" in failed and "1 grader failed" in failed and "1 done" in failed

    written = write_summary(tmp_path / "new", everything, sources)
    assert [path.name for path in written] == ["summary.json", "summary.csv"]
    record = json.loads(written[0].read_text())
    assert record["by_data_source"]["a"]["figures"]["pass@3"] == {"value": 0.5, "low": 0.0, "high": 1.0, "problems": 2}
    assert record["all"]["failed"] == 1 and record["by_data_source"]["b/x"]["figures"]["response_length"]["value"] == 10
    rows = list(csv.DictReader(written[1].read_text().splitlines()))
    first = {"data_source": "a", "figure": "avg@4", "value": "0.3125", "low": "0.125", "high": "0.5", "problems": "2"}
    assert rows[0] == first and {row["data_source"] for row in rows} == {"a", "b/x", name, "all"}


def test_outcome_line_of_rows_without_a_data_source() -> None:
    everything, _ = summarize([result(0, 0, 1.0, data_source="", end=None)])
    assert format_outcome_line(everything).startswith("(no data source): 1 samples")
