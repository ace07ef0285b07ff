"""Sample and score without training: `python -m alphaapollo.trainer.main_generation data.path=... data.n_samples=8`"""

from alphaapollo.config.schema import GenerationConfig
from alphaapollo.launch.command import make_command
from alphaapollo.processes.entry_point import run_program

main = make_command(GenerationConfig, "generation", "alphaapollo.trainer.evaluation.generation")


if __name__ == "__main__":
    run_program(main)
