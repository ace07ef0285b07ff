"""Supervised fine-tuning: `python -m alphaapollo.trainer.main_sft data.train_files=... model.path=...`"""

import sys

from alphaapollo.config.schema import SftConfig
from alphaapollo.launch.command import make_command

main = make_command(SftConfig, "sft", "alphaapollo.finetuning.run")


if __name__ == "__main__":
    sys.exit(main())
