"""A run in an environment of an OpenEnv server."""

from __future__ import annotations

import sys

from tests.loop.stack import StackRunner
from tests.plugins.adapters.test_openenv import FAKE_SERVER
from tests.processes import open_server


def test_an_environment_behind_a_url(stack: StackRunner) -> None:
    (stack.out / "openenv.py").write_text(FAKE_SERVER)
    with open_server(sys.executable, stack.out / "openenv.py") as url:
        words = ("env.env_name=openenv", f"env.openenv.url={url}", "env.openenv.observation_field=text")
        sizes = ("env.max_steps=2", "data.max_response_length=96", "data.val_files=", "trainer.total_training_steps=1")
        played = stack.run(*words, *sizes)
    assert all(record["prompt"][0]["content"].startswith("start ") for record in played.rollouts(1))
