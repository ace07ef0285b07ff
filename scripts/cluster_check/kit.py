"""Utilities of the checks: a Ray cluster on simulated machines, and runs on it started as by a user."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.checks import ROOT, last_line
from scripts.cluster_check.machines import Machine, machines
from scripts.small_run import make_task, run_metrics, run_words

PORT = 6379
RAY = (sys.executable, "-m", "ray.scripts.scripts")
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "RAY_worker_niceness": "0",
}
# Rewards digits and counts calls by machine: graders run on the machine of their engine.
REWARD = """
import socket
from pathlib import Path


def compute_score(prompt, completion):
    with (Path(__file__).parent / "graded_on" / socket.gethostname()).open("a") as calls:
        calls.write(".")
    return sum(map(str.isdigit, completion)) / 10
"""
SMALL = (
    "algorithm.adv_estimator=grpo",
    "env.rollout.n=4",
    "data.train_batch_size=8",
    "data.max_prompt_length=64",
    "data.max_response_length=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.rollout.max_num_seqs=32",
    "trainer.device=cpu",
    "trainer.cpu_threads=1",
    "actor_rollout_ref.rollout.cpu_threads=1",
    "trainer.test_freq=-1",
    "trainer.export_hf=false",
    "trainer.total_training_steps=1",
)


@dataclass(frozen=True)
class FinishedRun:
    """Exit status, output and metrics of a finished run."""

    code: int
    said: str
    metrics: list[dict[str, float]]  # one dictionary per iteration


@dataclass(frozen=True)
class Kit:
    """Utilities of one check. folder: models and files, visible to all machines."""

    folder: Path

    def task(self) -> Path:
        """Folder with the quickstart's task and its untrained model."""
        task = self.folder / "task"
        if make_task(task, REWARD):
            (task / "graded_on").mkdir()
        return task

    def words(self, name: str, *words: str) -> list[str]:
        """Overrides of main_ppo for a run."""
        return [*SMALL, *words, *run_words(self.task(), self.folder / "runs", name)]

    def driver(self, head: Machine, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start main_ppo on the head and its cluster."""
        command = [sys.executable, "-m", "alphaapollo.trainer.main_ppo", *self.words(name, *words)]
        return head.start(*command, log=name, RAY_ADDRESS=f"{head.address}:{PORT}", PYTHONPATH=str(ROOT), **SETTINGS)

    def train(self, head: Machine, name: str, *words: str) -> FinishedRun:
        """Train to the end. The deadline of the check applies."""
        return self.done(head, name, self.driver(head, name, *words).wait())

    def done(self, head: Machine, name: str, code: int) -> FinishedRun:
        said = (head.logs / f"{head.name}.{name}.log").read_text(errors="replace")
        return FinishedRun(code, said, self.metrics(name))

    def metrics(self, name: str) -> list[dict[str, float]]:
        """Metrics of a run so far."""
        return run_metrics(self.folder / "runs", name)

    def graded_on(self) -> dict[str, int]:
        """Number of responses graded on each machine, which are those of its engines."""
        return {path.name: path.stat().st_size for path in sorted((self.folder / "task" / "graded_on").iterdir())}

    @contextmanager
    def cluster(self, nodes: int, hidden: Mapping[int, Sequence[Path]] | None = None) -> Iterator[list[Machine]]:
        """Start machines with Ray, the head first."""
        with machines(nodes, self.folder / "logs", hidden or {}) as every:
            head, *others = every
            start_head(head)
            for machine in others:
                join(machine, head)
            yield every


def start_head(head: Machine) -> None:
    """Start Ray's head. Returns when other machines can join."""
    options = [f"--node-ip-address={head.address}", f"--port={PORT}", "--dashboard-host=0.0.0.0"]
    if head.start(*RAY, "start", "--head", "--num-cpus=2", *options, log="ray", **SETTINGS).wait():
        raise RuntimeError(f"Ray's head did not start. Log: {head.logs / head.name}.ray.log")


def join(machine: Machine, head: Machine, **environment: str) -> subprocess.Popen[bytes]:
    """Start Ray on another machine."""
    command = [*RAY, "start", f"--address={head.address}:{PORT}", "--num-cpus=2"]
    return machine.start(*command, log="ray", **SETTINGS | environment)


def expect(done: FinishedRun, code: int, *said: str) -> None:
    """Raise AssertionError if the exit status differs or a part of the message is missing."""
    assert done.code == code, f"exited with {done.code}, not {code}: {last_line(done.said)}"
    text = " ".join(done.said.split())
    for part in said:
        assert part in text, f"{part!r} is not in the output: {last_line(done.said)}"
