"""Whole runs on the real stack, each in a process of its own with a deadline, on a model made in a moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.quickstart.make_task import make_data, make_model, make_tokenizer

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 240.0
MARK = "ALPHAAPOLLO_TEST"  # environment variable by which the processes of a test are known


@dataclass(frozen=True)
class Task:
    """The quickstart's task and untrained model, small."""

    model: Path
    data: Path


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    folder = tmp_path_factory.mktemp("task")
    make_tokenizer(folder / "model")
    make_model(folder / "model", seed=0)
    make_data(folder / "data", seed=0, num_sft=256, num_rl=64, num_val=8)
    return Task(folder / "model", folder / "data")


REWARD = '''
def compute_score(prompt, completion):
    """Likes digits: an untrained model scores something, and not always the same."""
    digits = sum(letter.isdigit() for letter in completion)
    return {"reward": digits / 10, "accuracy": float(digits % 2)}
'''


@dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    code: int
    output: str
    folder: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def rollouts(self, step: int) -> list[dict]:
        return [json.loads(line) for line in (self.folder / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()]


class Runner:
    """Starts main_ppo with small sizes; the command line is a user's."""

    def __init__(self, task: Task, out: Path):
        self.task, self.out = task, out
        self.processes: list[subprocess.Popen[str]] = []
        self.reward = out / "reward.py"
        self.reward.write_text(REWARD)

    def command(self, overrides: Sequence[str], name: str = "run") -> list[str]:
        sizes = {
            "data.train_files": self.task.data / "train.parquet",
            "data.val_files": self.task.data / "val.parquet",
            "data.train_batch_size": 4,
            "data.max_prompt_length": 32,
            "data.max_response_length": 16,
            "actor_rollout_ref.model.path": self.task.model,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
            "actor_rollout_ref.actor.optim.lr": 1e-3,
            "actor_rollout_ref.rollout.kv_cache_gib": 0.1,
            "custom_reward_function.path": self.reward,
            "env.rollout.n": 4,
            "trainer.output_dir": self.out,
            "trainer.project_name": "test",
            "trainer.experiment_name": name,
            "trainer.total_training_steps": 2,
            "trainer.cpu_threads": 1,
            "algorithm.adv_estimator": "grpo",
        }
        given = {override.split("=")[0] for override in overrides}
        words = [f"{key}={value}" for key, value in sizes.items() if key not in given]
        return [sys.executable, "-m", "alphaapollo.trainer.main_ppo", *words, *overrides]

    def start(self, *overrides: str, name: str = "run") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.command(overrides, name),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE", MARK: str(self.out)},
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], name: str = "run", deadline: float = DEADLINE) -> Finished:
        try:
            output, _ = process.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"not done within {deadline:.0f} s:\n{output[-4000:]}")
        return Finished(process.returncode, output, self.out / "test" / name)

    def run(self, *overrides: str, name: str = "run") -> Finished:
        """Run to the end; a run that fails shows its output."""
        done = self.finish(self.start(*overrides, name=name), name)
        assert done.code == 0, done.output[-6000:]
        return done

    def refuse(self, *overrides: str) -> Finished:
        """A run that must be refused before anything starts."""
        done = self.finish(self.start(*overrides), deadline=60)
        assert done.code == 2, done.output[-4000:]
        assert "Traceback" not in done.output, done.output
        return done


@pytest.fixture
def ppo(task: Task, tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(task, tmp_path)
    yield runner
    for process in runner.processes:  # of a test that failed half-way
        process.kill()
        process.wait()


def processes_of(ppo: Runner) -> dict[int, str]:
    """Processes that descend from this test's runs: {pid: command line}."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"{MARK}={ppo.out}".encode() in environment:
                found[int(entry.name)] = command[:200]
    return found


@pytest.fixture
def leaves_nothing(ppo: Runner) -> Callable[[], None]:
    """Call it when everything should be gone: fails with what is left after a while."""

    def check() -> None:
        end = time.monotonic() + 20  # ours go at once, and the reaper comes for Ray's
        while time.monotonic() < end:
            processes = processes_of(ppo)
            files = [path.name for run in ppo.processes for path in Path("/dev/shm").glob(f"alphaapollo-{run.pid}-*")]
            if not processes and not files:
                return
            time.sleep(0.1)
        pytest.fail(f"left behind: {processes} {files}")

    return check
