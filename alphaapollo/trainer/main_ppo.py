"""Train with reinforcement learning: `python -m alphaapollo.trainer.main_ppo algorithm.adv_estimator=grpo ...`"""

import sys

from alphaapollo.config.schema import Config
from alphaapollo.launch.command import make_command

main = make_command(Config, "ppo", "alphaapollo.trainer.lifecycle")


if __name__ == "__main__":
    sys.exit(main())
