"""The whole configuration of main_generation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import Scalar, Section
from alphaapollo.config.schema.env import Env
from alphaapollo.config.schema.model import Model
from alphaapollo.config.schema.reward import CustomRewardFunction, Reward
from alphaapollo.config.schema.rollout import Rollout
from alphaapollo.config.schema.trainer import WatchedRun


class GenerationData(Section):
    path: str | list[str] = ""
    """The prompts: one or several parquet or jsonl files (required)."""
    prompt_key: str = "prompt"
    """Column with the prompt, as in main_ppo."""
    n_samples: PositiveInt = 1
    """Samples a prompt."""
    max_prompt_length: PositiveInt = 512
    """Tokens of a rendered prompt at most."""
    max_response_length: PositiveInt = 512
    """Tokens that follow the prompt at most, over all turns."""
    truncation: Literal["error", "left", "right", "drop"] = "error"
    """A prompt over max_prompt_length: stop, cut its start, cut its end, or leave the row out (counted)."""
    apply_chat_template_kwargs: dict[str, Scalar] = {}
    """Arguments of the chat template, given at every rendering, e.g. {enable_thinking: false}."""


class GenerationRollout(Rollout):
    temperature: NonNegativeFloat = 1.0
    """Temperature; 0 = greedy."""
    num_engines: PositiveInt | None = None
    """Engine replicas; null = all GPUs / tensor_model_parallel_size, data_parallel_size on a CPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Share of a GPU's memory that the engine may take: no trainer needs any."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the engine; auto = model.dtype."""


class GenerationTrainer(WatchedRun):
    experiment_name: str = "generation"
    """Second folder of the run under output_dir."""
    resume_mode: Literal["auto", "disable"] = "auto"
    """auto = prompts with all samples in the run's results.jsonl are not repeated; disable = start anew."""
    n_gpus_per_node: PositiveInt = 1
    """GPUs a node that engines take."""
    nnodes: PositiveInt = 1
    """Nodes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to generate; auto = cuda if there is a GPU."""
    seed: int = 0
    """Seed of the samples: each is a function of it, the prompt's row, and the sample's number."""
    controller: Literal["ray", "local"] = "ray"
    """ray = worker processes; local = one engine, and everything else in this process."""
    start_timeout: PositiveFloat = 600.0
    """Seconds that nodes of a cluster may take to come, and then the engines to start."""
    dry_run: bool = False
    """Compose, check, print the plan, and stop."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes that engines take."""
        return self.n_gpus_per_node * self.nnodes


class GenerationConfig(Section):
    """The whole configuration of main_generation."""

    data: GenerationData = GenerationData()
    model: Model = Model()
    rollout: GenerationRollout = GenerationRollout()
    env: Env = Env()
    reward: Reward = Reward()
    custom_reward_function: CustomRewardFunction = CustomRewardFunction()
    trainer: GenerationTrainer = GenerationTrainer()
