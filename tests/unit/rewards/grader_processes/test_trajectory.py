"""Functions that take the whole episode, behind the real processes."""

from collections.abc import Awaitable

import numpy as np
import pytest

from alphaapollo.config.schema import Reward
from alphaapollo.engines.fake import FakeEngine
from alphaapollo.environments.base import Observation, StepResult
from alphaapollo.rewards.base import adapt_to_episode, takes_trajectory
from alphaapollo.rewards.grader_processes.client import RewardClient
from alphaapollo.rollout.context import AppendContext
from alphaapollo.rollout.episode import EpisodeLimits, EpisodeRunner, run_group
from alphaapollo.types import Episode, EpisodeTurn, GroupRequest, Outcome, Prompt, Sampling, Score, TrajectoryGroup
from tests.builders import make_turn
from tests.unit.rewards.grading import with_client

PROMPT = Prompt(0, "exact", "1", ground_truth="6")
TOOL = [{"role": "tool", "content": "8"}]

SOURCE = """
from alphaapollo.rewards.components import reward_component

def f(prompt, trajectory):
    first, last = trajectory.turns[0], trajectory.turns[-1]
    return {
        "reward": len(trajectory.turns),
        "accuracy": trajectory.text == prompt.ground_truth,
        "calls": len(first.info.get("tool_calls", [])),
        "told": float(first.observation[0]["content"]) if first.observation else -1.0,
        "step": first.reward,
        "last": float(last.text),
        "open": last.observation is None and last.info == {},
    }

def text_only(prompt, completion):
    return float(completion == prompt.ground_truth)

@reward_component
def turns(prompt, trajectory):
    return len(trajectory.turns)
"""


class Game:
    """Tells 8 after the first action, and has the second one graded."""

    def __init__(self, score):
        self.score, self.turn = score, 0

    async def reset(self, prompt):
        return "1"

    async def step(self, action):
        self.turn += 1
        if self.turn == 1:
            calls = [{"name": "double", "status": "ok", "seconds": np.float64(0.5)}]
            return StepResult(Observation(TOOL), reward=np.float32(0.25), info={"tool_calls": calls})
        return StepResult(done=True, score=await self.score(PROMPT, action))

    async def close(self): ...


def grade(tmp_path, scenario, name="f", **components):
    path = tmp_path / "reward.py"
    path.write_text(SOURCE)
    return with_client(scenario, Reward(components=components), str(path), name)


def play(client: RewardClient, max_turns: int) -> Awaitable[TrajectoryGroup]:
    """One episode, in which the model says 4 and then, told 8, says 6."""

    def decode(token_ids):
        return " ".join(map(str, token_ids))

    context = AppendContext(lambda content: [1], lambda messages, last_sampled_token=None: [8], lambda content: ())
    limits = EpisodeLimits(max_turns, 30.0)
    engine = FakeEngine(10, script=lambda token_ids, sampling: [6 if 8 in token_ids else 4])
    runner = EpisodeRunner(engine, decode, lambda *_: context, limits, client.score)
    request = GroupRequest(PROMPT, 1, Sampling(8), stream_position=0)
    return run_group(request, runner.run, lambda turns: Game(lambda prompt, text: client.score(prompt, text, turns)))


@pytest.mark.parametrize(
    ("max_turns", "reward", "accuracy", "last", "reason"),
    [(5, 2.0, 1.0, 6.0, ""), (1, 1.0, 0.0, 4.0, "no answer before the turn limit")],
)
def test_trajectory_has_all_turns_up_to_answer_or_limit(tmp_path, max_turns, reward, accuracy, last, reason):
    group = grade(tmp_path, lambda client: play(client, max_turns))
    parts = {"accuracy": accuracy, "calls": 1.0, "told": 8.0, "step": 0.25, "last": last, "open": accuracy}
    assert group.trajectories[0].score == Score(reward, parts, reason=reason)


def test_text_without_turns_is_one_turn(tmp_path):
    score = grade(tmp_path, lambda client: client.score(PROMPT, "6"))
    parts = {"accuracy": 1.0, "calls": 0.0, "told": -1.0, "step": 0.0, "last": 6.0, "open": 1.0}
    assert score == Score(1.0, parts)


def test_component_takes_trajectory_and_function_takes_text(tmp_path):
    turns = [make_turn(1, text="4", observation=TOOL), make_turn(1, text="6")]
    score = grade(tmp_path, lambda client: client.score(PROMPT, "6", turns), name="text_only", turns=0.5)
    assert (score.reward, score.components["task"], score.components["turns"]) == (2.0, 1.0, 2.0)


def test_turns_that_are_not_json_fail_only_if_a_trajectory_is_taken(tmp_path):
    odd = [make_turn(1, text="4", info={"state": {(1, 2): "a tuple as a key"}})]
    failed = grade(tmp_path, lambda client: client.score(PROMPT, "6", odd))
    assert failed.outcome is Outcome.GRADER_FAILED
    assert "JSON: keys must be" in failed.reason
    assert grade(tmp_path, lambda client: client.score(PROMPT, "6", odd), name="text_only") == Score(1.0)


def test_an_episode_has_json_values(tmp_path):
    fields = {"observation": TOOL, "reward": 0.25, "valid": False, "info": {"n": np.int64(3)}}
    turns = [make_turn(1, text="4", **fields), make_turn(1, text="\ud800")]
    wanted = [EpisodeTurn("4", TOOL, 0.25, False, {"n": 3}, [0]), EpisodeTurn("\ud800", token_ids=[0])]

    async def make_episodes(client):
        return client._make_episode(PROMPT, "6", turns), client._make_episode(PROMPT, "6", ())

    assert grade(tmp_path, make_episodes) == (Episode("6", wanted), Episode("6", [EpisodeTurn("6")]))


def test_name_of_the_second_parameter_decides():
    assert takes_trajectory(lambda prompt, trajectory, more=1: 0.0)
    assert not takes_trajectory(lambda prompt, completion, trajectory=None: 0.0)
    assert not takes_trajectory(lambda *arguments: 0.0)
    episode = Episode("6", [EpisodeTurn("4"), EpisodeTurn("6")])
    assert adapt_to_episode(lambda prompt, completion: completion)(PROMPT, episode) == "6"
    assert adapt_to_episode(lambda prompt, trajectory: trajectory)(PROMPT, episode) is episode
