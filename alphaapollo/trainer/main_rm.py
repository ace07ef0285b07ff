"""Train a reward model: `python -m alphaapollo.trainer.main_rm data.train_files=... model.path=...`"""

from alphaapollo.config.schema import RmConfig
from alphaapollo.launch.command import make_command
from alphaapollo.processes.entry_point import run_program

main = make_command(RmConfig, "rm", "alphaapollo.finetuning.run")


if __name__ == "__main__":
    run_program(main)
