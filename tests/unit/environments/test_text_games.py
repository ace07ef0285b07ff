import asyncio

import pytest

from alphaapollo.config.schema import Env
from alphaapollo.types import Message, Prompt
from tests.unit.environments.episode_helpers import check_results, game, make, play, random_agent, row


def started(config: Env, id: int):
    environment = make(config)
    asyncio.run(environment.reset(row(id)))
    return environment


def step(environment, text: str):
    return asyncio.run(environment.step(text))


def halving(environment, seen: str) -> str:
    low, high = (int(bound) for bound in environment.state().split("-"))
    return f"<answer>{(low + high) // 2}</answer>"


def shortest(environment, seen: str) -> str:
    return f"<think>I go</think><answer>{environment.shortest_path.pop(0)}</answer>"


CONFIGS = [
    game("guessing_game"),
    game("guessing_game", 4, context="memory", history_length=9, prompt="1-{numbers}?", settings={"numbers": 15}),
    game("grid_world", 12),
    game("grid_world", 9, context="memory", settings={"walls": 0.5, "view": "coordinates"}),
    game("grid_world", 1, settings={"size": 2, "walls": 0.5}),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_good_player_wins_and_a_random_one_has_a_valid_episode(config):
    good = halving if config.env_name == "guessing_game" else shortest
    for seed in range(300):
        results = play(config, random_agent(seed), row(seed))
        check_results(results, config.max_steps)
        assert all(result.reward == 0.0 for result in results)
        results = play(config, good, row(seed))
        check_results(results, config.max_steps)
        assert results[-1].score.reward == 1.0


@pytest.mark.parametrize("name", ["guessing_game", "grid_world"])
def test_instance_depends_on_seed_and_row(name):
    def instance(config: Env, of: Prompt) -> tuple:
        environment = make(config)
        asyncio.run(environment.reset(of))
        return (environment.target,) if name == "guessing_game" else (environment.position, environment.goal)

    config, other = game(name), game(name, seed=1)
    assert instance(config, row(3)) == instance(config, row(3))
    assert len({instance(config, row(id)) for id in range(20)}) > 10
    assert len({instance(config, row(0, seed=seed)) for seed in range(20)}) > 10  # rows of prepare --mode text
    assert [instance(config, row(id)) for id in range(9)] != [instance(other, row(id)) for id in range(9)]


def test_text_after_a_guess_is_cut():
    played = started(game("guessing_game"), 0)
    played.target = 60
    low = step(played, "<answer>50</answer> higher? <answer>75</answer>")
    assert low.observation.messages == [Message(role="user", content="higher")]
    assert (low.valid, low.done, low.kept_chars, low.info) == (True, False, 19, {"state": "1-100"})
    assert step(played, "75").info == {"state": "51-100"} and played.state() == "51-74"
    assert step(played, "<answer>60</answer>").score.reward == 1.0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "invalid action: no action; write <answer>...</answer>"),
        ("high", "invalid action: no numbers; guess one"),
        ("<answer>1 to 9</answer>", "invalid action: 2 numbers; guess one"),
    ],
)
def test_invalid_guess_uses_a_turn_and_is_not_cut(text, problem):
    played = started(game("guessing_game", 2), 0)
    result = step(played, text)
    assert (result.valid, result.done, result.kept_chars) == (False, False, None)
    assert result.observation.messages[0]["content"] == problem
    last = step(played, text)
    assert last.done and last.score.reward == 0.0 and last.observation is None


@pytest.fixture
def corner():
    """A..
    #.G"""
    played = started(game("grid_world", settings={"size": 3, "walls": 0.0}), 0)
    played.free = {(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)}
    played.position, played.goal = (0, 0), (1, 2)
    return played


def test_moves(corner):
    assert corner.view() == "A..\n#.G\n###"
    wall = step(corner, "down")
    assert wall.observation.messages[0]["content"] == "there is a wall\nA..\n#.G\n###"
    assert wall.valid and wall.info == {"state": "0,0"}
    assert step(corner, "Right, then").observation.messages[0]["content"] == ".A.\n#.G\n###"
    assert not step(corner, "<answer>down or right</answer>").valid
    assert step(corner, "<answer>go down</answer>").info == {"state": "0,1"}
    assert step(corner, "right").score.reward == 1.0
