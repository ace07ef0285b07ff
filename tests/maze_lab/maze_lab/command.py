from collections.abc import Sequence

from alphaapollo.cli.subcommand import Subcommand

COMMAND = Subcommand(
    "train in the maze with an engine that only walks",
    "maze_lab.command:main",
    command="main_ppo",
    help_keys="actor_rollout_ref.model.path data.train_files trainer.seed",
    example="actor_rollout_ref.model.path=outputs/model data.train_files=mazes.parquet",
)
DRAW = Subcommand("draw a maze", "maze_lab.command:draw", "maze-draw", "maze.size", "maze.size=7")


def main(argv: Sequence[str]) -> int:
    """Train in the maze. Returns the exit code."""
    from alphaapollo.trainer.main_ppo import main as train

    return train(["env.env_name=maze", "env.max_steps=2", "actor_rollout_ref.rollout.name=walk", *argv])


def draw(argv: Sequence[str]) -> int:
    """Draw a maze. Returns the exit code."""
    from alphaapollo.config.load import load_config
    from maze_lab.settings import DrawConfig

    print("." * load_config(DrawConfig, "maze-draw", argv).maze.size)
    return 0
