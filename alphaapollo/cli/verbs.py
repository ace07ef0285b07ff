"""The verbs of the command `alphaapollo`, in the order in which a user meets them. No heavy import here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """One door. A verb with a `command` takes that command's keys; the others read their own words.

    Example: `Verb("sft", "supervised fine-tuning", "alphaapollo.trainer.main_sft", "main_sft", ("model.path", ...))`.
    """

    name: str
    what: str
    module: str  # whose main(argv) does it
    command: str = ""  # whose schema has the keys (config/keys.py)
    keys: tuple[str, ...] = ()  # the five that matter, for --help
    example: str = ""
    preset: str = ""  # GROUP=PRESET that it takes, unless another of the group is named

    def words(self, given: Sequence[str]) -> list[str]:
        """What its main gets."""
        group = self.preset.partition("=")[0]
        own = any(word.partition("=")[0] == group for word in given)
        return [*([self.preset] if self.preset and not own else []), *given]


VERBS = {
    verb.name: verb
    for verb in (
        Verb(
            "quickstart",
            "train a small model with RL until it visibly learns: minutes, no GPU",
            "alphaapollo.cli.quickstart",
        ),
        Verb("doctor", "can this machine train? what is missing, and what to do", "alphaapollo.cli.doctor"),
        Verb(
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
        Verb(
            "sft",
            "supervised fine-tuning",
            "alphaapollo.trainer.main_sft",
            "main_sft",
            ("model.path", "data.train_files", "optim.lr", "trainer.total_epochs", "trainer.experiment_name"),
            "model.path=Qwen/Qwen3-0.6B data.train_files=chats.parquet",
        ),
        Verb(
            "dpo",
            "train on preferences: DPO and its family",
            "alphaapollo.trainer.main_dpo",
            "main_dpo",
            ("model.path", "data.train_files", "preference.loss", "preference.beta", "optim.lr"),
            "model.path=Qwen/Qwen3-0.6B data.train_files=pairs.parquet preference.loss=sigmoid",
        ),
        Verb(
            "rm",
            "train a reward model on preferences",
            "alphaapollo.trainer.main_rm",
            "main_rm",
            ("model.path", "data.train_files", "data.margin_key", "bradley_terry.centring_coef", "optim.lr"),
            "model.path=Qwen/Qwen3-0.6B data.train_files=pairs.parquet",
        ),
        Verb(
            "distill",
            "learn from a teacher on the model's own samples",
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
        Verb(
            "generate",
            "sample answers to prompts, and score them: avg@n, pass@k, intervals",
            "alphaapollo.trainer.main_generation",
            "main_generation",
            ("model.path", "data.path", "data.n_samples", "rollout.temperature", "trainer.experiment_name"),
            "model.path=Qwen/Qwen3-0.6B data.path=test.parquet data.n_samples=8",
        ),
        Verb(
            "evolve",
            "better answers without training: solve, verify, remember, again",
            "alphaapollo.evolving.main",
            "evolving",
            ("models", "data.path", "evolving.rounds", "evolving.votes", "budget.tokens"),
            "'models={policy:{path:outputs/model}}' data.path=problems.parquet",
        ),
        Verb(
            "eval",
            "score answers that exist",
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
        Verb("export", "a checkpoint as a Hugging Face folder, proved, with a model card", "alphaapollo.cli.export"),
        Verb("serve", "vLLM's OpenAI server on a run's newest model", "alphaapollo.cli.serve"),
        Verb("chat", "talk to a run's model, with its environment and tools", "alphaapollo.cli.chat"),
        Verb("replay", "compute a recorded iteration again, and compare", "alphaapollo.trainer.replay.__main__"),
        Verb("explain", "what a key does, or what became of one of verl's", "alphaapollo.cli.explain"),
        Verb("completion", "print the completion of words for bash, zsh or fish", "alphaapollo.cli.completion"),
    )
}
