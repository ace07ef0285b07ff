"""Configuration of main_generation, main_eval and main_export."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import (
    NEEDS_GPU,
    ONLY_AT_START,
    CountOrMinusOne,
    FilePath,
    FolderName,
    PositiveRatio,
    ResumeRule,
    Section,
)
from alphaapollo.config.schema.data import PromptData
from alphaapollo.config.schema.env import Env
from alphaapollo.config.schema.model import Lora, LoraForm, Model
from alphaapollo.config.schema.reward import CustomRewardFunction, Reward, ServerReward
from alphaapollo.config.schema.rollout import Rollout
from alphaapollo.config.schema.sizes import find_batch_token_errors
from alphaapollo.config.schema.trainer import RunFolder, RunSettings

_TRAINING_ONLY = ("colocate", "nnodes", "n_gpus_per_node", "free_cache_engine", "lora", "router_replay", "val_kwargs")
UNREAD_ROLLOUT_KEYS = dict.fromkeys([f"rollout.{name}" for name in _TRAINING_ONLY], "it affects only training")
UNREAD_MODEL_KEYS = ("attention", "enable_gradient_checkpointing", "router_aux_loss_coef", *Lora.model_fields)
SAMPLING_KEYS = ("name", "temperature", "top_p", "top_k", "dtype", "stop", "include_stop_str_in_output")
SAMPLE_IDENTITY = ResumeRule("refused", "it determines what is sampled")


class GenerationData(PromptData):
    path: Annotated[str | list[str], FilePath("data", required=True)] = ""
    """Prompts: files, folders, globs, or OWNER/NAME[:config][@revision][#split] of the hub (required; docs/data.md)."""
    n_samples: PositiveInt = 1
    """Samples per prompt."""
    max_samples: CountOrMinusOne = -1
    """Maximum number of prompts: the first ones; -1 or 0 = all."""


class GenerationRollout(Rollout):
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 = greedy."""
    gpu_memory_utilization: Annotated[PositiveRatio, NEEDS_GPU] = 0.9
    """Share of a GPU's memory that an engine may use."""

    def find_warnings(self) -> Iterator[str]:
        return iter(())  # truncated sampling biases training only


class GenerationTrainer(RunSettings):
    experiment_name: FolderName = "generation"
    """Second folder of the run under output_dir."""
    resume_mode: Annotated[Literal["auto", "disable"], ONLY_AT_START] = "auto"
    """auto = skip prompts whose samples are all in the run's results.jsonl; disable = start from scratch."""
    n_gpus_per_node: Annotated[PositiveInt, NEEDS_GPU] = 1
    """GPUs per node that engines use."""
    nnodes: Annotated[PositiveInt, NEEDS_GPU] = 1
    """Number of nodes."""
    controller: Literal["ray", "local"] = "ray"
    """ray = worker processes; local = one engine, everything in this process."""
    start_timeout: PositiveFloat = 600.0
    """Seconds that cluster nodes may take to join, and then the engines to start."""

    @property
    def num_gpus(self) -> int:
        """Number of GPUs for engines, over all nodes."""
        return self.n_gpus_per_node * self.nnodes


class GenerationConfig(Section):
    unread_keys = {
        **UNREAD_ROLLOUT_KEYS,
        **{f"model.{name}": "it affects only training" for name in UNREAD_MODEL_KEYS},
        "env.rollout.n": "data.n_samples is the number of samples",
    }
    resume_rules = {  # prompts are compared one by one, so data.path may change
        "": SAMPLE_IDENTITY,
        **dict.fromkeys(
            ("data.path", "data.max_samples", "data.prompt_key", "env.episode_timeout", "rollout", "trainer"),
            ResumeRule("applied"),
        ),
        **dict.fromkeys(("reward.timeout", "reward.num_workers"), ResumeRule("applied")),
        **{
            f"reward.judge.{name}": ResumeRule("applied")
            for name in ("base_url", "api_key_env", "timeout", "max_connections", "cache_size")
        },
        **{f"rollout.{name}": SAMPLE_IDENTITY for name in SAMPLING_KEYS},
        **dict.fromkeys(("rollout.engine_kwargs.vllm", "trainer.seed"), SAMPLE_IDENTITY),
    }

    data: GenerationData = GenerationData()
    model: Model = Model()
    rollout: GenerationRollout = GenerationRollout()
    env: Env = Env()
    reward: Reward = Reward()
    custom_reward_function: CustomRewardFunction = CustomRewardFunction()
    trainer: GenerationTrainer = GenerationTrainer()

    def find_problems(self) -> Iterator[str]:
        yield from find_batch_token_errors("rollout", self.rollout, self.data.max_length)


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


class ExportConfig(Section):
    checkpoint: Annotated[str, FilePath("folder", required=True)] = ""
    """Checkpoint folder, or a run folder for its newest checkpoint (required)."""
    output: str = ""
    """Folder to write; empty = <run>/exported/<checkpoint>."""
    model_path: Annotated[str, FilePath("model")] = ""
    """Model that the run started from, if it has moved; its configuration and tokenizer are used."""
    role: Literal["policy", "critic"] = "policy"
    """Model to export. A critic becomes a token classifier with one label."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights; auto = the run's model.dtype or, if that is auto, the type of the model it started from."""
    export_lora: LoraForm = "merged"
    """With LoRA: full weights with the adapters merged in, or the policy's adapters alone (peft's format)."""
    push_to: str = ""
    """Hub repository OWNER/NAME to upload the folder to, with your own token (hf auth login, or HF_TOKEN); a new
    repository is private. Empty = no upload."""
