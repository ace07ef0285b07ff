"""A MCP server that dies in an episode."""

import sys
from pathlib import Path

import pytest

from alphaapollo.config.schema import Env
from tests.unit.rollout.test_bad_input import check_masked, play
from tests.unit.rollout.worker_kit import write_model

pytest.importorskip("mcp")


def test_a_server_that_dies_is_an_environment_failure(tmp_path: Path) -> None:
    program = Path(__file__).with_name("mcp_server.py")
    servers = {"small": {"command": [sys.executable, str(program)]}}
    maths = {"enable_python_code": False}
    env = Env(env_name="informal_math", max_steps=2, informal_math=maths, mcp_servers=servers)
    played = play(write_model(tmp_path / "model"), lambda: "<die>{}</die>", env)
    check_masked(played, "environment_failed", "MCP server small: Connection closed")
    assert played.metrics["tool/failed"] == 1.0
