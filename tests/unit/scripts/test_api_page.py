"""The examples of the site's page "Reference" run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from alphaapollo.algorithms.advantages import AdvantageInputs, get_estimator
from alphaapollo.algorithms.policy_losses import PolicyLossInputs, get_policy_loss
from alphaapollo.config.schema import Actor, Algorithm, CustomRewardFunction, Env
from alphaapollo.environments.base import Services, get_environment_spec
from alphaapollo.rewards.custom import load_reward_function
from alphaapollo.tools.base import Session, ToolStatus, make_tools
from alphaapollo.types import Episode, EpisodeTurn, Outcome, Prompt, Score
from alphaapollo.utils.user_module import load_user_module
from scripts.api_page import ROOT, render_page

EXAMPLES = ROOT / "examples" / "reference"
PROMPT = Prompt(0, "mine", "?", ground_truth="14")


def load(name: str, key: str) -> None:
    load_user_module(str(EXAMPLES / f"{name}.py"), key)


def test_rewards() -> None:
    grade = load_reward_function(CustomRewardFunction(path=str(EXAMPLES / "reward.py"))).function
    assert grade(PROMPT, "7 + 7\n14") == Score(1.05, {"accuracy": 1.0, "brevity": 0.05})
    assert grade(PROMPT, " ").outcome is Outcome.WRONG_FORMAT  # type: ignore[union-attr]
    of_episode = load_reward_function(CustomRewardFunction(path=str(EXAMPLES / "trajectory.py"))).function
    episode = Episode("so 14", [EpisodeTurn("?", valid=False), EpisodeTurn("so 14")])
    assert of_episode(PROMPT, episode) == {"accuracy": 1.0, "readable": 0.1}  # type: ignore[arg-type]


def test_environment() -> None:
    load("environment", "env.custom_module")

    async def score(prompt: Prompt, text: str) -> Score:
        raise AssertionError("the environment scores itself")

    game = get_environment_spec("higher_or_lower").factory(Services(score, Env()))
    assert "Guess my number" in game.reset(PROMPT).messages[0]["content"]  # type: ignore[union-attr]
    steps = [game.step(text) for text in ("many", "10", "20", "14")]
    assert [step.valid for step in steps] == [False, True, True, True]  # type: ignore[union-attr]
    assert [step.observation.messages[0]["content"] for step in steps[1:3]] == ["Higher.", "Lower."]  # type: ignore
    assert steps[-1].done and steps[-1].score == Score(1.0, {"accuracy": 1.0})  # type: ignore[union-attr]


def test_tool() -> None:
    load("tool", "env.custom_module")
    (tool,), session = make_tools(["look_up"], {}), Session()
    first, second = (asyncio.run(tool.call({"country": name}, session)) for name in ("Japan", "Atlantis"))
    assert (first.text, first.status, second.status) == ("Tokyo (call 1)", ToolStatus.OK, ToolStatus.ERROR)


def test_estimator_and_loss() -> None:
    load("estimator", "algorithm.custom_module")
    load("policy_loss", "algorithm.custom_module")
    mask, ids = torch.tensor([[1.0, 1], [1, 0], [1, 1]]), torch.tensor([0, 1, 2])
    inputs = AdvantageInputs(0 * mask, mask, torch.tensor([1.0, 0, 3]), torch.tensor([0, 0, 1]), ids)
    advantages = get_estimator("best_of_group")(inputs, Algorithm()).advantages
    assert advantages.tolist() == [[1, 1], [0, 0], [1, 1]]
    logp = torch.zeros_like(mask, requires_grad=True)
    output = get_policy_loss("squared_ratio")(PolicyLossInputs(logp, logp.detach(), advantages, mask), Actor())
    assert output.loss.tolist() == [[-1, -1], [0, 0], [-1, -1]] and output.metrics["ratio_penalty"] == 0


def test_every_example_is_on_the_page() -> None:
    page = render_page()
    names = [path for path in Path(EXAMPLES).glob("*.py") if path.stem != "__init__"]
    assert names and all(path.read_text(encoding="utf-8") in page for path in names)
