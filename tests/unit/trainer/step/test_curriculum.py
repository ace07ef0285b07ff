from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alphaapollo.config.build import build_config
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.schema import Config, Data
from alphaapollo.session.progress import CurriculumState, Progress
from alphaapollo.trainer.step.curriculum import PromptSampler, assign_stages, measure_pass_rate
from alphaapollo.types import Outcome, Prompt, TrajectoryGroup
from tests.unit.trainer.samples import group, trajectory


def prompts(*sources: str, first_id: int = 0) -> list[Prompt]:
    return [Prompt(first_id + 10 * index, source, "text") for index, source in enumerate(sources)]


def results(prompt: Prompt, *accuracies: float) -> TrajectoryGroup:
    return group(*(trajectory(sample, value, 2) for sample, value in enumerate(accuracies)), prompt=prompt)


def settings(sampler: str = "frontier", batch: int = 2, **curriculum: Any) -> Data:
    return Data.model_validate({"sampler": sampler, "train_batch_size": batch, "curriculum": curriculum})


def test_failed_samples_are_no_part_of_a_pass_rate() -> None:
    failed = trajectory(2, math.nan, 2, Outcome.GRADER_FAILED)
    assert measure_pass_rate(group(trajectory(0, 1.0, 2), trajectory(1, 0.0, 2), failed)) == 0.5
    assert measure_pass_rate(group(failed)) is None
    with pytest.raises(ValueError, match="from 0 to 1; row 0 has 3"):
        measure_pass_rate(group(trajectory(0, 3.0, 2)))


def test_results_change_the_weights() -> None:
    """Solved, impossible and half solved prompts, and one that was never sampled."""
    tasks, progress = prompts("a", "a", "a", "a"), Progress(prompts_consumed=3)
    curriculum = PromptSampler(tasks, settings())
    assert sorted(curriculum.choose_prompts(progress, [0, 1, 2, 3])) == [0, 1, 2, 3]
    groups = [results(tasks[0], 1, 1), results(tasks[1], 0, 0), results(tasks[2], 1, 0)]
    curriculum.observe(progress, groups)
    metrics = curriculum.pop_metrics()
    assert metrics == {
        "curriculum/stage": 1.0,
        "curriculum/observed": 0.75,
        "curriculum/retired": 0.25,
        "curriculum/pass_rate": 0.5,
    }
    assert progress.curriculum.drawn == {}  # no group is in flight
    assert curriculum._compute_weights(progress.curriculum).tolist() == [0.05, 0.05, 1.0, 1.0]
    by_pool = PromptSampler(tasks, settings("difficulty", revisit_rate=0.1))
    assert by_pool._compute_weights(progress.curriculum).tolist() == [0.1, 0.2, 1.0, 1.0]
    curriculum.observe(progress, [results(tasks[0], 0, 0)])
    assert curriculum._compute_weights(progress.curriculum)[0] == 1.0  # decayed to 0.5: no longer retired


def test_stages_open_at_their_gates() -> None:
    stages = [{"data_source": "easy/*"}, {"data_source": "math", "metric": "val/accuracy"}, {"data_source": "*"}]
    tasks, progress = prompts("easy/a", "easy/b", "easy/b", "math", "x"), Progress()
    curriculum = PromptSampler(tasks, settings("uniform", stages=stages))
    for validation, result, weights in (
        ({}, results(tasks[0], 1, 1), [1, 1, 1, 0, 0]),  # one of the two prompts that a batch has
        ({"val/accuracy": 0.9}, results(tasks[1], 1, 0), [1, 1, 1, 0, 0]),  # mean .75
        ({}, results(tasks[1], 1, 1), [1, 1, 1, 1, 0]),
        ({"val/accuracy": 0.8}, results(tasks[0], 0, 0), [1, 1, 1, 1, 1]),  # an open stage stays open
        ({"val/accuracy": 1.0}, results(tasks[4], 1, 1), [1, 1, 1, 1, 1]),  # no stage follows the last
    ):
        progress.validation = validation
        curriculum.observe(progress, [result])
        stage = curriculum.pop_metrics()["curriculum/stage"]
        is_open = curriculum._compute_weights(progress.curriculum) > 0
        assert is_open.tolist() == weights and stage == sum(weights) - 2


def test_a_gate_metric_must_exist() -> None:
    stages = [{"data_source": "a", "metric": "val/b/accuracy"}, {"data_source": "*"}]
    tasks, progress = prompts("a", "b"), Progress()
    curriculum = PromptSampler(tasks, settings("uniform", stages=stages))
    curriculum.observe(progress, [])  # not validated yet
    progress.validation = {"val/accuracy": 0.9}
    with pytest.raises(ValueError, match=r"val/b/accuracy, .* one of val/accuracy\."):
        curriculum.observe(progress, [])
    config = {"train_files": "a.parquet", "curriculum": {"stages": stages}}
    with pytest.raises(ConfigError, match=r"val/b/accuracy\. Set both"):
        build_config(Config, {"data": config})
    with pytest.raises(ConfigError, match=r"data\.sampler=frontier .*data\.shuffle=true"):
        build_config(Config, {"data": {"sampler": "frontier", "shuffle": False}})


def test_every_prompt_needs_a_stage_and_every_stage_a_prompt() -> None:
    data = settings("uniform", stages=[{"data_source": "a*"}, {"data_source": "b"}])
    assert assign_stages(prompts("b", "a1", "a2"), data).tolist() == [1, 0, 0]
    with pytest.raises(ValueError, match="'c' of data"):
        assign_stages(prompts("a", "b", "c"), data)
    with pytest.raises(ValueError, match=r"stages\[1\]\.data_source='b' .*\['a'\]"):
        assign_stages(prompts("a"), data)


def test_a_resumed_run_draws_what_the_uninterrupted_run_draws(tmp_path: Path) -> None:
    """Two of four positions are in flight when the checkpoint is written."""
    tasks, data = prompts(*["a"] * 30, first_id=5), settings()
    progress, curriculum = Progress(step=1, prompts_consumed=4, unfinished=[1, 3]), PromptSampler(tasks, data)
    drawn = curriculum.choose_prompts(progress, [0, 1, 2, 3])
    curriculum.observe(progress, [results(tasks[drawn[0]], 1, 0), results(tasks[drawn[2]], 0.3, 0.3)])
    progress.write(tmp_path)
    resumed, fresh = Progress.read(tmp_path), PromptSampler(tasks, data)
    assert np.array_equal(resumed.curriculum.pass_rates, progress.curriculum.pass_rates, equal_nan=True)
    assert resumed.curriculum.drawn == progress.curriculum.drawn == {1: tasks[drawn[1]].id, 3: tasks[drawn[3]].id}
    positions = [1, 3, 4, 5, 6]
    assert fresh.choose_prompts(resumed, positions) == curriculum.choose_prompts(progress, positions)
    assert fresh.choose_prompts(resumed, [1, 3]) == [drawn[1], drawn[3]]


def test_rows_that_are_dropped_at_resume_are_replaced() -> None:
    """Pass rates belong to the rows of the data files, not to their order among the kept ones."""
    tasks, progress = prompts("a", "a", "a"), Progress(unfinished=[0, 1])
    curriculum = PromptSampler(tasks, settings())
    curriculum.choose_prompts(progress, [0, 1])
    curriculum.observe(progress, [results(tasks[2], 1, 1)])
    kept = PromptSampler([tasks[2]], settings())
    assert kept.choose_prompts(progress, [0, 1]) == [0, 0]
    assert kept._compute_weights(progress.curriculum).tolist() == [0.05]


def test_uniform_stages_draw_each_prompt_once_per_epoch() -> None:
    """Also after the second stage has opened, with positions in flight, and after a resume."""
    stages = [{"data_source": "Easy", "threshold": 0.5}, {"data_source": "*"}]
    tasks, data = prompts(*["easy"] * 5, *["hard"] * 6), settings("uniform", batch=5, stages=stages)
    sampler, progress = PromptSampler(tasks, data), Progress(prompts_consumed=12)
    drawn = [sampler.choose_prompts(progress, [2 * k, 2 * k + 1]) for k in range(6)]
    numbers = [number for pair in drawn for number in pair]
    assert sorted(numbers[:5]) == sorted(numbers[5:10]) == list(range(5))
    sampler.observe(progress, [results(tasks[number], 1, 1) for number in range(5)])
    assert progress.curriculum.stage == 1
    again = PromptSampler(tasks, data)
    numbers = [again.choose_prompts(progress, [position])[0] for position in range(12, 34)]
    assert sorted(numbers[:11]) == sorted(numbers[11:]) == list(range(11)) and numbers[:11] != numbers[11:]


def take(sampler: PromptSampler, progress: Progress, count: int) -> list[int]:
    positions = range(progress.prompts_consumed, progress.prompts_consumed + count)
    progress.prompts_consumed += count
    return sampler.choose_prompts(progress, positions)


def test_files_have_weights_in_a_curriculum() -> None:
    tasks = [replace(prompt, file=index % 2) for index, prompt in enumerate(prompts(*"aaaabb"))]
    tasks.sort(key=lambda prompt: prompt.file)
    keys = {"train_files": ["x", "y"], "source_weights": [0.75, 0.25], "train_batch_size": 2}
    stages = {"stages": [{"data_source": "a"}, {"data_source": "*"}]}
    staged = PromptSampler(tasks, Data.model_validate({**keys, "curriculum": stages}))
    drawn = Counter((tasks[index].data_source, tasks[index].file) for index in take(staged, Progress(), 8))
    assert drawn == {("a", 0): 6, ("a", 1): 2}  # two epochs of the first stage
    weighted = PromptSampler(tasks, Data.model_validate({**keys, "sampler": "difficulty"}))
    assert weighted._compute_weights(Progress().curriculum).tolist() == pytest.approx([0.25] * 3 + [0.25 / 3] * 3)
    rated = CurriculumState(pass_rates=array("d", [0.5, 0.1, 0.1, 0.1, 0.1, 0.1]))
    by_file = weighted._compute_weights(rated).reshape(2, 3).sum(axis=1)
    assert by_file.tolist() == pytest.approx([0.75, 0.25])  # the sampler chooses within each file
