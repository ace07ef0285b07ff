"""Task folders as episodes: a policy that uses bash and submit in a rootless sandbox, and the tests that grade it."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from alphaapollo.config.schema import Env
from alphaapollo.environments.base import check_environment
from alphaapollo.plugins.tasks.command import ATTEMPTS, check_task, main
from alphaapollo.plugins.tasks.harbor import BashAgent, open_trial
from alphaapollo.plugins.tasks.sandboxes.base import SandboxFailedError
from alphaapollo.types import EpisodeEnd, GroupRequest, Message, Outcome, Prompt, Sampling, Trajectory
from examples.tasks.make_lessons import TOOLS
from tests.unit.rollout.worker_kit import TextEngine, generate, make_worker, write_model

TEST = """
mkdir -p /logs/verifier
if [ "$(python3 /app/add.py 20 22)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
FIX = "sed -i 's/ - / + /' /app/add.py"


def make_task(
    folder: Path, test: str = TEST, solution: str = FIX, limits: str = "", dockerfile: str = "", seconds: float = 20
) -> Path:
    """Write the task of repairing a program."""
    files = {
        "task.toml": f"[verifier]\ntimeout_sec = {seconds}\n[environment]\nmemory_mb = 256\n{limits}\n",
        "instruction.md": "Repair /app/add.py.",
        "environment/Dockerfile": f"FROM python:3.12\nWORKDIR /app\nCOPY add.py .\n{dockerfile}\n",
        "environment/add.py": "import sys\nprint(int(sys.argv[1]) - int(sys.argv[2]))\n",
        "tests/test.sh": f"#!/bin/bash\n{test}",
        "solution/solve.sh": solution,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def play(folder: Path, task: Path, *texts: str, **settings: object) -> Trajectory:
    """The trajectory of an episode in which the model writes these texts."""
    env = Env(env_name="harbor", **{"max_steps": 4, **settings})
    waiting = [*texts, *texts]  # an episode that fails is played twice

    def answer(prompt: str) -> str:
        assert TOOLS in prompt  # as in the lessons of the example
        return waiting.pop(0)

    engine = TextEngine(folder, answer)
    worker = make_worker(folder, engine, env, max_prompt_length=4000, max_response_length=4000)
    prompt = Prompt(0, "harbor", [Message(role="user", content="Repair it.")], env_kwargs={"task": str(task)})
    (group,) = generate(worker, GroupRequest(prompt, 1, Sampling(max_tokens=3000), 0))
    return group.trajectories[0]


def bash(command: str) -> str:
    return f"<bash>{json.dumps({'command': command})}</bash>"


SUBMIT = "<submit>{}</submit>"


@pytest.mark.core
def test_policy_works_in_a_sandbox_and_is_graded(folder: Path, tmp_path: Path) -> None:
    task = make_task(tmp_path)
    done = play(folder, task, bash("cat add.py; false"), bash(FIX), SUBMIT)
    shown = done.turns[0].observation[0]["content"]  # the result of the first command
    assert "print(int(sys.argv[1]) - int(sys.argv[2]))" in shown and "exit code 1" in shown
    assert (done.score.reward, done.score.accuracy, done.end) == (1.0, 1.0, EpisodeEnd.DONE)
    score = play(folder, make_task(tmp_path, f"{TEST}printf 'x%.0s' {{1..2000}}; echo; echo sums differ"), SUBMIT).score
    assert score.reward == 0.0 and score.reason == f"the tests printed: {'x' * 988}\nsums differ"
    assert play(folder, task, bash(FIX), max_steps=1).score.reward == 1.0  # at a limit, too
    parts = 'echo \'{"reward": 0.5, "style": 0.25}\' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt'
    score = play(folder, make_task(tmp_path, parts), SUBMIT).score
    assert (score.reward, score.components) == (0.5, {"accuracy": 0.0, "reward": 0.5, "style": 0.25})


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("exit 3", "wrote no reward (exit code 3"),
        ("sleep 60", "wrote no reward (time limit of 0.5 s"),
        ("echo nan > /logs/verifier/reward.txt", "not a finite number"),
        ('echo \'{"a": 1, "b": 2}\' > /logs/verifier/reward.json', "reward.json has no reward (KeyError: 'reward'"),
        ("ln -s /app/add.py /logs/verifier/reward.txt", "wrote no reward"),
    ],
)
def test_tests_without_a_reward_are_failures(folder: Path, tmp_path: Path, test: str, reason: str) -> None:
    task = make_task(tmp_path, test, seconds=0.5 if "sleep" in test else 20)
    score = play(folder, task, SUBMIT).score
    assert score.outcome is Outcome.ENVIRONMENT_FAILED and reason in score.reason
    score = play(folder, task, bash("true"), SUBMIT).score  # the command can be the cause
    assert (score.outcome, score.reward, score.accuracy) == (Outcome.SCORED, 0.0, 0.0) and reason in score.reason


def test_episodes_wait_for_a_sandbox(folder: Path, tmp_path: Path) -> None:
    env = Env(env_name="harbor", max_steps=2, harbor={"max_sandboxes": 1}, episode_timeout=60)
    engine = TextEngine(folder, lambda text: SUBMIT if "tool_response" in text else bash(FIX))
    worker = make_worker(folder, engine, env, max_prompt_length=4000, max_response_length=4000)
    prompt = Prompt(0, "harbor", [Message(role="user", content="?")], env_kwargs={"task": str(make_task(tmp_path))})
    (group,) = generate(worker, GroupRequest(prompt, 4, Sampling(max_tokens=3000), 0))
    assert [one.score.reward for one in group.trajectories] == [1.0] * 4


def test_commands_share_the_time_of_the_agent(folder: Path, tmp_path: Path) -> None:
    task = make_task(tmp_path, limits="[agent]\ntimeout_sec = 0.5")
    done = play(folder, task, bash("sleep 30"), bash(FIX), SUBMIT)
    assert len(done.turns) == 1 and done.score.reward == 0.0 and done.end is EpisodeEnd.DONE


@pytest.mark.parametrize(
    "command",
    [
        "cd /; rm -rf /app /root /logs /tests /tmp /home",
        "head -c 1G /dev/zero > /big",
        "mkdir /many; cd /many; python3 -c 'import os\nwhile True: os.mknod(os.urandom(8).hex())'",
        "(setsid yes &); (yes &); exit 0",
        "rm -rf /tests /logs; mkfifo /tests /logs",
        "kill -9 -1",
        "kill -INT 1; prlimit --pid 1 --nofile=1:1; exec -a $'\\xff' sleep 1",
        "cp $(command -v sleep) $'/tmp/\\xff'; $'/tmp/\\xff' 1",
        "echo \0",
        "echo \ud800",
    ],
)
def test_agent_cannot_prevent_the_verdict(folder: Path, tmp_path: Path, command: str) -> None:
    done = play(folder, make_task(tmp_path), bash(command), SUBMIT, max_steps=2)
    assert (done.score.reward, done.score.outcome) == (0.0, Outcome.SCORED)


def test_tasks_that_cannot_run_are_failures_with_a_reason(folder: Path, tmp_path: Path) -> None:
    score = play(folder, make_task(tmp_path, limits="gpus = 1")).score
    assert score.outcome is Outcome.ENVIRONMENT_FAILED and "not supported: environment.gpus=1" in score.reason
    with pytest.raises(ValueError, match="Did you mean 'podman'"):
        check_environment(Env(env_name="harbor", harbor={"backend": "podmann"}))


def test_check_accepts_a_good_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_task(tmp_path / "tasks" / "fix-sum")
    assert main(["check", str(tmp_path), "--output", str(tmp_path / "results.jsonl")]) == 0
    shown = capsys.readouterr().out
    assert "1/1 fix-sum" in shown and "7 of 7 held" in shown and "1 of 1 tasks can be used." in shown
    (one,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert one.pop("seconds") > 0
    assert one == {"task": "fix-sum", "solution": "1", "nothing": "0", "attempts": "7 of 7 held", "problem": ""}


def test_check_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exists = "mkdir -p /logs/verifier; [ -e /mine/verifier/reward.txt ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    readable = make_task(tmp_path / "readable", TEST, f"{FIX} # a line that is long enough")
    shutil.copy(readable / "solution/solve.sh", readable / "environment/notes.sh")
    (readable / "environment/notes.sh").write_text("x")
    wrong = {
        "unsolved": (
            make_task(tmp_path / "unsolved", f"{TEST}\necho sums differ", "echo no patch; exit 3"),
            "its solution ends with exit code 3 no patch its solution gets no reward of 1, but the reward 0 the tests "
            "printed: sums differ",
        ),
        "given": (
            make_task(tmp_path / "given", "echo 1 > /logs/verifier/reward.txt"),
            "does nothing gets no reward of 0, but the reward 1",
        ),
        "fooled": (make_task(tmp_path / "fooled", exists), "an agent that links the reward gets the reward 1"),
        "network": (make_task(tmp_path / "network", dockerfile="RUN pip install nothing"), "cannot run here: "),
    }
    assert main(["check", str(tmp_path)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    for task, problem in wrong.values():
        assert f"{task.name}: " in shown and problem in shown
    assert "1 of 5 tasks can be used." in shown


def test_check_finds_tests_that_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "alphaapollo.plugins.tasks.command._list_secrets", lambda _: ["print(int(sys.argv[1]) - int(sys.argv[2]))"]
    )
    monkeypatch.setitem(ATTEMPTS, "reads the tests", "cat /app/add.py")
    assert "the agent can read 'print(" in asyncio.run(check_task(make_task(tmp_path), "rootless")).problem


def test_a_sandbox_that_ends_is_no_reward_before_a_command_and_0_after_one(tmp_path: Path) -> None:
    async def run() -> None:
        async with open_trial(make_task(tmp_path)) as trial:
            trial.sandbox._process.kill()
            await trial.sandbox._process.wait()
            with pytest.raises(SandboxFailedError):
                await trial.verify()
            assert (await trial.exec("true")).code < 0 and trial.seconds_left == 0
            assert (await trial.verify()).reward == 0.0

    asyncio.run(run())


def test_a_submission_cannot_be_withdrawn() -> None:
    agent = BashAgent(Env().harbor, 1.0)
    asyncio.run(agent.submit())
    assert asyncio.run(agent.bash("true")) and agent.is_submitted
