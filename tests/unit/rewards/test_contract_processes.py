"""Reward functions of other frameworks in grader processes: async calls, faults, reward servers."""

import asyncio

import pytest

from alphaapollo.config.schema import Reward
from alphaapollo.processes.host import ProcessHost
from alphaapollo.rewards.completion_group import CompletionGroup
from alphaapollo.types import Outcome, Score
from tests.builders import make_completion, make_turn
from tests.mock_reward_server import open_reward_server
from tests.unit.rewards.grading import open_graders
from tests.unit.rewards.test_contracts import PROMPT


@pytest.fixture
def grade(tmp_path):
    """Function that grades texts at the same time in a new grader process."""

    def grade(source, texts, timeout=30.0, name="compute_score", **turns):
        (tmp_path / "reward.py").write_text(source)
        with open_graders(Reward(timeout=timeout), tmp_path / "reward.py", name) as graders:
            return graders.score(PROMPT, texts, **turns)

    return grade


MEETING = '''
import asyncio
waiting, enough = [], asyncio.Event()
async def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Return once 20 calls run at the same time."""
    waiting.append(solution_str)
    if len(waiting) == 20:
        enough.set()
    await enough.wait()
    return float(solution_str)
'''
STEPS = """
def compute_score(completion_ids, trainer_state, **kwargs):
    return [100 * trainer_state.global_step + sum(completion_ids[0])]
"""


RANKED = """
def compute_score(completions, **kwargs):
    texts = [one[0]["content"] for one in completions]
    if "raise" in texts:
        1 / 0
    if "hang" in texts:
        time.sleep(100)
    return [float("nan") if text == "nan" else float(sum(len(text) > len(other) for other in texts)) for text in texts]
"""
GROUPS = [
    (["a", "bbb", "cc"], [0.0, 2.0, 1.0]),
    (["a", "bbbb", "nan"], [0.0, 2.0, None]),
    (["raise", "bbb", "cc"], [None, 1.0, 0.0]),
    (["hang", "bbb", "cc"], [None, 1.0, 0.0]),
    (["raise"], [None]),
]


def test_calls_of_an_async_function_overlap(grade):
    assert [score.reward for score in grade(MEETING, map(str, range(20)))] == [*range(20)]


def test_tokens_and_steps_arrive_in_the_grader_process(grade):
    turn = make_turn(make_completion([3, 4], version=2))
    assert grade(STEPS, ["x"], turns=[turn])[0].reward == 207.0


FAULTS = """
import asyncio, os, time
async def compute_score(prompt, completion):
    if completion == "hang":
        await asyncio.Event().wait()
    if completion == "block":
        time.sleep(1000)
    if completion == "die":
        os._exit(3)
    if completion == "raise":
        raise KeyError("k")
    return float(completion)
"""


def test_faults_of_an_async_function_concern_one_completion(tmp_path):
    """A process that is blocked or dies is replaced."""
    (tmp_path / "reward.py").write_text(FAULTS)
    with open_graders(Reward(timeout=0.5), tmp_path / "reward.py", "compute_score") as graders:
        hung, raised, right = graders.score(PROMPT, ["hang", "raise", "1"])
        (blocked,), (after_block,), (died,), (after_end,) = (
            graders.score(PROMPT, [text]) for text in ("block", "1", "die", "1")
        )
    assert right == after_block == after_end == Score(1.0)
    faults = ((hung, "within 0.5 s"), (raised, "KeyError: 'k'"), (blocked, "within 0.5 s"), (died, "exit code 3"))
    for failed, what in faults:
        assert failed.outcome is Outcome.GRADER_FAILED and what in failed.reason


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("texts", "rewards"), GROUPS)
def test_the_completions_of_a_group_are_graded_in_one_call(tmp_path, monkeypatch, texts, rewards, is_async):
    """An episode that ends without a score is left out, and one whose completion fails alone. The timeout of the call
    is that of all completions together."""
    timeouts, request = [], ProcessHost.request

    def record_request(host, payload, timeout, *grace):
        timeouts.append(timeout)
        return request(host, payload, timeout, *grace)

    monkeypatch.setattr(ProcessHost, "request", record_request)
    source = RANKED.replace("time.", "await asyncio.").replace("def", "async def") if is_async else RANKED
    (tmp_path / "reward.py").write_text("import asyncio, time" + source)

    async def grade_together(client):
        group = CompletionGroup(len(texts) + 1)

        async def end_without_score():
            await asyncio.sleep(0.05)
            raise RuntimeError("the environment failed")

        calls = [*(group.run(client.score, PROMPT, text) for text in texts), group.run(end_without_score)]
        return (await asyncio.gather(*calls, return_exceptions=True))[:-1]

    with open_graders(Reward(timeout=1.0), tmp_path / "reward.py", "compute_score") as graders:
        scores = graders.run(grade_together)
        assert [None if one.outcome.failed else one.reward for one in scores] == rewards
        assert timeouts[0] == len(texts) * 1.0
        faults = {"raise": "ZeroDivisionError", "hang": "within 1 s", "nan": "nan"}
        for text, score in zip(texts, scores, strict=True):
            assert faults.get(text, "") in score.reason


def test_a_reward_server():
    def answer(query, prompts, labels):
        return {"rewards": [0.5], "scores": [1.0], "extra_logs": {"a": [2.0]}}

    with open_reward_server(answer) as server:
        with open_graders(Reward(timeout=30), server.url) as graders:
            assert graders.score(PROMPT, ["4"]) == [Score(0.5, {"accuracy": 1.0, "a": 2.0})]
        assert server.requests == [{"query": ["?4"], "prompts": ["?"], "labels": ["4"]}]


def test_a_metric_that_the_algorithm_needs_must_be_finite(tmp_path):
    source = "def compute_score(prompt, completion):\n    return {'reward': 1.0, 'format': float('nan')}"
    (tmp_path / "reward.py").write_text(source)
    with open_graders(path=tmp_path / "reward.py", name="compute_score") as graders:
        (incomplete,) = graders.score(PROMPT, ["4"])
        graders.client.fails_incomplete = True
        (failed,) = graders.score(PROMPT, ["4"])
    assert incomplete.skipped_components == ("format",)
    assert failed.outcome is Outcome.GRADER_FAILED and "format" in failed.reason
