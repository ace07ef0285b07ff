"""The whole configuration of main_sft."""

from __future__ import annotations

from pydantic import PositiveInt

from alphaapollo.config.schema.base import Section
from alphaapollo.config.schema.env import Env
from alphaapollo.config.schema.reward import CustomRewardFunction, Reward
from alphaapollo.config.schema.rollout import ValSampling
from alphaapollo.config.schema.tuning import TuningConfig, TuningData, TuningTrainer


class SftData(TuningData):
    messages_key: str = "messages"
    """Column with the whole chat; the assistant's messages are trained on."""
    prompt_key: str = "prompt"
    """Column with the prompt, where there is no messages column, and in val_prompts."""
    response_key: str = "response"
    """Column with the response, where there is no messages column."""
    val_prompts: str | list[str] = ""
    """Prompts that the model answers at every validation, rewarded as data.val_files of main_ppo are (docs/sft.md): one
    or several parquet or jsonl files; empty = none. val_max_samples and truncation hold for them, too."""
    max_prompt_length: PositiveInt = 512
    """Tokens of a rendered prompt of val_prompts at most."""
    max_response_length: PositiveInt = 512
    """Tokens that follow a prompt of val_prompts at most, over all turns."""


class SftRollout(Section):
    max_num_seqs: PositiveInt = 64
    """Answers that a rank samples at a time: they share the forward passes, and their keys and values take memory."""
    val_kwargs: ValSampling = ValSampling()


class SftTrainer(TuningTrainer):
    experiment_name: str = "sft"
    """Second folder of the run under output_dir."""


class SftConfig(TuningConfig):
    """The whole configuration of main_sft."""

    data: SftData = SftData()
    rollout: SftRollout = SftRollout()
    env: Env = Env()
    reward: Reward = Reward()
    custom_reward_function: CustomRewardFunction = CustomRewardFunction()
    trainer: SftTrainer = SftTrainer()
