"""Keys that the environments of other packages do not use."""

from pathlib import Path

import pytest

from alphaapollo.config.schema import Env, GenerationConfig
from alphaapollo.environments.base import get_environment_spec
from alphaapollo.launch.inputs import collect_environment_notices
from tests.unit.trainer.setup.test_combinations import prepare


def test_keys_that_an_environment_does_not_use_are_noted(tmp_path: Path):
    scored = {"reward.components": {"format": 0.1}, "reward.required": ["format"]}
    scored |= {"custom_reward_function.path": __file__, "env.max_steps": 5, "env.tool_limits.timeout": 5}
    game = {"env.env_name": "openenv", "env.openenv.url": "http://localhost:1", "env.max_steps": 5}
    assert prepare(tmp_path, game).notices == []
    lines = prepare(tmp_path, game | scored).notices
    assert all("has no effect: env.env_name is openenv" in line for line in lines)
    assert [line.split(" ")[0] for line in lines] == [
        f"custom_reward_function.path={__file__}",
        "reward.components={format:0.1}",
        "reward.required=[format]",
        "env.tool_limits.timeout=5.0",
    ]


@pytest.mark.parametrize(("name", "used"), [("reasoning_gym", True), ("verifiers", False), ("openenv", False)])
def test_reward_keys_that_an_environment_uses(name: str, used: bool):
    given = GenerationConfig(env=Env(env_name=name), reward={"components": {"format": 0.1}})
    lines = collect_environment_notices(given, get_environment_spec(name))
    assert [line.split(" ")[0] for line in lines] == ([] if used else ["reward.components={format:0.1}"])
