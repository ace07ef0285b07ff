"""Graders that crash, hang, print and lie, behind the real processes."""

import asyncio
import math
import pickle
import re
import subprocess
import sys
import textwrap
import time

import pytest

from alphaapollo.config.schema import Reward
from alphaapollo.processes import forked_module
from alphaapollo.processes.watchdog import list_child_pids
from alphaapollo.rewards.grader_processes.client import ORDINARY_ANSWER
from alphaapollo.types import Outcome, Prompt, Score
from tests.processes import is_running, wait_until
from tests.unit.rewards.grading import open_graders, with_client

GSM8K = Prompt(0, "openai/gsm8k", "?", "4")
MATH = Prompt(0, "math", "?", r"\frac{1}{2}")
TOWER = r"\boxed{9^{9^{9^{9}}}}"

REWARD = """
import ctypes, json, math, os, pathlib, sys, time

def f(prompt, completion):
    print("noise on stdout", flush=True)
    os.write(1, b"more noise")
    name, _, number = completion.partition(" ")
    here = pathlib.Path(__file__).with_suffix("." + name)
    if name == "sleep":
        time.sleep(float(number))
        return 1.0
    if name == "meet":  # returns when so many processes grade at once
        here.mkdir(exist_ok=True)
        (here / str(os.getpid())).touch()
        while len(list(here.iterdir())) < int(number):
            time.sleep(0.01)
        return 1.0
    if name in ("hang-once", "die-once", "raise-once"):
        if not here.exists():
            here.touch()
            {"hang": lambda: time.sleep(600), "die": lambda: os._exit(1), "raise": lambda: 1 / 0}[name.split("-")[0]]()
        return 1.0
    return {
        "one": lambda: 1.0,
        "parts": lambda: {"accuracy": 1.0, "format": 0.5},
        "pid": lambda: float(os.getpid()),
        "stdin": lambda: float(len(sys.stdin.read())),
        "raise": lambda: {}["missing"],
        "nan": lambda: math.nan,
        "exit": lambda: sys.exit(3),
        "crash": lambda: ctypes.string_at(0),
        "close": lambda: os.closerange(0, 100),
        "recursion": lambda: f(prompt, "recursion"),
    }[completion]()
"""


@pytest.fixture
def custom(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(REWARD)
    return str(path)


@pytest.fixture(scope="module", autouse=True)
def all_processes_end():
    """After the last test, no grader process is left."""
    yield
    servers = [server._forkserver_pid for server in forked_module._servers.values()]
    assert servers and wait_until(lambda: not any(map(list_child_pids, servers)))


@pytest.fixture(scope="module")
def users(all_processes_end, tmp_path_factory):
    """Graders of the user's function that all tests share. Its faults end processes, but not the client."""
    path = tmp_path_factory.mktemp("custom") / "my_reward.py"
    path.write_text(REWARD)
    with open_graders(Reward(timeout=60.0, num_workers=1), path) as graders:
        yield graders


@pytest.fixture(scope="module")
def built_in(all_processes_end):
    """Graders of the project that all tests share."""
    with open_graders(Reward(timeout=60.0, num_workers=1)) as graders:
        yield graders


def run(scenario, path="", timeout=10.0, **reward):
    """Return `scenario(client)` with graders that only this call uses."""
    return with_client(scenario, Reward(timeout=timeout, num_workers=1, **reward), path)


def scores(texts, path="", prompt=GSM8K, timeout=10.0, **reward):
    with open_graders(Reward(timeout=timeout, num_workers=1, **reward), path) as graders:
        return graders.score(prompt, texts)


def test_built_in_graders_by_data_source(built_in):
    pairs = ((GSM8K, "#### 4"), (MATH, r"\boxed{0.5}"), (GSM8K, "?"))
    (good,), (maths,), (unreadable,) = (built_in.score(prompt, [text]) for prompt, text in pairs)
    assert good == maths == Score(1.0, {"accuracy": 1.0})
    assert (unreadable.reward, unreadable.outcome) == (0.0, Outcome.WRONG_FORMAT)


def test_imports_of_a_grader_have_the_time_of_a_start(monkeypatch):
    """sympy takes longer than a short timeout of an answer."""
    with open_graders(Reward(timeout=60.0, num_workers=1)) as graders:
        assert graders.score(GSM8K, ["#### 4"])[0].reward == 1.0
        monkeypatch.setattr("alphaapollo.rewards.grader_processes.client.START_TIMEOUT", 0.0)
        (score,) = graders.score(MATH, [r"\boxed{0.5}"])
    assert score.outcome is Outcome.GRADER_FAILED and "within 0 s" in score.reason


def test_custom_function_grades_all_rows_and_may_print(users):
    one, parts, stdin = users.score(GSM8K, ["one", "parts", "stdin"])
    assert (one, parts, stdin) == (Score(1.0), Score(1.5, {"accuracy": 1.0, "format": 0.5}), Score(0.0))


FAILURES = [
    ("raise", r"KeyError: 'missing' \(.*my_reward.py, line \d+"),
    ("nan", "the reward is nan"),
    ("exit", r"\(exit code 3\)"),
    ("crash", r"\(SIGSEGV\)"),
    ("close", "process died"),
    ("recursion", "RecursionError"),
]


@pytest.mark.parametrize(("text", "reason"), FAILURES)
def test_failure_has_a_reason_and_does_not_affect_other_jobs(users, text, reason):
    first, failed, last = users.score(GSM8K, ["one", text, "one"])
    assert failed.outcome is Outcome.GRADER_FAILED
    assert math.isnan(failed.reward) and failed.components == {}
    assert re.search(reason, failed.reason)
    assert first == last == Score(1.0)


def test_components_are_added_to_the_users_reward(custom):
    one, failed, parts = scores(["one", "raise", "parts"], custom, components={"repetition": 0.5})
    assert one == Score(1.5, {"accuracy": 1.0, "task": 1.0, "repetition": 1.0})
    assert failed.outcome is Outcome.GRADER_FAILED and math.isnan(failed.reward)
    assert parts == Score(2.0, {"accuracy": 1.0, "format": 0.5, "task": 1.5, "repetition": 1.0})
    (clash,) = scores(["parts"], custom, components={"format": 0.1})
    assert clash.outcome is Outcome.GRADER_FAILED and "both name format" in clash.reason


@pytest.mark.parametrize(("source", "reason"), [("gsm8k", "ground truth None"), ("poems", "data_source 'poems'")])
def test_errors_of_graders_are_failures(built_in, source, reason):
    (score,) = built_in.score(Prompt(0, source, "?"), ["4"])
    assert score.outcome is Outcome.GRADER_FAILED and reason in score.reason


def test_failure_is_retried_once(users):
    assert users.score(GSM8K, ["die-once", "raise-once"]) == [Score(1.0)] * 2


def test_time_limits_end_a_grader_and_are_not_retried(custom):
    (hung,), (once,) = (scores([text], custom, timeout=0.4) for text in ("sleep 600", "hang-once"))
    assert hung.outcome is once.outcome is Outcome.GRADER_FAILED and "0.4 s" in hung.reason


def test_an_answer_that_hangs_its_grader_scores_zero_at_the_first_attempt():
    requests = []

    async def scenario(client):
        once = client._grade_once

        async def grade_once(request, *details):
            requests.append(pickle.loads(request)[1][0].text)
            return await once(request, *details)

        client._grade_once = grade_once
        return await client.score(MATH, TOWER)

    score = run(scenario, timeout=2.0, components={"format": 0.5})
    assert (score.reward, score.accuracy, score.outcome) == (0.0, 0.0, Outcome.WRONG_FORMAT)
    assert "2 s" in score.reason and score.components["task"] == score.components["format"] == 0.0
    assert requests == [TOWER, ORDINARY_ANSWER, TOWER]  # the last request computes the components only


def test_jobs_do_not_wait_behind_a_slow_one(custom):
    async def scenario(client):
        slow = asyncio.create_task(client.score(GSM8K, "sleep 60"))
        await asyncio.sleep(0.1)
        quick = await asyncio.gather(*(client.score(GSM8K, "one") for _ in range(200)))
        waited = slow.done()
        slow.cancel()
        return quick, waited

    quick, waited = run(scenario, custom, timeout=60.0)
    assert quick == [Score(1.0)] * 200 and not waited


def test_slow_graders_run_side_by_side(users):
    assert users.score(GSM8K, ["meet 3"] * 3) == [Score(1.0)] * 3


def test_a_cancelled_score_leaves_the_graders_usable(users):
    async def scenario(client):
        task = asyncio.create_task(client.score(GSM8K, "sleep 0.2"))
        await asyncio.sleep(0.05)
        task.cancel()
        return await client.score(GSM8K, "one")

    assert users.run(scenario) == Score(1.0)


def test_blocked_event_loop_does_not_kill_processes(custom):
    async def scenario(client):
        task = asyncio.create_task(client.score(GSM8K, "sleep 0.1"))
        await asyncio.sleep(0.05)
        time.sleep(2.0)
        return await task

    assert run(scenario, custom, timeout=1.5) == Score(1.0)


KILLED = """
import os
from pathlib import Path

mark = Path(__file__).with_suffix(".mark")
mark.write_text(mark.read_text() + "x" if mark.exists() else "x")
if len(mark.read_text()) <= {times}:
    os.kill(os.getpid(), 9)

def f(prompt, completion):
    return 1.0
"""


def test_process_killed_during_startup_is_replaced_once(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(KILLED.format(times=1))
    assert scores(["one"], path) == [Score(1.0)]
    (tmp_path / "my_reward.mark").unlink()
    path.write_text(KILLED.format(times=2))
    with pytest.raises(ValueError, match=r"does not start: .*\(SIGKILL\)"):
        scores(["one"], path)


def test_close_fails_unanswered_jobs(custom):
    async def scenario(client):
        tasks = [asyncio.create_task(client.score(GSM8K, "sleep 5")) for _ in range(3)]
        await asyncio.sleep(0.2)
        await client.close()
        return await asyncio.wait_for(asyncio.gather(*tasks), 10)

    assert {score.outcome for score in run(scenario, custom)} == {Outcome.GRADER_FAILED}


def test_graders_die_with_their_parent(custom):
    script = f"""
        import asyncio, os
        from alphaapollo.config.schema import CustomRewardFunction, Reward
        from alphaapollo.rewards.grader_processes.client import RewardClient
        from alphaapollo.types import Prompt

        async def main():
            client = RewardClient(Reward(timeout=60.0), CustomRewardFunction(path={custom!r}, name="f"))
            await client.start()
            prompt = Prompt(0, "", "?")
            print(int((await client.score(prompt, "pid")).reward), flush=True)
            await client.score(prompt, "sleep 60")

        asyncio.run(main())
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    grader = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not is_running(grader))
