"""Games on the rollout worker, with a real tokenizer and a scripted engine that reads the observations."""

import re

import pytest

from alphaapollo.config.schema import Env
from alphaapollo.data.rendering import Renderer, load_tokenizer
from alphaapollo.engines.fake import FakeEngine
from alphaapollo.types import EpisodeEnd, GroupRequest, Message, Prompt, Sampling, TrajectoryGroup
from alphaapollo.utils.user_module import load_user_module
from tests.unit.environments.episode_helpers import EXAMPLES, game
from tests.unit.rollout.worker_kit import generate, make_worker, write_model

CHATTER = " or <answer>0</answer> then?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def guess(shown: str) -> str:
    low, high = 1, 100
    for number, answer in re.findall(r"(\d+)\D+?(higher|lower)", shown):
        low, high = (int(number) + 1, high) if answer == "higher" else (low, int(number) - 1)
    return str((low + high) // 2)


def walk(shown: str) -> str:
    """First move of a shortest path through the last grid in the text."""
    rows = re.findall(r"(?m)^[.#AG]{5}$", shown)[-5:]
    cells = {(row, column): rows[row][column] for row in range(5) for column in range(5)}
    here, goal = (next(cell for cell, mark in cells.items() if mark == sought) for sought in "AG")
    environment = load_user_module(str(EXAMPLES / "grid_world" / "environment.py"), "env.custom_module")
    return environment.find_shortest_paths({cell for cell, mark in cells.items() if mark != "#"}, here)[goal][0]


def play(folder, env: Env, player) -> list[TrajectoryGroup]:
    renderer = Renderer(load_tokenizer(str(folder)))

    def script(token_ids: list[int], sampling: Sampling) -> list[int]:
        text = f"<answer>{player(renderer.decode(token_ids))}</answer>{CHATTER}"
        return [*renderer.encode([text])[0], *sampling.stop_token_ids]

    engine = FakeEngine(272, script=script)
    prompts = [Prompt(id, "text", [Message(role="user", content="...")]) for id in range(8)]
    requests = [GroupRequest(prompt, 2, Sampling(1600), stream_position=0) for prompt in prompts]
    return generate(make_worker(folder, engine, env, max_prompt_length=400, max_response_length=1600), *requests)


@pytest.mark.parametrize("context", ["append", "memory"])
@pytest.mark.parametrize(("name", "player"), [("guessing_game", guess), ("grid_world", walk)])
def test_player_that_reads_observations_wins(folder, name, player, context):
    env = game(name, 10, context=context, history_length=9)
    for group in play(folder, env, player):
        one, other = group.trajectories
        assert [turn.text for turn in one.turns] == [turn.text for turn in other.turns]  # same instance, same player
        for trajectory in group.trajectories:
            assert trajectory.end is EpisodeEnd.DONE and trajectory.score.reward == 1.0
            assert len(trajectory.rows) == (1 if context == "append" else len(trajectory.turns))
            for turn in trajectory.turns:
                assert turn.valid and turn.text.endswith("</answer>") and CHATTER not in turn.text


def test_player_that_ignores_observations_loses(folder):
    env = game("guessing_game", 5)
    groups = play(folder, env, lambda shown: "101")
    assert {trajectory.score.reward for group in groups for trajectory in group.trajectories} == {0.0}
    assert all(len(trajectory.turns) == 5 for group in groups for trajectory in group.trajectories)
