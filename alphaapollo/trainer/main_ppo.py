"""Train with reinforcement learning: `python -m alphaapollo.trainer.main_ppo algorithm.adv_estimator=grpo ...`"""

from alphaapollo.config.schema import Config
from alphaapollo.launch.command import make_command
from alphaapollo.processes.entry_point import run_program

main = make_command(Config, "ppo", "alphaapollo.trainer.lifecycle")


if __name__ == "__main__":
    run_program(main)
