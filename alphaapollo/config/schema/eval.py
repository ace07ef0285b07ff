"""The whole configuration of main_eval."""

from __future__ import annotations

from alphaapollo.config.schema.base import Section
from alphaapollo.config.schema.reward import CustomRewardFunction, Reward
from alphaapollo.config.schema.trainer import RunFolder


class EvalData(Section):
    path: str | list[str] = ""
    """What to score: one or several parquet or jsonl files with prompts and responses (required)."""
    prompt_key: str = "prompt"
    """Column with the prompt, as in main_ppo."""
    response_key: str = ""
    """Column with a response, or with a list of them; empty = `responses`, else `response`."""


class EvalTrainer(RunFolder):
    experiment_name: str = "eval"
    """Second folder of the run under output_dir."""


class EvalConfig(Section):
    """The whole configuration of main_eval."""

    data: EvalData = EvalData()
    reward: Reward = Reward()
    custom_reward_function: CustomRewardFunction = CustomRewardFunction()
    trainer: EvalTrainer = EvalTrainer()
