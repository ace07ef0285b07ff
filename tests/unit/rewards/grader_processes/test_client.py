"""Graders that crash, hang, print and lie, behind the real processes."""

import asyncio
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from alphaapollo.config.schema import Reward
from alphaapollo.rewards.grader_processes.client import ORDINARY_ANSWER
from alphaapollo.types import Outcome, Prompt, Score
from tests.processes import is_running, wait_until
from tests.unit.rewards.grading import with_client

GSM8K = Prompt(0, "openai/gsm8k", "?", "4")
MATH = Prompt(0, "math", "?", r"\frac{1}{2}")
TOWER = r"\boxed{9^{9^{9^{9}}}}"

REWARD = """
import ctypes, json, math, os, pathlib, sys, time

def f(prompt, completion):
    print("noise on stdout", flush=True)
    os.write(1, b"more noise")
    if completion.startswith("sleep"):
        time.sleep(float(completion.split()[1]))
        return 1.0
    if completion.startswith("meet"):  # returns when so many processes grade at once
        here = pathlib.Path(__file__).with_suffix(".here")
        here.mkdir(exist_ok=True)
        (here / str(os.getpid())).touch()
        while len(list(here.iterdir())) < int(completion.split()[1]):
            time.sleep(0.01)
        return 1.0
    if completion == "hang once":
        mark = pathlib.Path(__file__).with_suffix(".mark")
        if not mark.exists():
            mark.write_text("")
            time.sleep(600)
        return 1.0
    if completion == "twice":  # fails the first time only
        mark = pathlib.Path(__file__).with_suffix(".mark")
        if not mark.exists():
            mark.write_text("")
            os._exit(1)
        return 1.0
    return {
        "one": lambda: 1.0,
        "parts": lambda: {"accuracy": 1.0, "format": 0.5},
        "pid": lambda: float(os.getpid()),
        "stdin": lambda: float(len(sys.stdin.read())),
        "raise": lambda: {}["missing"],
        "library": lambda: float(json.loads("{")),
        "nan": lambda: math.nan,
        "exit": lambda: sys.exit(3),
        "crash": lambda: ctypes.string_at(0),
        "nameless": lambda: os.kill(os.getpid(), 40),
        "close": lambda: os.closerange(0, 100),
        "memory": lambda: bytes(1 << 60),
        "recursion": lambda: f(prompt, "recursion"),
    }[completion]()
"""


@pytest.fixture
def custom(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(REWARD)
    return str(path)


def run(scenario, path="", timeout=10.0, num_workers=1, components=None, required=()):
    """Run `scenario(client)` with started graders; afterwards none of their processes may be left."""

    reward = Reward(timeout=timeout, num_workers=num_workers, components=components or {}, required=list(required))
    result = with_client(scenario, reward, path)
    assert subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "alphaapollo.rewards"], stdout=-3).returncode == 1
    return result


def scores(texts, path="", prompt=GSM8K, **kwargs):
    async def scenario(client):
        return await asyncio.gather(*(client.score(prompt, text) for text in texts))

    return run(scenario, path, **kwargs)


def test_built_in_graders_by_data_source():
    async def scenario(client):
        pairs = ((GSM8K, "#### 4"), (MATH, r"\boxed{0.5}"), (GSM8K, "?"))
        return [await client.score(prompt, text) for prompt, text in pairs]

    good, maths, unreadable = run(scenario)
    assert good == maths == Score(1.0, {"accuracy": 1.0})
    assert (unreadable.reward, unreadable.outcome) == (0.0, Outcome.WRONG_FORMAT)


def test_custom_function_grades_all_rows_and_may_print(custom):
    one, parts, stdin = scores(["one", "parts", "stdin"], custom)
    assert one == Score(1.0)
    assert parts == Score(1.5, {"accuracy": 1.0, "format": 0.5})
    assert stdin == Score(0.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise", r"KeyError: 'missing' \(.*my_reward.py, line \d+"),
        ("library", r"JSONDecodeError: .* \(.*my_reward.py, line \d+"),
        ("nan", "the reward is nan"),
        ("exit", "(exit code 3)"),
        ("crash", "(SIGSEGV)"),
        ("nameless", "(signal 40)"),  # which Python has no name for
        ("close", "process died"),
        ("memory", "MemoryError"),
        ("recursion", "RecursionError"),
    ],
)
def test_failure_has_a_reason_and_does_not_affect_other_jobs(custom, text, reason):
    first, failed, last = scores(["one", text, "one"], custom)
    assert failed.outcome is Outcome.GRADER_FAILED
    assert math.isnan(failed.reward) and failed.components == {}
    assert re.search(reason, failed.reason) or reason in failed.reason
    assert first == last == Score(1.0)


def test_pool_closed_right_after_its_start_leaves_no_process():
    run(lambda client: asyncio.sleep(0))


def test_components_are_added_to_the_built_in_reward():
    text = "<think>2+2</think> \\boxed{4}"
    weights = {"task": 0.9, "format": 0.1, "language": 0.1}
    good, bare, unreadable = scores([text, "4", "?"], components=weights)
    # no words at all: no language
    assert good == Score(1.0, {"accuracy": 1.0, "task": 1.0, "format": 1.0, "language": 0.0})
    assert bare == Score(0.9, {"accuracy": 1.0, "task": 1.0, "format": 0.0, "language": 0.0})
    assert (unreadable.reward, unreadable.outcome) == (0.0, Outcome.WRONG_FORMAT)
    (ungraded,) = scores(["4"], components=weights, required=["format"])
    assert (ungraded.reward, ungraded.accuracy) == (0.0, 1.0)


def test_components_are_added_to_the_users_reward(custom):
    one, failed, parts = scores(["one", "raise", "parts"], custom, components={"repetition": 0.5})
    assert one == Score(1.5, {"accuracy": 1.0, "task": 1.0, "repetition": 1.0})
    assert failed.outcome is Outcome.GRADER_FAILED and math.isnan(failed.reward)
    assert parts == Score(2.0, {"accuracy": 1.0, "format": 0.5, "task": 1.5, "repetition": 1.0})
    (clash,) = scores(["parts"], custom, components={"format": 0.1})
    assert clash.outcome is Outcome.GRADER_FAILED and "both name format" in clash.reason


@pytest.mark.parametrize(
    ("data_source", "content", "truth", "components", "reason"),
    [
        ("gsm8k", "?", None, {}, "ground truth None"),
        ("poems", "?", None, {}, "data_source 'poems'"),
        ("gsm8k", [{"role": "user"}], "4", {"language": 0.1}, "KeyError: 'content'"),  # raised by the component
    ],
)
def test_errors_of_graders_and_components_are_failures(data_source, content, truth, components, reason):
    text = "Two and two make four, as everybody has known for a while: 4"
    (score,) = scores([text], prompt=Prompt(0, data_source, content, truth), components=components)
    assert score.outcome is Outcome.GRADER_FAILED and reason in score.reason


def test_failure_is_retried_once(custom):
    assert scores(["twice"], custom) == [Score(1.0)]


def test_a_hanging_grader_is_killed_at_the_limit(custom):
    (score,) = scores(["sleep 600"], custom, timeout=0.3)  # longer than the limit of a test
    assert score.outcome is Outcome.GRADER_FAILED and "0.3 s" in score.reason


def test_an_answer_that_hangs_sympy_is_killed():
    tower = Prompt(0, "math", "?", "9^{9^{9^{9}}}")

    async def scenario(client):
        return await asyncio.gather(client.score(tower, r"\boxed{3}"), client.score(MATH, r"\boxed{0.5}"))

    hanging, other = run(scenario, timeout=4.0)
    assert (hanging.outcome, other.reward) == (Outcome.GRADER_FAILED, 1.0)


def test_an_answer_that_hangs_its_grader_scores_zero_at_the_first_attempt():
    requests = []

    async def scenario(client):
        once = client._grade_once

        async def grade_once(request, data_source):
            requests.append(pickle.loads(request)[1].text)
            return await once(request, data_source)

        client._grade_once = grade_once
        return await client.score(MATH, TOWER)

    score = run(scenario, timeout=4.0, components={"format": 0.5})
    assert (score.reward, score.accuracy, score.outcome) == (0.0, 0.0, Outcome.WRONG_FORMAT)
    assert "4 s" in score.reason and score.components["task"] == score.components["format"] == 0.0
    assert requests == [TOWER, ORDINARY_ANSWER, TOWER]  # the last request computes the components only


def test_a_users_function_that_times_out_is_not_called_again(custom):
    assert scores(["hang once"], custom, timeout=0.5)[0].outcome is Outcome.GRADER_FAILED


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


def test_slow_graders_run_side_by_side(custom):
    assert scores(["meet 3"] * 3, custom, timeout=60.0) == [Score(1.0)] * 3


def test_slow_process_is_reused(custom):
    async def scenario(client):
        before = await client.score(GSM8K, "pid")
        await client.score(GSM8K, "sleep 0.8")
        return before, await client.score(GSM8K, "pid")

    before, after = run(scenario, custom)
    assert before == after


def test_a_cancelled_score_leaves_the_graders_usable(custom):
    async def scenario(client):
        task = asyncio.create_task(client.score(GSM8K, "sleep 0.2"))
        await asyncio.sleep(0.05)
        task.cancel()
        return await client.score(GSM8K, "one")

    assert run(scenario, custom) == Score(1.0)


def test_a_process_killed_from_outside_is_replaced(custom):
    async def scenario(client):
        os.kill(int((await client.score(GSM8K, "pid")).reward), signal.SIGKILL)
        return await client.score(GSM8K, "one")

    assert run(scenario, custom) == Score(1.0)


def test_blocked_event_loop_does_not_kill_processes(custom):
    async def scenario(client):
        task = asyncio.create_task(client.score(GSM8K, "sleep 0.1"))
        await asyncio.sleep(0.05)
        time.sleep(4.0)
        return await task

    assert run(scenario, custom, timeout=3.0) == Score(1.0)


def test_many_concurrent_scores():
    async def scenario(client):
        return await asyncio.gather(*(client.score(GSM8K, f"#### {number % 8}") for number in range(4096)))

    rewards = [score.reward for score in run(scenario)]
    assert rewards == [float(number % 8 == 4) for number in range(4096)]


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
    assert scores(["one"], str(path)) == [Score(1.0)]
    (tmp_path / "my_reward.mark").unlink()
    path.write_text(KILLED.format(times=2))
    with pytest.raises(ValueError, match=r"does not start: .*\(SIGKILL\)"):
        scores(["one"], str(path))


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
