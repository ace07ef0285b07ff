from collections.abc import Sequence

from alphaapollo.trainer.main_ppo import main as train


def main(argv: Sequence[str]) -> int:
    """Train in the maze with the engine that only walks. Returns the exit code."""
    return train(["env.env_name=maze", "env.max_steps=2", "actor_rollout_ref.rollout.name=walk", *argv])
