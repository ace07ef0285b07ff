"""Supervised fine-tuning: `python -m alphaapollo.trainer.main_sft data.train_files=... model.path=...`"""

from alphaapollo.config.schema import SftConfig
from alphaapollo.launch.command import make_command
from alphaapollo.processes.entry_point import run_program

main = make_command(SftConfig, "sft", "alphaapollo.finetuning.run")


if __name__ == "__main__":
    run_program(main)
