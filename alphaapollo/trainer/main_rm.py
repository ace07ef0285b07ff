"""Train a reward model: `python -m alphaapollo.trainer.main_rm data.train_files=... model.path=...`"""

import sys

from alphaapollo.config.schema import RmConfig
from alphaapollo.launch.command import make_command

main = make_command(RmConfig, "rm", "alphaapollo.finetuning.run")


if __name__ == "__main__":
    sys.exit(main())
