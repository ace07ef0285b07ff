"""Subcommands of `alphaapollo`, in the order of --help. This module imports no large packages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Subcommand:
    """Subcommand of `alphaapollo`, which accepts either the configuration keys of a `command` or other arguments."""

    name: str
    summary: str
    command: str = ""  # command whose keys it accepts, e.g. main_ppo (config/keys.py)
    help_keys: tuple[str, ...] = ()  # most important keys, for --help
    example: str = ""  # arguments, for --help
    first_argument: str = ""  # e.g. a preset GROUP=NAME, which is omitted if the user sets a preset of the group
    module: str = ""  # module with main(argv); empty = the default of main_module

    @property
    def main_module(self) -> str:
        """Name of the module whose `main(argv)` runs the subcommand."""
        default = f"alphaapollo.trainer.{self.command}" if self.command else f"alphaapollo.cli.{self.name}"
        return self.module or default

    def make_arguments(self, user_arguments: Sequence[str]) -> list[str]:
        """Return the arguments for the module's `main`: first_argument (unless the user sets it), user_arguments."""
        group = self.first_argument.partition("=")[0]
        is_set = any(word.partition("=")[0] == group for word in user_arguments)
        return [*([self.first_argument] if self.first_argument and not is_set else []), *user_arguments]


SUBCOMMANDS = {
    subcommand.name: subcommand
    for subcommand in (
        Subcommand("quickstart", "train a small model with RL until it visibly learns: minutes, no GPU"),
        Subcommand("doctor", "check this machine: what is missing and how to fix it"),
        Subcommand(
            "rl",
            "train with reinforcement learning",
            "main_ppo",
            (
                "actor_rollout_ref.model.path",
                "data.train_files",
                "custom_reward_function.path",
                "env.rollout.n",
                "trainer.experiment_name",
            ),
            "algorithm=grpo actor_rollout_ref.model.path=Qwen/Qwen3-0.6B data.train_files=train.parquet",
        ),
        Subcommand(
            "sft",
            "supervised fine-tuning",
            "main_sft",
            ("model.path", "data.train_files", "optim.lr", "trainer.total_epochs", "trainer.experiment_name"),
            "model.path=Qwen/Qwen3-0.6B data.train_files=chats.parquet",
        ),
        Subcommand(
            "dpo",
            "train on preferences: DPO and related losses",
            "main_dpo",
            ("model.path", "data.train_files", "preference.loss", "preference.beta", "optim.lr"),
            "model.path=Qwen/Qwen3-0.6B data.train_files=pairs.parquet preference.loss=sigmoid",
        ),
        Subcommand(
            "rm",
            "train a reward model on preferences",
            "main_rm",
            ("model.path", "data.train_files", "data.margin_key", "bradley_terry.centring_coef", "optim.lr"),
            "model.path=Qwen/Qwen3-0.6B data.train_files=pairs.parquet",
        ),
        Subcommand(
            "distill",
            "on-policy distillation from a teacher",
            "main_ppo",
            (
                "actor_rollout_ref.model.path",
                "teacher.model.path",
                "teacher.divergence",
                "data.train_files",
                "trainer.experiment_name",
            ),
            "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B teacher.model.path=Qwen/Qwen3-8B data.train_files=a.parquet",
            "algorithm=distill",
        ),
        Subcommand(
            "generate",
            "sample and score answers: avg@n, pass@k, intervals",
            "main_generation",
            ("model.path", "data.path", "data.n_samples", "rollout.temperature", "trainer.experiment_name"),
            "model.path=Qwen/Qwen3-0.6B data.path=test.parquet data.n_samples=8",
        ),
        Subcommand(
            "evolve",
            "self-improvement at inference time: solve, verify, remember, repeat",
            "evolving",
            ("models", "data.path", "evolving.rounds", "evolving.votes", "budget.tokens"),
            "'models={policy:{path:outputs/model}}' data.path=problems.parquet",
            module="alphaapollo.evolving.main",
        ),
        Subcommand(
            "eval",
            "score existing responses; with --suite, run lm-eval or inspect-ai on a run's newest model",
            "main_eval",
            (
                "data.path",
                "data.response_key",
                "custom_reward_function.path",
                "reward.num_workers",
                "trainer.experiment_name",
            ),
            "data.path=outputs.jsonl",
            module="alphaapollo.cli.evaluate",
        ),
        Subcommand("export", "export a checkpoint as a verified Hugging Face folder with a model card"),
        Subcommand("serve", "vLLM's OpenAI server on a run's newest model"),
        Subcommand("view", "show runs in the browser: curves, samples, tokens; live"),
        Subcommand("report", "write a report of runs into one HTML file"),
        Subcommand("samples", "print a run's samples side by side, with their rewards"),
        Subcommand("chat", "chat with a run's model, with its environment and tools"),
        Subcommand(
            "replay", "recompute a recorded iteration and compare", module="alphaapollo.trainer.replay.__main__"
        ),
        Subcommand(
            "explain", "explain a key (also of verl)", first_argument="explain", module="alphaapollo.config.__main__"
        ),
        Subcommand("completion", "print a completion script for bash or zsh"),
    )
}
