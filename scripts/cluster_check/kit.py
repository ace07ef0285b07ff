"""What the checks share: a Ray cluster on machines of paper, and runs on it as a user starts them."""

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
# A reward that wants digits; it counts on which machine it was asked, for graders run beside their engine.
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
class Done:
    """A run that has ended."""

    code: int
    said: str
    metrics: list[dict[str, float]]  # one dictionary an iteration


@dataclass(frozen=True)
class Kit:
    """folder: of this check, for models and files; all machines see it."""

    folder: Path

    def task(self) -> Path:
        """The quickstart's task with its untrained model."""
        task = self.folder / "task"
        if make_task(task, REWARD):
            (task / "graded_on").mkdir()
        return task

    def words(self, name: str, *words: str) -> list[str]:
        """The words of a run's command after main_ppo."""
        return [*SMALL, *words, *run_words(self.task(), self.folder / "runs", name)]

    def driver(self, head: Machine, name: str, *words: str) -> subprocess.Popen[bytes]:
        """main_ppo on the head, on its cluster."""
        command = [sys.executable, "-m", "alphaapollo.trainer.main_ppo", *self.words(name, *words)]
        return head.start(*command, log=name, RAY_ADDRESS=f"{head.address}:{PORT}", PYTHONPATH=str(ROOT), **SETTINGS)

    def train(self, head: Machine, name: str, *words: str) -> Done:
        """To its end; the check's deadline is its own."""
        return self.done(head, name, self.driver(head, name, *words).wait())

    def done(self, head: Machine, name: str, code: int) -> Done:
        said = (head.logs / f"{head.name}.{name}.log").read_text(errors="replace")
        return Done(code, said, self.metrics(name))

    def metrics(self, name: str) -> list[dict[str, float]]:
        """Of a run so far."""
        return run_metrics(self.folder / "runs", name)

    def graded_on(self) -> dict[str, int]:
        """How many answers were graded on each machine: those of the engines there."""
        return {path.name: path.stat().st_size for path in sorted((self.folder / "task" / "graded_on").iterdir())}

    @contextmanager
    def cluster(self, nodes: int, hidden: Mapping[int, Sequence[Path]] | None = None) -> Iterator[list[Machine]]:
        """Machines with Ray on each, the head first."""
        with machines(nodes, self.folder / "logs", hidden or {}) as every:
            head, *others = every
            start_head(head)
            for machine in others:
                join(machine, head)
            yield every


def start_head(head: Machine) -> None:
    """Returns when others may join."""
    options = [f"--node-ip-address={head.address}", f"--port={PORT}", "--dashboard-host=0.0.0.0"]
    if head.start(*RAY, "start", "--head", "--num-cpus=2", *options, log="ray", **SETTINGS).wait():
        raise RuntimeError(f"Ray's head does not start: {head.logs / head.name}.ray.log")


def join(machine: Machine, head: Machine, **environment: str) -> subprocess.Popen[bytes]:
    """Ray on a further machine; ends when it is up."""
    command = [*RAY, "start", f"--address={head.address}:{PORT}", "--num-cpus=2"]
    return machine.start(*command, log="ray", **SETTINGS | environment)


def expect(done: Done, code: int, *said: str) -> None:
    """AssertionError: another exit status, or a part of the message is missing."""
    assert done.code == code, f"ended with {done.code}, not {code}: {last_line(done.said)}"
    text = " ".join(done.said.split())
    for part in said:
        assert part in text, f"{part!r} is not said: {last_line(done.said)}"
