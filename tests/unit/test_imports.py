"""What processes import before they need it. Each import of torch or vLLM takes seconds of a run's start."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "vllm", "ray", "pandas"}
PARSE = """
from alphaapollo.trainer import main_ppo
from alphaapollo.config.load import load_config_and_user_settings
from alphaapollo.config.schema import Config
load_config_and_user_settings(Config, "ppo", ["algorithm.adv_estimator=grpo", "trainer.seed=3"])
"""


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        pytest.param(PARSE, set(), id="driver, until the configuration is parsed"),
        pytest.param(
            "import alphaapollo.controller.ray_ranks, alphaapollo.rollout.worker, alphaapollo.engines.vllm.engine",
            {"ray"},
            id="rollout worker, until it has started the engine's fork server",
        ),
    ],
)
def test_imports(code: str, allowed: set[str]):
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert not (HEAVY - allowed) & set(done.stdout.split())
