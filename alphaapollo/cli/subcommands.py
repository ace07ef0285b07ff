"""Subcommands of `alphaapollo`, in the order of --help. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Subcommand:
    """One subcommand. With a `command` it takes that command's keys; otherwise it parses its own arguments.

    Example: `Subcommand("sft", "supervised fine-tuning", "alphaapollo.trainer.main_sft", "main_sft", ("model.path",
    ...))`.
    """

    name: str
    what: str
    module: str  # module with the main(argv) that runs it
    command: str = ""  # command with the schema of its keys (config/keys.py)
    keys: tuple[str, ...] = ()  # most important keys, for --help
    example: str = ""
    preset: str = ""  # GROUP=PRESET applied unless the user names another of the group

    def words(self, given: Sequence[str]) -> list[str]:
        """Arguments of the module's main."""
        group = self.preset.partition("=")[0]
        own = any(word.partition("=")[0] == group for word in given)
        return [*([self.preset] if self.preset and not own else []), *given]


SUBCOMMANDS = {
    subcommand.name: subcommand
    for subcommand in (
        Subcommand(
            "quickstart",
            "train a small model with RL until it visibly learns: minutes, no GPU",
            "alphaapollo.cli.quickstart",
        ),
        Subcommand("doctor", "check this machine: what is missing and how to fix it", "alphaapollo.cli.doctor"),
        Subcommand(
            "rl",
            "train with reinforcement learning",
            "alphaapollo.trainer.main_ppo",
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
            "alphaapollo.trainer.main_sft",
            "main_sft",
            ("model.path", "data.train_files", "optim.lr", "trainer.total_epochs", "trainer.experiment_name"),
            "model.path=Qwen/Qwen3-0.6B data.train_files=chats.parquet",
        ),
        Subcommand(
            "dpo",
            "train on preferences: DPO and related losses",
            "alphaapollo.trainer.main_dpo",
            "main_dpo",
            ("model.path", "data.train_files", "preference.loss", "preference.beta", "optim.lr"),
            "model.path=Qwen/Qwen3-0.6B data.train_files=pairs.parquet preference.loss=sigmoid",
        ),
        Subcommand(
            "rm",
            "train a reward model on preferences",
            "alphaapollo.trainer.main_rm",
            "main_rm",
            ("model.path", "data.train_files", "data.margin_key", "bradley_terry.centring_coef", "optim.lr"),
            "model.path=Qwen/Qwen3-0.6B data.train_files=pairs.parquet",
        ),
        Subcommand(
            "distill",
            "on-policy distillation from a teacher",
            "alphaapollo.trainer.main_ppo",
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
            "alphaapollo.trainer.main_generation",
            "main_generation",
            ("model.path", "data.path", "data.n_samples", "rollout.temperature", "trainer.experiment_name"),
            "model.path=Qwen/Qwen3-0.6B data.path=test.parquet data.n_samples=8",
        ),
        Subcommand(
            "evolve",
            "self-improvement at inference time: solve, verify, remember, repeat",
            "alphaapollo.evolving.main",
            "evolving",
            ("models", "data.path", "evolving.rounds", "evolving.votes", "budget.tokens"),
            "'models={policy:{path:outputs/model}}' data.path=problems.parquet",
        ),
        Subcommand(
            "eval",
            "score existing responses",
            "alphaapollo.trainer.main_eval",
            "main_eval",
            (
                "data.path",
                "data.response_key",
                "custom_reward_function.path",
                "reward.num_workers",
                "trainer.experiment_name",
            ),
            "data.path=outputs.jsonl",
        ),
        Subcommand(
            "export",
            "export a checkpoint as a verified Hugging Face folder with a model card",
            "alphaapollo.cli.export",
        ),
        Subcommand("serve", "vLLM's OpenAI server on a run's newest model", "alphaapollo.cli.serve"),
        Subcommand("chat", "chat with a run's model, with its environment and tools", "alphaapollo.cli.chat"),
        Subcommand("replay", "recompute a recorded iteration and compare", "alphaapollo.trainer.replay.__main__"),
        Subcommand("explain", "explain a key, ours or verl's", "alphaapollo.cli.explain"),
        Subcommand("completion", "print a completion script for bash, zsh or fish", "alphaapollo.cli.completion"),
    )
}
