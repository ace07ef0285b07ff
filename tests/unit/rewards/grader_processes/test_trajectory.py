"""Functions that take the whole episode, behind the real processes."""

import numpy as np
import pytest

from alphaapollo.config.schema import Reward
from alphaapollo.types import Outcome, Prompt, Score
from tests.builders import make_turn
from tests.unit.rewards.grading import open_graders

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


@pytest.fixture
def grade(tmp_path):
    """Function that scores a text, or the last of the turns, in a new grader process."""
    path = tmp_path / "reward.py"
    path.write_text(SOURCE)

    def grade(episode=(), name="f", **components):
        with open_graders(Reward(components=components), path, name) as graders:
            return graders.score(PROMPT, ["6"], episode)[0]

    return grade


CALLS = {"tool_calls": [{"name": "double", "status": "ok", "seconds": np.float64(0.5)}]}
FIRST = make_turn(1, text="4", observation=TOOL, reward=np.float32(0.25), info=CALLS)
LAST = make_turn(1, text="6")


EPISODES = [
    ([FIRST, LAST], {"calls": 1.0, "told": 8.0, "step": 0.25, "last": 6.0, "open": 1.0}),
    ([FIRST], {"calls": 1.0, "told": 8.0, "step": 0.25, "last": 4.0, "open": 0.0}),  # at the turn limit
    ([], {"calls": 0.0, "told": -1.0, "step": 0.0, "last": 6.0, "open": 1.0}),  # the text is one turn
]


@pytest.mark.parametrize(("turns", "parts"), EPISODES)
def test_trajectory_has_all_turns(grade, turns, parts):
    assert grade(turns) == Score(max(len(turns), 1.0), {"accuracy": 1.0, **parts})


def test_component_takes_trajectory_and_function_takes_text(grade):
    score = grade([FIRST, LAST], "text_only", turns=0.5)
    assert (score.reward, score.components["task"], score.components["turns"]) == (2.0, 1.0, 2.0)


def test_turns_that_are_not_json_fail_only_if_a_trajectory_is_taken(grade):
    odd = [make_turn(1, text="4", info={"state": {(1, 2): "a tuple as a key"}})]
    failed = grade(odd)
    assert failed.outcome is Outcome.GRADER_FAILED and "JSON: keys must be" in failed.reason
    assert grade(odd, "text_only") == Score(1.0)
