"""Keys that name reward components are checked against the reward function before the start."""

import asyncio
from pathlib import Path

import pytest

from alphaapollo.config.schema import Config
from alphaapollo.planning.memory_fit import replace_values
from alphaapollo.trainer.setup.inputs import check_reward_components_exist
from alphaapollo.types import Outcome, Prompt, Score

METRIC = {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "format"}


@pytest.fixture
def attempt(tmp_path: Path):
    def run(returns: str, keys: dict[str, object]) -> None:
        (tmp_path / "reward.py").write_text(f"def compute_score(prompt, completion):\n    return {returns}\n")
        config = replace_values(Config(), {"custom_reward_function.path": str(tmp_path / "reward.py"), **keys})
        asyncio.run(check_reward_components_exist(config, Prompt(3, "text", "?", ground_truth="4"), []))

    return run


def test_returned_components_are_accepted(attempt):
    attempt("{'reward': 1.0, 'format': 1.0}", METRIC)
    attempt("1.0 if '4' in completion else {'reward': 0.0, 'format': 1.0}", METRIC)  # one of the answers has it
    attempt("0.0", METRIC)  # a 0 without parts has 0 of each
    attempt("1.0", {**METRIC, "algorithm.filter_groups.metric": "accuracy"})
    attempt("1.0", {**METRIC, "algorithm.filter_groups.enable": False})


def test_given_scores_are_used():
    config = replace_values(Config(), {"custom_reward_function.path": "nowhere.py", **METRIC})
    tried = [Score(0.0, outcome=Outcome.GRADER_FAILED), Score(1.0, {"format": 1.0})]
    asyncio.run(check_reward_components_exist(config, Prompt(3, "text", "?"), tried))
    with pytest.raises(ValueError, match="returns one number without components"):
        asyncio.run(check_reward_components_exist(config, Prompt(3, "text", "?"), [Score(1.0)]))


def test_missing_components_are_refused(attempt):
    with pytest.raises(ValueError, match=r"names 'format', .*row 3,.* style"):
        attempt("{'accuracy': 1.0, 'style': 0.5}", METRIC)
    with pytest.raises(ValueError, match=r"returns one number without components"):
        attempt("1.0", METRIC)
    gdpo = {"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_rewards": ["style", "length"]}
    with pytest.raises(ValueError, match=r"algorithm\.gdpo_rewards names 'length'"):
        attempt("{'accuracy': 1.0, 'style': 0.5}", gdpo)
