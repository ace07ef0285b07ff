"""Episodes with a scripted engine: what the engine receives, what is trained, and how episodes end."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest

from alphaapollo.engines.fake import FakeEngine
from alphaapollo.engines.types import EngineError
from alphaapollo.environments.base import Observation, StepResult
from alphaapollo.rewards.completion_group import CompletionGroup
from alphaapollo.runs.rollout_log import make_trajectory_record
from alphaapollo.types import (
    EpisodeEnd,
    Message,
    Outcome,
    Prompt,
    Sampling,
    Score,
    StopReason,
)
from alphaapollo.utils.seeds import derive_seed
from tests.unit.rollout.episode_kit import PROMPT, STOP, Environment, done, play, play_group, show


def test_the_second_turn_appends_the_observation():
    first = [Message(role="user", content="1 2")]
    reply = show("7 8", reward=0.25, valid=False, info={"tool": "x"})
    environment = Environment(reply, done(0.5), first=Observation(first))
    trajectory, asked = play([[5, STOP], [6]], environment)
    # the second request: prompt 2 + action 2 + observation 2 tokens; 20 - 2 - 2 are left for its answer
    assert asked == [
        ([1, 2], Sampling(20, seed=100, stop_token_ids=(STOP,))),
        ([1, 2, 5, STOP, 7, 8], Sampling(16, seed=101, stop_token_ids=(STOP,))),
    ]
    assert environment.actions == ["5", "6"] and environment.closed
    assert (trajectory.end, trajectory.score) == (EpisodeEnd.DONE, Score(0.5))
    assert (trajectory.prompt_id, trajectory.sample, trajectory.num_tokens) == (3, 1, 3)
    assert trajectory.first_observation == first
    one, two = trajectory.turns
    assert (one.context_ids, one.text, one.reward, one.valid) == ([1, 2], "5", 0.25, False)
    assert (one.info, one.observation) == ({"tool": "x"}, [{"role": "user", "content": "7 8"}])
    assert (two.context_ids, two.text, two.observation) == ([7, 8], "6", None)
    (row,) = trajectory.rows
    assert row.token_ids == [1, 2, 5, STOP, 7, 8, 6]
    assert row.action_mask == [0, 0, 1, 1, 0, 0, 1]
    assert row.logprobs == [0.0, 0.0, -1.0, -1.0, 0.0, 0.0, -1.0]
    assert row.turn_ends == [3, 6] and row.response_start == 2


@pytest.mark.parametrize(
    ("answer", "limits", "kept_chars", "sampled", "truncated"),
    [
        ([5, 6, 7, 8], {"max_tokens": 3}, None, [5, 6, 7], True),
        ([5, 6, STOP], {"max_tokens": 3}, None, [5, 6, STOP], False),
        ([5, 6, 7], {"per_turn": 2}, None, [5, 6], True),
        ([5, 6, 7], {"per_turn": 2}, 1, [5], False),
    ],
    ids=["over the limit", "fits", "over the turn's limit", "action before the turn's limit"],
)
def test_truncated_answer_is_scored(answer, limits, kept_chars, sampled, truncated):
    trajectory, _ = play([answer], Environment(replace(done(1.0), kept_chars=kept_chars)), **limits)
    assert trajectory.end is (EpisodeEnd.TOKEN_LIMIT if truncated else EpisodeEnd.DONE)
    assert trajectory.truncated is truncated and trajectory.score == Score(1.0)
    completion = trajectory.turns[0].completion
    assert completion.token_ids == sampled
    assert not truncated or completion.stop_reason is StopReason.LENGTH


LIMITS = [
    ({"turns": 2}, EpisodeEnd.TURN_LIMIT, 2),
    ({"max_tokens": 2}, EpisodeEnd.TOKEN_LIMIT, 1),  # nothing is left
    ({"max_tokens": 3}, EpisodeEnd.TOKEN_LIMIT, 1),  # no room for the observation
    ({"max_tokens": 4}, EpisodeEnd.TOKEN_LIMIT, 1),  # none for an answer after it
]


@pytest.mark.parametrize(("limits", "end", "requests"), LIMITS)
def test_an_episode_without_an_answer_ends_at_a_limit(limits, end, requests):
    """With a grader the empty text is graded, so that the score has all reward components; env.limit_reward replaces
    the grade."""
    graded = []

    async def grade(prompt, text, turns):
        graded.append((prompt, text, [turn.text for turn in turns]))
        return Score(-1.0, {"accuracy": 0.0, "format": -1.0}, Outcome.WRONG_FORMAT, "nothing there")

    def reach(**settings):
        trajectory, asked = play([[5, STOP], [6]], Environment(show("7 8"), show("1")), **limits, **settings)
        assert trajectory.end is end and len(asked) == requests
        assert trajectory.rows[0].token_ids[:4] == [1, 2, 5, STOP]
        return trajectory.score

    reason = f"no answer before the {end.replace('_', ' ')}"
    assert reach() == Score(0.0, reason=reason, is_limit=True) and reach().accuracy == 0.0
    components = {"accuracy": 0.0, "format": -1.0}
    graded_score = Score(-1.0, components, Outcome.WRONG_FORMAT, f"{reason}: nothing there", is_limit=True)
    assert reach(grade=grade) == graded_score
    assert graded == [(PROMPT, "", ["5", "6"][:requests])]
    for score in (reach(limit_reward=-1.0), reach(limit_reward=-1.0, grade=grade)):
        assert (score.reward, score.accuracy, score.component("format")) == (-1.0, 0.0, 0.0)
    assert len(graded) == 1


def test_done_without_a_score_has_only_turn_rewards():
    trajectory, _ = play([[5]], Environment(StepResult(done=True, reward=0.5)))
    assert trajectory.score == Score(0.0, reason="the environment returned no score")
    assert trajectory.turns[0].reward == 0.5 and trajectory.accuracy is None


@pytest.mark.parametrize(("kept_chars", "kept"), [(1, [5]), (3, [5, 6]), (2, [5, 6]), (0, [5]), (99, [5, 6, 7, STOP])])
def test_tokens_after_the_action_are_removed(kept_chars, kept):
    trajectory, asked = play([[5, 6, 7, STOP], [8]], Environment(show("1", kept_chars=kept_chars), done(1.0)))
    turn = trajectory.turns[0]
    assert turn.completion.token_ids == kept and len(turn.completion.logprobs) == len(kept)
    assert turn.text == " ".join(str(token) for token in kept if token != STOP)
    closed = [] if kept[-1] == STOP else [STOP]
    assert asked[1][0] == [1, 2, *kept, *closed, 1]  # the next prompt has the kept tokens
    assert asked[1][1].max_tokens == 20 - len(kept) - len(closed) - 1


def test_a_turn_at_its_own_limit_shows_special_tokens():
    trajectory, asked = play([[4, 4, 4], [5, STOP]], Environment(show("7"), done(1.0)), per_turn=2)
    assert [sampling.max_tokens for _, sampling in asked] == [2, 2]
    assert trajectory.turns[0].completion.stop_reason is StopReason.LENGTH
    assert trajectory.end is EpisodeEnd.DONE and not trajectory.truncated
    assert [(turn.text, turn.raw_text) for turn in trajectory.turns] == [("4 4", "<4><4>"), ("5", "")]
    record = make_trajectory_record(1, PROMPT, trajectory)
    assert record["text"] == "<4><4>\n\n5"
    assert [turn.get("raw_text") for turn in record["turns"]] == ["<4><4>", None]


# failing environments


def test_failing_environment_is_replaced_once_with_the_same_seeds():
    broken = Environment(show("7"), RuntimeError("socket closed"))
    trajectory, asked = play([[5], [6], [5], [6]], broken, Environment(show("7"), done(1.0)))
    assert trajectory.end is EpisodeEnd.DONE and trajectory.score == Score(1.0)
    assert len(trajectory.turns) == 2 and broken.closed
    assert asked[0] == asked[2] and asked[1] == asked[3]  # same contexts, same seeds


@pytest.mark.parametrize(
    ("reply", "facts"),
    [
        (RuntimeError("socket closed"), ["Environment.step", "RuntimeError: socket closed"]),
        (None, ["the result of step", "NoneType"]),
        (StepResult(), ["step returned neither", "done=True"]),
        (StepResult("7"), ["observation must be", "str"]),
        (StepResult(Observation([{"role": "user", "content": None}])), ["message {'role': 'user', 'content': None}"]),
        (StepResult(done=True, score=1.0), ["score must be a Score", "float"]),
        (StepResult(done=True, reward=math.nan), ["reward is nan"]),
        (done(-1e30), ["score.reward is -1e+30", "-1e+09 to 1e+09"]),
        (StepResult(done=True, score=Score(1.0, {"a": None})), ["score.components['a'] is NoneType"]),
        (StepResult(done=True, kept_chars=1.5), ["kept_chars", "float"]),
        (StepResult(done=True, info=None), ["info=None"]),
        (StepResult(done=True, info={"tool_calls": [{"tool": "x"}]}), ["info['tool_calls']", "status"]),
    ],
    ids=str,
)
def test_an_environment_that_fails_twice_is_masked_with_a_reason(reply, facts):
    trajectory, _ = play([[5], [5]], Environment(reply), Environment(reply))
    assert trajectory.end is EpisodeEnd.ENVIRONMENT_FAILED
    assert trajectory.score.outcome is Outcome.ENVIRONMENT_FAILED and math.isnan(trajectory.score.reward)
    assert all(fact in trajectory.score.reason for fact in [*facts, "attempt 2 of 2"]), trajectory.score.reason
    assert trajectory.rows[0].token_ids == [1, 2, 5]  # what was sampled stays for the log


def test_environment_that_cannot_be_made_or_reset():
    for environments in ([], [Environment(first=RuntimeError("no tool"))] * 2):
        trajectory, asked = play([], *environments)  # without an environment, making one raises IndexError
        assert trajectory.end is EpisodeEnd.ENVIRONMENT_FAILED and asked == []
        assert (trajectory.turns, trajectory.rows, trajectory.first_observation) == ([], [], None)
        assert "attempt 2 of 2" in trajectory.score.reason and (environments or "IndexError" in trajectory.score.reason)


class Sync:
    """Environment with sync methods."""

    def __init__(self, error: BaseException):
        self.error = error

    def reset(self, prompt: Prompt) -> str:
        return "1 2"

    def step(self, action: str) -> StepResult:
        raise self.error

    def close(self) -> None:
        pass


@pytest.mark.parametrize("error", [KeyError("x"), StopIteration(), SystemExit(3)])
def test_exception_of_a_sync_environment_is_an_environment_failure(error):
    trajectory, _ = play([[5], [5]], Sync(error), Sync(error))
    assert trajectory.end is EpisodeEnd.ENVIRONMENT_FAILED
    assert trajectory.score.reason.startswith("Sync.step: ")


@pytest.mark.parametrize("missing", ["reset", "step", "close"])
def test_an_environment_without_a_method_does_not_end_the_run(monkeypatch, missing):
    monkeypatch.delattr(Environment, missing)
    trajectory, _ = play([[5], [5]], Environment(done(1.0)), Environment(done(1.0)))
    if missing == "close":
        assert trajectory.score == Score(1.0)
    else:
        assert trajectory.end is EpisodeEnd.ENVIRONMENT_FAILED
        assert f"no attribute '{missing}' (attempt 2 of 2)" in trajectory.score.reason


def test_engine_error_is_not_an_environment_failure():
    class Dead(FakeEngine):
        async def generate(self, token_ids, sampling, request_id, images=()):
            raise EngineError("rollout engine 0: its core process died")

    environment = Environment(done(1.0))
    with pytest.raises(EngineError, match="rollout engine 0"):
        play(Dead(10), environment)
    assert environment.closed


# groups


def test_samples_are_in_order_and_differ():
    group = play_group(FakeEngine(100))
    assert group.prompt.id == 17 and group.baseline is None
    assert [trajectory.sample for trajectory in group.trajectories] == [0, 1, 2, 3]
    assert len({tuple(trajectory.rows[0].token_ids) for trajectory in group.trajectories}) == 4
    assert all(one.score.reward == one.turns[0].completion.token_ids[0] for one in group.trajectories)


def test_seeds_and_the_greedy_baseline():
    """A seed depends on run, purpose, position, prompt, sample and turn. The baseline is an additional episode."""
    asked: list[Sampling] = []

    def script(token_ids: list[int], sampling: Sampling) -> list[int]:
        asked.append(sampling)
        return [1]

    class WithColumns(FakeEngine):
        async def generate(self, token_ids, *others):
            return replace(await super().generate(token_ids, *others), columns={"x": np.ones(len(token_ids))})

    group = play_group(WithColumns(100, script=script), greedy_baseline=True)
    assert [trajectory.sample for trajectory in group.trajectories] == [0, 1, 2, 3]
    assert group.baseline is not None and group.baseline.sample == 4
    rows = [row for trajectory in [*group.trajectories, group.baseline] for row in trajectory.rows]
    assert [(row.temperature, [*row.columns]) for row in rows] == [(1.0, ["x"])] * 4 + [(0.0, [])]
    assert not any(trajectory.turns[0].completion.columns for trajectory in group.trajectories)  # only in the rows
    assert [sampling.temperature for sampling in asked] == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert [sampling.seed for sampling in asked[:4]] == [derive_seed(42, "rollout", 5, 17, i, 0) for i in range(4)]
    validated = play_group(WithColumns(100, script=script), stream_position=0, validate=True)
    assert not any(trajectory.rows[0].columns for trajectory in validated.trajectories)
    assert [sampling.seed for sampling in asked[5:]] == [derive_seed(42, "validate", 0, 17, i, 0) for i in range(4)]


def test_completions_of_a_group_are_graded_together_and_the_greedy_one_alone():
    calls = []

    async def grade_all(texts):
        calls.append(len(texts))
        return [Score(float(len(texts)))] * len(texts)

    class Graded(Environment):
        async def step(self, action):
            group = CompletionGroup.current.get()
            score = await group.grade(action, grade_all) if group else (await grade_all([action]))[0]
            return done(score.reward)

    group = play_group(FakeEngine(100), lambda _: Graded(), greedy_baseline=True)
    assert [one.score.reward for one in group.trajectories] == [4.0] * 4 and sorted(calls) == [1, 4]


def test_engine_error_cancels_the_other_episodes():
    """Two wait for the engine, and one for its environment. All environments are closed."""
    cancelled, closed = [], []

    async def hang(name):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(name)
            raise

    class Failing(FakeEngine):
        async def generate(self, token_ids, sampling, request_id, images=()):
            if request_id == "rollout.5.17.2.0":
                await asyncio.sleep(0.05)
                raise EngineError("dead")
            if request_id == "rollout.5.17.3.0":
                return await super().generate(token_ids, sampling, request_id)
            return await hang("generate")

    class Hanging(Environment):
        async def step(self, action):
            await hang("step")

        async def close(self):
            closed.append(self)

    async def run(group):
        with pytest.raises(EngineError, match="dead"):
            await group
        await asyncio.sleep(0.05)  # the end of the event loop would cancel every task
        return sorted(cancelled), len(closed)

    found = play_group(Failing(10), lambda _: Hanging(), run=lambda group: asyncio.run(run(group)))
    assert found == (["generate", "generate", "step"], 4)
