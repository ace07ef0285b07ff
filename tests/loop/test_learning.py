"""A short RL run learns: its rewards rise."""

from __future__ import annotations

from tests.loop.conftest import Runner


def test_rewards_rise(ppo: Runner) -> None:
    """An untrained model writes a digit in one of 27 tokens. The reward counts digits."""
    done = ppo.run(
        "trainer.controller=local",
        "actor_rollout_ref.actor.optim.lr=3e-3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "data.train_batch_size=8",
        "env.rollout.n=8",
        "trainer.total_training_steps=8",
        "trainer.val_before_train=False",
    )
    rewards = [line["critic/score/mean"] for line in done.metrics[1:]]
    assert min(rewards[-2:]) > 3 * max(rewards[:2]), rewards
