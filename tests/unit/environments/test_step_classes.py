"""Classes of Gymnasium: actions are read by their space, observations are complete, and the start plays an episode."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from alphaapollo.config.schema import Env
from alphaapollo.environments import base
from alphaapollo.environments.base import Services, get_environment_spec
from alphaapollo.environments.classes import load_environment_module, register_environment_object
from alphaapollo.environments.spaces import read_space_action, write_space_action
from alphaapollo.planning.trials import try_environment_resets
from alphaapollo.types import Message, Prompt, Score

PROMPT = Prompt(3, "", [Message(role="user", content="Play.")], "7")


@pytest.fixture(autouse=True)
def _forget_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base._ENVIRONMENTS, "_entries", dict(base._ENVIRONMENTS._entries))


@dataclass
class Discrete:  # the spaces have the names and attributes of Gymnasium's
    n: int

    def contains(self, x: Any) -> bool:
        return isinstance(x, int) and 0 <= x < self.n

    def sample(self) -> np.int64:
        return np.int64(1)


@dataclass
class Box:
    shape: tuple[int, ...]
    dtype: type = np.float32

    def contains(self, x: Any) -> bool:
        return isinstance(x, np.ndarray) and x.shape == self.shape and bool((abs(x) <= 1).all())

    def sample(self) -> np.ndarray:
        return np.full(self.shape, 0.5, self.dtype)


@dataclass
class Parts:
    spaces: Any

    def contains(self, x: Any) -> bool:
        pairs = (
            [(self.spaces[name], x[name]) for name in x] if isinstance(x, dict) else zip(self.spaces, x, strict=True)
        )
        return isinstance(x, dict | tuple) and all(space.contains(one) for space, one in pairs)


class Tuple(Parts): ...


class Dict(Parts): ...


class OneOf(Parts):
    def contains(self, x: Any) -> bool:
        return isinstance(x, tuple) and 0 <= x[0] < len(self.spaces) and self.spaces[x[0]].contains(x[1])


@dataclass
class Sequence:
    feature_space: Any
    stack: bool = False

    def contains(self, x: Any) -> bool:
        return isinstance(x, tuple) and all(map(self.feature_space.contains, x))


BOTH = (Discrete(3), Box((2,)))


@pytest.mark.parametrize(
    ("space", "right", "wrong"),
    [
        (Discrete(3), ["2"], ["3", "true", "1.0", '"1"', "[1]", "9" * 30, "[" * 99999, "up"]),
        (BOTH[1], ["[1, 0.5]"], ["[[1], [2, 3]]", '["a", "b"]', "[5, 5]", "0.5", "[NaN, 0]", "[true, false]", "{}"]),
        (Box((2,), np.int8), ["[1, 0.0]"], ["[0.5, 0]", "[300, 0]", f"[{'9' * 30}, 0]"]),
        (Box(()), ["0.5"], ["[0.5]"]),
        (Tuple(BOTH), ["[1, [0, 1]]"], ["[1]", "1", "[1, [0]]", "[1, [0, 1], 2]", '{"a": 1}']),
        (
            Dict({"a": BOTH[0], "b": Tuple(BOTH)}),
            ['{"b": [1, [0, 1]], "a": 2}'],
            ['{"a": 2}', "[2]", '{"a": 1, "c": 2}'],
        ),
        (Sequence(BOTH[0]), ["[1, 2]", "[]"], ["[3]", "1"]),
        (OneOf(BOTH), ["[1, [0, 1]]"], ["[0, [0, 1]]", "[2, 1]", "[-1, 1]", "[[0], 1]", "1"]),
    ],
)
def test_actions_are_read_by_their_space(space, right, wrong):
    for text in right:
        action = read_space_action(space, text)
        assert space.contains(action) and space.contains(read_space_action(space, write_space_action(space, action)))
    for text in wrong:
        with pytest.raises(ValueError, match="is not an action of"):
            read_space_action(space, text)


@dataclass
class Game:
    """Environment whose episode ends after `length` steps."""

    action_space: Any = field(default_factory=lambda: Discrete(3))
    observation: Any = 0
    info: dict[str, Any] = field(default_factory=dict)
    length: int = 1

    def reset(self, *, seed=None):
        return self.observation, {}

    def step(self, action):
        self.length -= 1
        return self.observation, 1.0, self.length <= 0, False, self.info


def start(game: Any, **settings: Any) -> tuple[Any, str]:
    """The environment of a game, and what the model sees first."""
    register_environment_object("game")(lambda: game)
    env = Env(env_name="game", **settings)
    made = get_environment_spec("game").factory(Services(None, env))
    return made, asyncio.run(made.reset(PROMPT)).messages[-1]["content"]


def test_observations_are_complete_and_may_be_all_that_the_model_sees():
    shown = start(Game(observation={"grid": np.arange(2000)}), prompt="{observation}")[1]
    assert shown.startswith("{'grid': ") and "..." not in shown and "1234" in shown


def test_an_untagged_text_is_the_action_unless_it_is_discrete():
    made, _ = start(Game(action_space=BOTH[1], length=9))
    assert asyncio.run(made.step(" [0.5, 1]\n")).valid and not asyncio.run(made.step("left")).valid


@pytest.mark.parametrize(
    ("info", "accuracy"),
    [({}, None), ({"accuracy": 0.25, "success": 1}, 0.25), ({"success": np.bool_(True), "is_success": 0}, 0.0)],
)
def test_info_gives_the_accuracy_also_at_a_limit(info, accuracy):
    made, _ = start(Game(info=info))
    done = asyncio.run(made.step("1"))
    assert done.score.accuracy == accuracy and done.reward == 1.0
    assert asyncio.run(made.score_at_limit()) == Score(0.0, {} if accuracy is None else {"accuracy": accuracy})
    info.clear()  # the next step does not say
    assert asyncio.run(made.step("1")).score == asyncio.run(made.score_at_limit()) == Score(0.0)


def test_start_plays_an_episode():
    def notices(game: Any, **settings: Any) -> list[str]:
        base._ENVIRONMENTS._entries.pop("game", None)
        register_environment_object("game")(lambda: game)
        return asyncio.run(try_environment_resets(Env(env_name="game", max_steps=2), [PROMPT], **settings))

    assert "success" in notices(Game())[0] and notices(Game(info={"success": 1})) == notices(Game(length=5)) == []
    with pytest.raises(ValueError, match=r"data\.sampler"):
        notices(Game(), needs_accuracy=["data.sampler"])
    with pytest.raises(ValueError, match="vector of 4"):
        notices(type("Vector", (Game,), {"num_envs": 4})())
    unwritable = Sequence(Discrete(3), stack=True)
    unwritable.sample = lambda: (1,)
    with pytest.raises(ValueError, match=r"Sequence.*stack"):
        notices(Game(action_space=unwritable))


def test_ids_of_gymnasium_are_names(tmp_path, monkeypatch):
    made = SimpleNamespace(registry={"user/Game-v0"}, make=lambda name, length=1: Game(length=length))
    monkeypatch.setitem(sys.modules, "gymnasium", made)
    module = tmp_path / "games_of_users.py"
    module.write_text("import gymnasium")
    load_environment_module(Env(env_name="user/Game-v0", custom_module=str(module)))
    assert base.is_environment("user/Game-v0")
    with pytest.raises(ValueError, match=r"env\.env_name=user/Gane-v0: .*games_of_users\.py has no"):
        load_environment_module(Env(env_name="user/Gane-v0", custom_module=str(module)))
