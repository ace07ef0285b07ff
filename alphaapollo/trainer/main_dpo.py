"""Train on preferences: `python -m alphaapollo.trainer.main_dpo data.train_files=... model.path=...`"""

from alphaapollo.config.schema import DpoConfig
from alphaapollo.launch.command import make_command
from alphaapollo.processes.entry_point import run_program

main = make_command(DpoConfig, "dpo", "alphaapollo.finetuning.run")


if __name__ == "__main__":
    run_program(main)
