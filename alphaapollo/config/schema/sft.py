"""Configuration of main_sft."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PositiveInt

from alphaapollo.config.schema.base import (
    CHANGES_DATA,
    CHANGES_VALIDATION,
    ActiveUnless,
    ActiveWhen,
    FilePath,
    Section,
)
from alphaapollo.config.schema.env import Env
from alphaapollo.config.schema.reward import CustomRewardFunction, Reward
from alphaapollo.config.schema.rollout import NonEmptyText, ValSampling
from alphaapollo.config.schema.tuning import TuningConfig, TuningData, TuningTrainer

WHEN_VAL_PROMPTS = ActiveWhen("/data.val_prompts")


class SftData(TuningData):
    messages_key: Annotated[str, CHANGES_DATA] = "messages"
    """Column of the chat; the assistant's messages are trained on."""
    prompt_key: Annotated[str, CHANGES_DATA] = "prompt"
    """Column of the prompt, in files without a messages column, and in val_prompts."""
    response_key: Annotated[str, CHANGES_DATA] = "response"
    """Column of the response, in files without a messages column."""
    train_turns: Annotated[Literal["all", "last"], CHANGES_DATA] = "all"
    """Assistant messages of a chat that are trained on: all of them, or the last one. In both cases, only those without
    a weight of 0."""
    val_prompts: Annotated[
        str | list[str], ActiveUnless("/trainer.test_freq", -1), CHANGES_VALIDATION, FilePath("data")
    ] = ""
    """Prompts that the model answers at every validation, scored as data.val_files of main_ppo (docs/sft.md): entries
    like those of train_files; empty = none. val_max_samples and truncation apply."""
    max_prompt_length: Annotated[PositiveInt, WHEN_VAL_PROMPTS, CHANGES_VALIDATION] = 512
    """Maximum tokens of a rendered prompt of val_prompts."""
    max_response_length: Annotated[PositiveInt, WHEN_VAL_PROMPTS, CHANGES_VALIDATION] = 512
    """Maximum tokens after a prompt of val_prompts, over all turns."""


class SftRollout(Section):
    max_num_seqs: PositiveInt = 64
    """Answers that a rank samples at a time; their KV caches use memory."""
    val_kwargs: ValSampling = ValSampling()
    stop: str | list[NonEmptyText] = []
    """Strings that end an answer, as actor_rollout_ref.rollout.stop of main_ppo."""
    include_stop_str_in_output: Annotated[bool, ActiveWhen("stop")] = False
    """Graders and environments see the stop string at the end of the answer; false = only the text before it."""


class SftConfig(TuningConfig):
    unread_keys = {"env.rollout.n": "rollout.val_kwargs.n is the number of samples"}
    resume_rules = dict.fromkeys(("rollout", "env", "reward", "custom_reward_function"), CHANGES_VALIDATION)

    data: SftData = SftData()
    rollout: Annotated[SftRollout, WHEN_VAL_PROMPTS] = SftRollout()
    env: Annotated[Env, WHEN_VAL_PROMPTS] = Env()
    reward: Annotated[Reward, WHEN_VAL_PROMPTS] = Reward()
    custom_reward_function: Annotated[CustomRewardFunction, WHEN_VAL_PROMPTS] = CustomRewardFunction()
    trainer: TuningTrainer = TuningTrainer(experiment_name="sft")
