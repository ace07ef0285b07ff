"""Check docs/reward_functions.md against the code."""

import asyncio
import re
from pathlib import Path

import pytest

from alphaapollo.config.schema import CustomRewardFunction
from alphaapollo.rewards.base import convert_to_score
from alphaapollo.rewards.custom import OPENRLHF, TRL_NAMES, VERL, VERL_BATCH, load_reward_function
from alphaapollo.types import Episode, EpisodeTurn, Prompt, Score

PAGE = Path(__file__).parents[3] / "docs" / "reward_functions.md"
if not PAGE.exists():
    pytest.skip("an installed package has no docs folder", allow_module_level=True)
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_names_all_arguments():
    for name in (*VERL.names, *VERL_BATCH.names, *OPENRLHF.names, *TRL_NAMES):
        assert f"`{name}`" in TEXT or name == "completions_ids", name


@pytest.mark.parametrize(
    ("number", "custom", "score"),
    [
        (0, {}, Score(1.0, {"accuracy": 1.0})),
        (2, {"name": ["correct", "short"], "weights": [1, 0.1]}, Score(1.1, {"correct": 1.0, "short": 1.0})),
    ],
)
def test_the_functions_of_the_page_work(tmp_path, number, custom, score):
    path = tmp_path / "reward.py"
    path.write_text(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[number])
    loaded = load_reward_function(CustomRewardFunction(path=str(path), **custom))
    prompt = Prompt(0, "", [{"role": "user", "content": "?"}], "", {"answer": ""})
    if loaded.is_async:
        result = asyncio.run(await_result(loaded.function, prompt))
    else:
        result = loaded.function(prompt, Episode("", [EpisodeTurn("")]))
    assert convert_to_score(result) == score


async def await_result(function, prompt):
    return await function(prompt, Episode("", [EpisodeTurn("")]))
