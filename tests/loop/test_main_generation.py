"""main_generation on the real engine: a killed and resumed run equals an uninterrupted run and a validation."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.loop.conftest import (
    Runner,
    Task,
    check_first_and_last_lines,
    wait_until_nothing_is_left,
)
from tests.loop.stack import OnStack, StackRunner
from tests.loop.warm import Program

PROMPTS, SAMPLES = 24, 4


class GenerationRunner(Runner):
    """Start main_generation with small sizes and few concurrent samples, so that groups end one after the other."""

    module = "alphaapollo.trainer.main_generation"

    def sizes(self, name: str) -> dict[str, Any]:
        return {
            "data.path": self.task.data / "train.parquet",
            "data.max_samples": PROMPTS,
            "data.n_samples": SAMPLES,
            "data.max_prompt_length": 32,
            "data.max_response_length": 32,
            "model.path": self.task.model,
            "rollout.kv_cache_gib": 0.1,
            "rollout.max_num_seqs": 8,
            "custom_reward_function.path": self.reward,
            "trainer.output_dir": self.out,
            "trainer.project_name": "test",
            "trainer.experiment_name": name,
        }


class GenerationOnStack(OnStack, GenerationRunner):
    """Runs main_generation on the stack."""


@pytest.fixture
def generation(task: Task, tmp_path: Path) -> Iterator[GenerationRunner]:
    runner = GenerationRunner(task, tmp_path)
    yield runner
    runner.close()


def wait_for_lines(program: Program, path: Path, count: int) -> None:
    program.wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") >= count)


def records(folder: Path) -> list[dict]:
    """Results in order of prompt and sample, without times."""
    found = [json.loads(line) for line in (folder / "results.jsonl").read_bytes().splitlines()]
    for record in found:
        del record["seconds"]
        for turn in record["turns"]:
            del turn["num_cached_tokens"]
    return sorted(found, key=lambda record: (record["prompt_id"], record["sample"]))


def test_resume_after_kill_equals_uninterrupted_run(generation: GenerationRunner) -> None:
    whole = generation.run("trainer.controller=local", name="whole")  # the stack's engine runs more requests at once
    check_first_and_last_lines(whole, "view", "samples")
    assert f"{PROMPTS * SAMPLES} scored" in whole.output

    results = generation.out / "test/parts/results.jsonl"
    program = generation.start("trainer.controller=local", name="parts")
    wait_for_lines(program, results, 3 * SAMPLES)
    program.signal(signal.SIGKILL)
    program.wait()
    wait_until_nothing_is_left(generation)
    finished = results.read_bytes().count(b"\n") // SAMPLES
    assert 3 <= finished < PROMPTS, "killed in the middle"
    assert not (results.parent / "summary.json").exists()
    with results.open("a") as file:  # as if the kill had come while a line was written
        file.write('{"step": 0, "prompt_id": 23, "sample": 0, "data_so')

    parts = generation.run(name="parts")  # on Ray
    wait_until_nothing_is_left(generation)
    assert f"finished  {finished} prompts, " in parts.output
    assert records(parts.folder) == records(whole.folder)
    summaries = [json.loads((run.folder / "summary.json").read_text()) for run in (parts, whole)]
    assert summaries[0] == summaries[1]
    assert summaries[0]["all"]["samples"] == PROMPTS * SAMPLES


@pytest.mark.core
def test_samples_equal_a_validation_in_training(stack: StackRunner) -> None:
    settings = ("trainer.seed=5", "trainer.total_training_steps=1", "actor_rollout_ref.rollout.val_kwargs.n=2")
    trained = stack.run(*settings, name="trained")
    data = (f"data.path={stack.task.data}/val.parquet", "data.n_samples=2", "data.max_response_length=16")
    done = GenerationOnStack(stack.task, stack.out).run(*data, "trainer.seed=5")
    validation = (trained.folder / "rollouts/val_000000.jsonl").read_bytes().splitlines()
    texts = {(record["prompt_id"], record["sample"]): record["text"] for record in map(json.loads, validation)}
    assert {(record["prompt_id"], record["sample"]): record["text"] for record in records(done.folder)} == texts
    figures = json.loads((done.folder / "summary.json").read_text())["all"]["figures"]
    metrics = trained.metrics[0]
    for metric, figure in (("accuracy", "avg@2"), ("reward", "reward"), ("pass@2", "pass@2"), ("maj@2", "maj@2")):
        assert metrics[f"val/{metric}"] == figures[figure]["value"]
