"""main_ppo with truncated sampling: the engine returns the tokens that its sampler kept, and the first ratio is 1."""

from __future__ import annotations

import pytest

from tests.loop.conftest import Runner
from tests.loop.replays import check_verified


@pytest.mark.parametrize(("engine", "settings"), [("vllm", "top_p=0.8 top_k=50 min_p=0.02"), ("hf", "top_p=0.8")])
def test_log_probs_are_those_of_the_truncated_distribution(ppo: Runner, engine: str, settings: str) -> None:
    """In iteration 2 the engine has synced weights. Greedy validation by the same engine has no kept tokens."""
    keys = [f"actor_rollout_ref.rollout.{setting}" for setting in (f"name={engine} {settings} temperature=0.7").split()]
    done = ppo.run(
        *keys,
        "actor_rollout_ref.rollout.val_kwargs.temperature=0",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "trainer.test_freq=1",
        "trainer.controller=local",
        "trainer.record_steps=[2]",
    )
    for line in done.metrics[1:]:
        assert line["mismatch/abs"] < 1e-5 and line["actor/grad_norm"] > 0
    check_verified(done, 2)
