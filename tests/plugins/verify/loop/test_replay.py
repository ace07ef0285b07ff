"""Replay of recorded iterations without engines: bitwise, in float64, and with a changed setting."""

from __future__ import annotations

import re

import pytest

from tests.loop.replays import check_verified, equal_lines, recording, replay
from tests.loop.stack import StackRunner
from tests.loop.test_environments import GAME

FAKE = ("actor_rollout_ref.rollout.name=fake", "trainer.test_freq=-1")
ENDS = ("trainer.export_hf=False", "trainer.save_freq=-1", "trainer.val_before_train=False")


@pytest.mark.nightly
def test_replay_with_turns_critic_and_kl_in_reward(stack: StackRunner) -> None:
    """The first iteration, with new optimizer state, and the second."""
    settings = ("algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True", "env.context=memory")
    done = stack.run(*FAKE, *ENDS, *GAME, *settings, "trainer.record_steps=[1,2]")
    assert f"python -m alphaapollo.trainer.replay {recording(done, 2)}" in done.output
    assert done.metrics[1]["timing/record"] > 0
    for step in (1, 2):
        again = replay(stack, recording(done, step))
        assert equal_lines(again) > 60
        for name in ("values", "advantages", "critic/grad_norm", "actor/grad_norm", "critic weights", "policy exp_avg"):
            assert f"\n{name} " in again.output
        check_verified(done, step)
    double = replay(stack, recording(done, 2), "--float64")
    found = re.search(r"\nin float64: the largest difference is (\S+), in ", double.output)
    assert double.code == 0 and found and 1e-9 < float(found[1]) < 1e-4, double.output
    other = replay(stack, recording(done, 2), "actor_rollout_ref.actor.optim.lr=1e-4")
    assert other.code == 0 and "actor_rollout_ref.actor.optim.lr=1e-4: " in other.output, other.output
    refused = replay(stack, recording(done, 2), "data.train_batch_size=8")
    assert refused.code == 2 and "data.train_batch_size " in refused.output


def test_replay_of_async_run_with_reference_reset(stack: StackRunner) -> None:
    settings = (
        *("trainer.async_mode=carry", "trainer.max_staleness=1", "algorithm.rollout_correction.method=tis"),
        *("actor_rollout_ref.actor.use_kl_loss=True", "algorithm.reference_reset.every=1"),
    )
    done = stack.run(*FAKE, *ENDS, *settings, "trainer.total_training_steps=3", "trainer.record_steps=[3]")
    again = replay(stack, recording(done, 3))
    check_verified(done, 3)
    assert equal_lines(again) > 40 and "\nref_logprobs " in again.output and "\nactor/ref_kl " in again.output
