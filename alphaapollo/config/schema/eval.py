"""Configuration of main_eval."""

from __future__ import annotations

from typing import Annotated

from alphaapollo.config.schema.base import FilePath, Section
from alphaapollo.config.schema.reward import CustomRewardFunction, ServerReward
from alphaapollo.config.schema.trainer import RunFolder


class EvalData(Section):
    path: Annotated[str | list[str], FilePath("data", required=True)] = ""
    """Prompts and responses to score: files, folders, globs, or ids of the hub (required; docs/data.md)."""
    prompt_key: str = "prompt"
    """Column of the prompt, as in main_ppo."""
    response_key: str = ""
    """Column of a response or a list of responses; empty = `responses`, or `response`."""


class EvalConfig(Section):
    data: EvalData = EvalData()
    reward: ServerReward = ServerReward()
    custom_reward_function: CustomRewardFunction = CustomRewardFunction()
    trainer: RunFolder = RunFolder(experiment_name="eval")
