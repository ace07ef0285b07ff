"""Environment classes of other frameworks, as users have them: played in a rollout worker with their own interface."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from alphaapollo.config.schema import Env
from alphaapollo.config.schema.env import ToolLimits
from alphaapollo.environments import base
from alphaapollo.environments.base import get_environment_spec
from alphaapollo.environments.classes import load_environment_module, register_environment_object
from alphaapollo.types import EpisodeEnd, GroupRequest, Message, Outcome, Prompt, Sampling, Trajectory
from alphaapollo.utils.user_module import load_user_module
from tests.unit.rollout.worker_kit import TextEngine, generate, make_worker, write_model

FILE = '''
class Counter:  # TRL's environment_factory
    def __init__(self, start: int = 0):
        self.total, self.closed = start, False

    def reset(self, goal, **columns):
        self.goal, self.columns = goal, columns
        return f" Reach {goal}."

    def add(self, x: int) -> int:
        """Add a number to the total.

        Args:
            x: the number.
        """
        if x > 100:
            raise ValueError("too large")
        self.total += x
        return {"total": self.total}

    def get_reward(self) -> float:
        return float(self.total == self.goal)

    def _helper(self): ...


class Chat:  # SkyRL-Gym
    def __init__(self, env_config, extras):
        self.truth, self.turns = extras["reward_spec"]["ground_truth"], extras["max_turns"]

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        done = self.truth in action
        observations = [] if done else [{"role": "user", "content": "No."}]
        return {"observations": observations, "reward": float(done), "done": done, "metadata": {}}

    def close(self): ...


class Nothing:
    def play(self): ...
'''
PROMPT = Prompt(3, "openai/gsm8k", [Message(role="user", content="Count.")], "7", extra_info={"goal": 7})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a tokenizer and the file of the classes."""
    folder = tmp_path_factory.mktemp("classes")
    (folder / "classes_of_users.py").write_text(FILE)
    return write_model(folder)


@pytest.fixture(autouse=True)
def _forget_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base._ENVIRONMENTS, "_entries", dict(base._ENVIRONMENTS._entries))


def play(folder: Path, name: str, *texts: str, max_tokens: int = 3000, **settings: object) -> Trajectory:
    """The trajectory of an episode in which the model writes these texts."""
    env = Env(env_name=name, custom_module=str(folder / "classes_of_users.py"), **{"max_steps": 5, **settings})
    waiting = list(texts)
    engine = TextEngine(folder, lambda _: waiting.pop(0))
    worker = make_worker(folder, engine, env, max_prompt_length=4000, max_response_length=4000)
    (group,) = generate(worker, GroupRequest(PROMPT, 1, Sampling(max_tokens=max_tokens), 0))
    return group.trajectories[0]


def messages_after(trajectory: Trajectory, turn: int) -> str:
    observation = trajectory.turns[turn].observation
    return observation[0]["content"]


def test_public_methods_are_tools_and_get_reward_scores(folder):
    done = play(folder, "Counter", '<add>{"x": 3}</add>', '<add>{"x": 4}</add>', "<answer>done</answer>")
    first = done.first_observation[-1]["content"]
    assert first.startswith("Count. Reach 7.") and "Add a number to the total." in first and "_helper" not in first
    assert "\"{'total': 3}\"" in messages_after(done, 0), "str(result), as in TRL"
    assert done.score.reward == 1.0 and done.score.components == {"Counter": 1.0, "accuracy": 1.0}
    failed = play(folder, "Counter", '<add>{"x": 101}</add>', "<answer>done</answer>", settings={"start": 7})
    assert "\"{'error': 'too large'}\"" in messages_after(failed, 0) and failed.score.reward == 1.0, "as in TRL"
    assert failed.turns[0].info["tool_calls"][0]["status"] == "error"


def test_get_reward_also_scores_an_episode_at_its_limit(folder):
    cut = play(folder, "Counter", '<add>{"x": 7}</add>', max_steps=1)
    assert cut.end is EpisodeEnd.TURN_LIMIT and cut.score.reward == 1.0
    chosen = play(folder, "Counter", '<add>{"x": 7}</add>', max_steps=1, limit_reward=-1.0)
    assert chosen.score.reward == -1.0


def test_init_and_step_of_conversations(folder):
    done = play(folder, "Chat", "It is 6.", "It is 7.")
    assert messages_after(done, 0) == "No." and (done.score.reward, done.accuracy) == (1.0, 1.0)


def test_reset_and_tools_may_return_parts_of_a_message(folder):
    class Camera:
        def reset(self, prompt):
            return [{"type": "text", "text": f" of {len(prompt)}"}]

        def turn(self, by: int | None = None):
            """Turn around.

            Args:
                by: degrees.
            """
            return [{"type": "image", "image": b"..."}, {"type": "text", "text": "a wall"}]

        def zoom(self):
            """Zoom in."""
            return [1, 2]

        def get_reward(self): ...

    register_environment_object("Camera", graded=True)(Camera)
    done = play(folder, "Camera", "<turn>{}</turn>", "<zoom>{}</zoom>", "<answer>#### 7</answer>")
    assert done.first_observation[-1]["content"].startswith("Count. of 1\n\nDo exactly one thing:")
    assert '"text": "a wall"' in messages_after(done, 0) and '"text": "[1, 2]"' in messages_after(done, 1)
    assert done.score.reward == 1.0, "get_reward returned None: it does not apply"


def test_dict_of_classes_is_refused():
    with pytest.raises(ValueError, match=r"a dict of one, two.*one class"):
        register_environment_object("Both")({"one": object, "two": object})


def test_class_that_fits_nothing_is_refused_with_the_contracts(folder):
    env = Env(env_name="Nothing", custom_module=str(folder / "classes_of_users.py"))
    with pytest.raises(ValueError, match=r"Nothing has the public methods play, which fit none .*TRL's.*Gymnasium's"):
        load_environment_module(env)


def test_reward_function_is_added_to_get_reward(folder):
    class Both:
        def reset(self): ...

        def get_reward(self):
            return 0.5

    register_environment_object("Both", graded=True)(Both)
    assert get_environment_spec("Both").is_graded(Env(env_name="Both"))
    done = play(folder, "Both", "<answer>#### 7</answer>")
    assert done.score.reward == 1.5 and done.score.components == {"accuracy": 1.0, "Both": 0.5}


REWARDED = '''
class Game:
    def reset(self, **columns):
        self.reward = 0.0

    def win(self) -> str:
        """Win."""
        self.reward = 1.0
        return "won"


def reward_func(environments, completions, ground_truth, goal, **kwargs):
    (game,), (answer,), = environments, completions
    return [game.reward if (ground_truth, goal) == (["7"], [7]) else -1.0]


async def politeness(environments, completions, **kwargs):
    return [0.5 if "please" in one[-1]["content"] else None for one in completions]
'''


def play_game(folder: Path, *texts: str, name: str = "rewarded", module: str = REWARDED) -> Trajectory:
    (folder / f"{name}.py").write_text(module)
    waiting = list(texts) * 2
    env = Env(env_name="Game", custom_module=str(folder / f"{name}.py"), max_steps=3)
    worker = make_worker(folder, TextEngine(folder, lambda _: waiting.pop(0)), env, max_prompt_length=4000)
    (group,) = generate(worker, GroupRequest(PROMPT, 1, Sampling(max_tokens=3000), 0))
    return group.trajectories[0]


def test_reward_functions_of_the_file_get_the_objects(folder):
    won = play_game(folder, "<win>{}</win>", "<answer>please</answer>").score
    assert (won.reward, won.components) == (1.5, {"reward_func": 1.0, "politeness": 0.5})
    lost = play_game(folder, "<answer>no</answer>").score  # the second one returns None
    assert (lost.reward, lost.accuracy) == (0.0, 0.0) and "politeness" not in lost.components


def test_reward_functions_that_never_apply_are_a_failure(folder):
    broken = REWARDED.replace("game.reward if", "None if")
    score = play_game(folder, "<answer>no</answer>", name="broken", module=broken).score
    assert score.outcome is Outcome.GRADER_FAILED, "the episode is not played again"
    assert "reward_func, politeness returned None" in score.reason


REUSED = '''
import asyncio

MADE = []


class Connection:
    def __init__(self):
        MADE.append(self)
        self.resets = 0

    def reset(self, **columns):
        self.resets += 1
        if columns["goal"] == "fail":
            raise ValueError("refused")

    async def wait(self, seconds: float):
        """Wait.

        Args:
            seconds: how long.
        """
        await asyncio.sleep(seconds)

    def get_reward(self):
        return float(self.resets)


class Closed(Connection):
    def close(self): ...
'''


def play_in_turn(folder: Path, name: str, first: str, *goals: object) -> tuple[list[Trajectory], list[int]]:
    """Episodes of one worker, one after another, in which the model writes a text and then an answer; and how often
    each object was reset."""
    (folder / "reused.py").write_text(REUSED)
    limits = ToolLimits(timeout=0.3)
    env = Env(env_name=name, custom_module=str(folder / "reused.py"), max_steps=3, tool_limits=limits)
    engine = TextEngine(folder, lambda text: "<answer>done</answer>" if "tool_response" in text else first)
    worker = make_worker(folder, engine, env, max_prompt_length=4000, max_response_length=4000)
    made = load_user_module(str(folder / "reused.py"), "").MADE
    made.clear()

    async def run() -> list[Trajectory]:
        await worker.start()
        prompts = [replace(PROMPT, extra_info={"goal": goal}) for goal in goals]
        groups = [await worker.generate(GroupRequest(one, 1, Sampling(max_tokens=3000), 0)) for one in prompts]
        await worker.close()
        return [trajectory for group in groups for trajectory in group.trajectories]

    return asyncio.run(run()), [one.resets for one in made]


def test_object_without_close_is_reset_and_reused_as_in_trl(folder):
    played, resets = play_in_turn(folder, "Connection", '<wait>{"seconds": 0}</wait>', 1, 2, 3)
    assert resets == [3] and [one.score.reward for one in played] == [1.0, 2.0, 3.0]
    assert play_in_turn(folder, "Connection", "<answer>no</answer>", 1, 2)[1] == [2], "not those of an earlier worker"
    assert play_in_turn(folder, "Closed", "<answer>no</answer>", 1, 2)[1] == [1, 1]


def test_object_whose_call_was_cancelled_or_whose_reset_failed_is_not_reused(folder):
    played, resets = play_in_turn(folder, "Connection", '<wait>{"seconds": 9}</wait>', 1, 2)
    assert resets == [1, 1] and played[0].turns[0].info["tool_calls"][0]["status"] == "timeout"
    played, resets = play_in_turn(folder, "Connection", "<answer>no</answer>", 1, "fail", 3)
    assert resets == [2, 1, 1] and played[1].score.outcome is Outcome.ENVIRONMENT_FAILED
