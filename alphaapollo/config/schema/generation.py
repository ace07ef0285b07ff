"""Configurations of main_generation, main_eval and main_export."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import (
    NEEDS_GPU,
    ONLY_AT_START,
    ActiveWhen,
    CountOrMinusOne,
    FilePath,
    FolderName,
    PositiveRatio,
    Requires,
    ResumeRule,
    Section,
)
from alphaapollo.config.schema.data import PromptData
from alphaapollo.config.schema.env import Env
from alphaapollo.config.schema.model import Lora, LoraForm, Model, Rollout
from alphaapollo.config.schema.reward import CustomRewardFunction, Reward, ServerReward
from alphaapollo.config.schema.trainer import RunFolder, RunSettings

_TRAINING_ONLY = (
    *("colocate", "nnodes", "n_gpus_per_node", "free_cache_engine", "lora"),
    *("router_replay", "sampling_mask", "val_kwargs"),
)
UNREAD_ROLLOUT_KEYS = dict.fromkeys([f"rollout.{name}" for name in _TRAINING_ONLY], "it affects only training")
_RECOMPUTATION = ("enable_gradient_checkpointing", "activation_offload")
UNREAD_MODEL_KEYS = ("attention", *_RECOMPUTATION, "router_aux_loss_coef", *Lora.model_fields)
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "stop", "include_stop_str_in_output")
JUDGE_CONNECTION = ("base_url", "api_key_env", "timeout", "max_connections", "cache_size")
ENGINE_KEYS = ("name", "dtype", "engine_kwargs.vllm", "engine_kwargs.sglang", "plugins")
ENGINE_IDENTITY = [*(f"rollout.{name}" for name in ENGINE_KEYS), "trainer.seed"]
NOT_SAMPLE_IDENTITY = ("rollout", "trainer", "env.episode_timeout", "reward.timeout", "reward.num_workers")
APPLIED = ResumeRule("applied")
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


class GenerationTrainer(RunSettings):
    experiment_name: FolderName = "generation"
    """Second folder of the run under output_dir."""
    resume_mode: Annotated[Literal["auto", "disable"], ONLY_AT_START] = "auto"
    """auto = skip prompts whose samples are all in the run's results.jsonl; disable = start from scratch."""
    n_gpus_per_node: Annotated[PositiveInt, NEEDS_GPU] = 1
    """GPUs per node that engines use."""
    nnodes: PositiveInt = 1
    """Number of nodes. On CPUs, each has one engine, unless rollout.num_engines is set."""
    controller: Annotated[Literal["ray", "local"], Requires(ActiveWhen("nnodes", 1), when="local")] = "ray"
    """ray = worker processes on any number of nodes; local = one node without Ray: one engine in this process, or
    several in forked processes."""
    start_timeout: PositiveFloat = 600.0
    """Seconds that nodes may take to join, and that starting engines may spend without using the CPU or the disk."""

    @property
    def num_gpus(self) -> int:
        """Number of GPUs for engines, over all nodes."""
        return self.n_gpus_per_node * self.nnodes


class InferenceConfig(Section):
    """Base class of the configurations of commands that generate and have a run folder."""

    if TYPE_CHECKING:  # subclasses have these fields, in an order of their own
        data: GenerationData = GenerationData()
        trainer: Any = None


class GenerationConfig(InferenceConfig):
    unread_keys = {
        **UNREAD_ROLLOUT_KEYS,
        **{f"model.{name}": "it affects only training" for name in UNREAD_MODEL_KEYS},
        "env.rollout.n": "data.n_samples is the number of samples",
    }
    resume_rules = {  # prompts are compared one by one, so data.path may change
        "": SAMPLE_IDENTITY,
        **dict.fromkeys((*NOT_SAMPLE_IDENTITY, "data.path", "data.max_samples", "data.prompt_key"), APPLIED),
        **dict.fromkeys([f"reward.judge.{name}" for name in JUDGE_CONNECTION], APPLIED),
        **dict.fromkeys([*ENGINE_IDENTITY, *(f"rollout.{name}" for name in SAMPLING_KEYS)], SAMPLE_IDENTITY),
    }

    data: GenerationData = GenerationData()
    model: Model = Model()
    rollout: GenerationRollout = GenerationRollout()
    env: Env = Env()
    reward: Reward = Reward()
    custom_reward_function: CustomRewardFunction = CustomRewardFunction()
    trainer: GenerationTrainer = GenerationTrainer()


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


EXPORT_FORMATS = {"gguf"}  # keys of ExportConfig that are names of the group export_formats


class ExportConfig(Section):
    checkpoint: Annotated[str, FilePath("folder", required=True)] = ""
    """Checkpoint folder, or a run folder for its newest checkpoint or, without checkpoints, its model (required)."""
    output: Annotated[str, FilePath("unchecked")] = ""
    """Folder to write, or a file *.gguf; empty = <run>/exported/<checkpoint>, or a file beside the model's folder."""
    model_path: Annotated[str, FilePath("model")] = ""
    """Model that the run started from, if it has moved; its configuration and tokenizer are used."""
    trust_remote_code: bool | None = None
    """Run Python code that comes with the model; null = no, and an error if the run had model.trust_remote_code."""
    role: Literal["policy", "critic"] = "policy"
    """Model to export. A critic becomes a token classifier with one label."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights; auto = the run's model.dtype or, if that is auto, the type of the model it started from."""
    export_lora: LoraForm = "merged"
    """With LoRA: full weights with the adapters merged in, or the policy's adapters alone (peft's format)."""
    gguf: Literal["", "q8_0", "f16", "bf16", "f32"] = ""
    """Write a GGUF file (llama.cpp, Ollama, LM Studio) with weights of this type; empty = a Hugging Face folder."""
