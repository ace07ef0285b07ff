"""Supervised fine-tuning end to end: in one process, on two Ray ranks, after deaths, with other rank counts."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.runs.run_plan import read_run_plan
from alphaapollo.runs.training_examples import read_examples
from tests.loop.conftest import (
    DEADLINE,
    FinishedRun,
    Runner,
    Task,
    check_first_and_last_lines,
    processes_of,
    wait_until_nothing_is_left,
)
from tests.loop.warm import Program

SIX = ("trainer.total_training_steps=6", "trainer.save_freq=2", "trainer.max_ckpt_to_keep=null")


class SftRunner(Runner):
    """Start main_sft with one rank."""

    module = "alphaapollo.trainer.main_sft"

    def sizes(self, name: str) -> dict[str, Any]:
        return {
            "data.train_files": self.task.data / "sft.parquet",
            "model.path": self.task.model,
            "data.train_batch_size": 8,
            "optim.lr": 1e-3,
            "trainer.log_freq": 1,
            "trainer.cpu_threads": 1,
            "trainer.output_dir": self.out,
            "trainer.project_name": "test",
            "trainer.experiment_name": name,
        }

    def held(self, monkeypatch: pytest.MonkeyPatch, where: str, place: str, *overrides: str) -> Program:
        """Start a run that waits in its fourth step, or before it writes its second checkpoint, until `release` exists.
        It has finished step 3 and written its first checkpoint."""
        monkeypatch.setattr(self, "module", "tests.loop.held_sft")
        monkeypatch.setenv("HELD_UNTIL", str(self.out / "release"))
        monkeypatch.setenv(where, place)
        program = self.start(*overrides)
        monkeypatch.undo()
        self.wait_for(program, '"step": 3')
        return program

    def wait_for(self, program: Program, line: str) -> None:
        """Wait until the metrics contain the line and the first checkpoint is complete."""
        metrics, end = self.out / "test/run/metrics.jsonl", time.monotonic() + DEADLINE
        checkpoint = self.out / "test/run/checkpoints/step_000002"
        while not (metrics.exists() and line in metrics.read_text() and checkpoint.exists()):
            assert program.wait(0.02) is None, program.printed[-4000:]
            assert time.monotonic() < end, program.printed[-4000:]


@pytest.fixture
def sft(task: Task, tmp_path: Path) -> Iterator[SftRunner]:
    runner = SftRunner(task, tmp_path)
    yield runner
    runner.close()


@pytest.fixture
def leaves_nothing(sft: SftRunner) -> Callable[[], None]:
    return lambda: wait_until_nothing_is_left(sft)


def weights(done: FinishedRun) -> bytes:
    return (done.folder / "model/model.safetensors").read_bytes()


@pytest.mark.core
def test_loss_falls_by_source_and_the_model_loads(sft: SftRunner) -> None:
    both = f"[{sft.task.data / 'sft.parquet'},{sft.task.data / 'more.parquet'}]"
    (sft.task.data / "more.parquet").write_bytes((sft.task.data / "sft.parquet").read_bytes())
    files = (f"data.train_files={both}", "data.source_weights=[0.8,0.2]", f"data.val_files={both}")
    done = sft.run(*files, "trainer.total_training_steps=8", "trainer.test_freq=4")
    check_first_and_last_lines(done, "view", "report", "chat")
    assert "more 256 rows, 20% of the prompts, 0.05 passes" in " ".join(done.output.split()), done.output
    lines = done.metrics
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["train/loss"] < lines[0]["train/loss"] and lines[-1]["train/epoch"] == 64 / 512
    assert lines[3]["val/loss"] > lines[7]["val/loss"] == lines[7]["val/loss/sft"] == lines[7]["val/loss/more"]
    plan, examples = read_run_plan(done.folder), read_examples(done.folder)
    assert plan and plan.memory and plan.settings["steps"] == "8 of 8 examples, 0.12 epochs"
    assert len(examples) == 32 and all(row.parts[-1][1] for example in examples for row in example.rows)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(done.folder / "model")
    AutoTokenizer.from_pretrained(done.folder / "model")


def test_held_out_prompts_are_generated_by_the_ranks(sft: SftRunner, leaves_nothing: Callable[[], None]) -> None:
    """On two ranks with LoRA: the prompts, rewards and files of a validation of main_ppo."""
    answered = (
        f"data.val_prompts={sft.task.data / 'val.parquet'}",
        *("data.max_prompt_length=32", "data.max_response_length=16", "rollout.max_num_seqs=4"),
        *("rollout.val_kwargs.n=2", "rollout.val_kwargs.greedy=true", f"custom_reward_function.path={sft.reward}"),
        *("trainer.total_training_steps=3", "trainer.test_freq=2", "trainer.log_freq=100"),
    )
    two_ranks = ("trainer.n_gpus_per_node=2", "trainer.controller=local", "model.lora_rank=4", "rollout.stop=['7']")
    done = sft.run(*answered, *two_ranks)
    assert [line["step"] for line in done.metrics] == [2, 3]
    for line in done.metrics:
        assert {"val/accuracy", "val/accuracy_greedy", "val/pass@2", "val/response_length"} <= line.keys()
        assert line["val/failed"] == 0.0 and 0.0 < line["val/response_length"] <= 16.0
    rows = [json.loads(line) for line in (done.folder / "rollouts/val_000003.jsonl").read_bytes().splitlines()]
    assert len(rows) == 16 and {row["weight_version"] for row in rows} == {3}
    rewards = [sum(letter.isdigit() for letter in row["text"]) / 10 for row in rows]
    assert sum(rewards) / 16 == pytest.approx(done.metrics[-1]["val/reward"])
    assert not any("7" in row["text"] for row in rows)
    assert "val: accuracy" in done.output, done.output[-3000:]
    leaves_nothing()


def test_death_of_one_of_two_ranks_and_resume_on_one(
    sft: SftRunner, monkeypatch: pytest.MonkeyPatch, leaves_nothing: Callable[[], None]
) -> None:
    """Two ranks have the losses of one rank despite a worker death; then one rank resumes the run."""
    program = sft.held(monkeypatch, "HELD_STEP", "4", *SIX, "trainer.n_gpus_per_node=2", "trainer.controller=local")
    pids = [pid for pid, line in processes_of(sft).items() if line.startswith("alphaapollo::trainer")]
    assert len(pids) == 2
    os.kill(pids[0], signal.SIGKILL)
    (sft.out / "release").touch()
    done = sft.finish(program)
    assert done.code == 0, done.output[-4000:]
    assert "the trainer worker of rank" in done.output and "restart 1 of at most 3" in done.output, done.output[-4000:]
    assert "step_000002" in done.output and "Traceback" not in done.output, done.output[-4000:]
    leaves_nothing()
    more = sft.run(*SIX[1:], "trainer.total_training_steps=8")
    assert "trainer.n_gpus_per_node: 2 -> 1: applied" in " ".join(more.output.split())
    alone = sft.run(*SIX[1:], "trainer.total_training_steps=8", name="alone")
    for one, two in zip(alone.metrics, more.metrics, strict=True):
        assert two["train/loss"] == pytest.approx(one["train/loss"], rel=1e-4)
        assert (two["step"], two["train/tokens"]) == (one["step"], one["train/tokens"])


@pytest.mark.core
def test_resume_after_kill_during_checkpoint_write_is_bitwise_equal(
    sft: SftRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = (*SIX, "optim.lr_warmup_steps=2")
    whole = sft.run(*schedule, name="whole")
    program = sft.held(monkeypatch, "HELD_WRITE", "step_000004", *schedule)
    sft.wait_for(program, '"step": 5')  # the write blocks no step
    checkpoints = sft.out / "test/run/checkpoints"
    assert (checkpoints / ".writing_step_000004").is_dir()
    program.signal(signal.SIGKILL)
    program.wait()
    done = sft.run(*schedule)
    assert "resumes from" in done.output and "step_000002" in done.output
    assert [path.name for path in sorted(checkpoints.iterdir())] == ["step_000002", "step_000004", "step_000006"]
    assert [line["step"] for line in done.metrics] == [1, 2, 3, 4, 5, 6]
    assert weights(done) == weights(whole)
    before = (done.folder / "model").stat().st_mtime_ns
    again = sft.run(*schedule)
    assert "all 6 iterations are done" in again.output
    assert (done.folder / "model").stat().st_mtime_ns == before


def test_sigterm_names_the_last_checkpoint(sft: SftRunner) -> None:
    program = sft.start("trainer.total_training_steps=100000", "trainer.save_freq=2", "trainer.save_on_signal=true")
    sft.wait_for(program, '"step": 3')
    program.signal(signal.SIGTERM)
    done = sft.finish(program)
    assert done.code == 130, done.output[-3000:]
    assert done.output.splitlines()[-1].endswith(f"step_{done.metrics[-1]['step']:06d}"), done.output[-3000:]
    assert "Traceback" not in done.output
