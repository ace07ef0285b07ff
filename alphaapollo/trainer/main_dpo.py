"""Train on preferences: `python -m alphaapollo.trainer.main_dpo data.train_files=... model.path=...`"""

import sys

from alphaapollo.config.schema import DpoConfig
from alphaapollo.launch.command import make_command

main = make_command(DpoConfig, "dpo", "alphaapollo.finetuning.run")


if __name__ == "__main__":
    sys.exit(main())
