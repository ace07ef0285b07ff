"""Configurations of main_generation, main_eval, main_export and evolving.main."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import (
    CODE,
    NAMES_CODE,
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

_TRAINING_ONLY = ("colocate", "nnodes", "n_gpus_per_node", "free_cache_engine", "lora", "router_replay", "val_kwargs")
UNREAD_ROLLOUT_KEYS = dict.fromkeys([f"rollout.{name}" for name in _TRAINING_ONLY], "it affects only training")
UNREAD_MODEL_KEYS = ("attention", "enable_gradient_checkpointing", "router_aux_loss_coef", *Lora.model_fields)
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "stop", "include_stop_str_in_output")
JUDGE_CONNECTION = ("base_url", "api_key_env", "timeout", "max_connections", "cache_size")
ENGINE_KEYS = ("name", "dtype", "engine_kwargs.vllm", "engine_kwargs.sglang", "plugins")
ENGINE_IDENTITY = [*(f"rollout.{name}" for name in ENGINE_KEYS), "trainer.seed"]
WITHOUT_IDENTITY = ("rollout", "trainer", "env.episode_timeout", "reward.timeout", "reward.num_workers")
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
    nnodes: Annotated[PositiveInt, NEEDS_GPU] = 1
    """Number of nodes."""
    controller: Annotated[Literal["ray", "local"], Requires(ActiveWhen("nnodes", 1), when="local")] = "ray"
    """ray = worker processes on any number of nodes; local = one node without Ray: one engine in this process, or
    several in forked processes."""
    start_timeout: PositiveFloat = 600.0
    """Seconds that cluster nodes may take to join, and that starting engines may use neither the CPU nor the disk."""

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
        **dict.fromkeys((*WITHOUT_IDENTITY, "data.path", "data.max_samples", "data.prompt_key"), APPLIED),
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


REQUEST_IDENTITY = ResumeRule("refused", "it determines what is requested, and from which model")


class EvolvingData(GenerationData):
    path: Annotated[str | list[str], FilePath("data", required=True)] = ""
    """Problems: files, folders, globs, or ids of the hub (required; docs/data.md). Metrics exclude problems without a
    ground truth."""
    n_samples: PositiveInt = 1
    """Solutions that each branch (evolving.branches) proposes per round."""
    max_prompt_length: PositiveInt = 4096
    """Maximum prompt tokens of one call to an engine of this run: question, past solutions, turns."""
    max_response_length: PositiveInt = 1024
    """Maximum tokens of one reply, unless a role has its own limit."""


class ServedModel(Section):
    """Model for self-evolution, served by this run (`path`) or by an existing server (`base_url` and `name`)."""

    path: Annotated[str, FilePath("model")] = ""
    """Hugging Face hub id or local folder, served by an engine of this run."""
    tokenizer_path: Annotated[str, FilePath("tokenizer")] = ""
    """Folder or hub id of the tokenizer; empty = same as path."""
    trust_remote_code: Annotated[bool, NAMES_CODE] = False
    """Run Python code that comes with the model."""
    base_url: Annotated[str, Requires(ActiveWhen("name"))] = ""
    """URL of an OpenAI-compatible server, e.g. http://localhost:8000/v1."""
    name: str = ""
    """Name of the model on that server."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the API key; if unset, no key is sent."""
    timeout: PositiveFloat = 600.0
    """Seconds per request to a server."""
    max_retries: NonNegativeInt = 4
    """Retries after 429, 5xx, a timeout or a broken connection, with exponential backoff."""
    max_concurrent: PositiveInt = 64
    """Maximum concurrent calls."""
    price_in: NonNegativeFloat = 0.0
    """Price per million prompt tokens."""
    price_out: NonNegativeFloat = 0.0
    """Price per million generated tokens."""


class EvolvingRole(Section):
    """Role in self-evolution, e.g. the verifier: its implementation, model and sampling parameters."""

    plugin: str = ""
    """Implementation of the role, by its registered name; empty = the role is skipped."""
    model: str = ""
    """Name of the model in `models`; empty = the model of the branch (evolving.branches)."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 = greedy."""
    top_p: PositiveRatio = 1.0
    """Nucleus sampling."""
    max_tokens: PositiveInt | None = None
    """Maximum tokens of one reply; null = data.max_response_length."""


class EvolvingToolRole(EvolvingRole):
    plugin: Annotated[str, Requires(ActiveWhen("/evolving.votes", 0), when="")] = ""
    """Implementation of the role, by its registered name; empty = the role is skipped."""
    tools: bool = True
    """Let the role call the tools of the environment."""


class EvolvingRoles(Section):
    proposer: EvolvingRole = EvolvingRole(plugin="proposer")
    summariser: EvolvingRole = EvolvingRole(plugin="summariser", temperature=0.0)
    verifier: EvolvingToolRole = EvolvingToolRole(plugin="verifier")
    aggregator: EvolvingRole = EvolvingRole()


class Evolving(Section):
    rounds: PositiveInt = 4
    """Number of rounds; the first one is round 0."""
    branches: list[str] = []
    """Models that propose, by their names in `models`: one branch each, with a shared memory; empty = one branch with
    the first model."""
    votes: NonNegativeInt = 3
    """Verifications per solution; 0 = none: past solutions and the final answer are then chosen by brevity alone."""
    memory_type: Literal["simple", "score", "ndimensional"] = "ndimensional"
    """Past solutions in the proposer's prompt: simple = newest, score = most votes, ndimensional = also brevity."""
    memory_size: NonNegativeInt = 3
    """Number of past solutions in the proposer's prompt; 0 = the rounds are independent."""
    custom_module: Annotated[str, CODE] = ""
    """Python file that registers your own roles."""


class EvolvingBudget(Section):
    """Limits on what a run of self-evolution may use."""

    tokens: PositiveInt | None = None
    """Prompt and generated tokens of all models."""
    calls: PositiveInt | None = None
    """Calls of all models."""
    seconds: PositiveFloat | None = None
    """Run time in seconds, without the time between an interruption and the resume."""
    money: PositiveFloat | None = None
    """Cost, computed from price_in and price_out of the models."""


class EvolvingTrainer(RunSettings):
    experiment_name: FolderName = "evolving"
    """Second folder of the run under output_dir."""
    resume_mode: Annotated[Literal["auto", "disable"], ONLY_AT_START] = "auto"
    """auto = reuse the replies in the run's pool.jsonl; disable = start from scratch."""


class EvolvingEnv(Env):
    action_format: Literal["tags"] = "tags"
    """Format of tool calls and answers: tags, which work with every server."""
    context: Literal["append"] = "append"
    """An episode is one growing sequence. For past solutions see evolving.memory_type."""


class EvolvingConfig(Section):
    unread_keys = {
        **UNREAD_ROLLOUT_KEYS,
        **{f"rollout.{name}": "roles.ROLE sets the sampling" for name in ("temperature", "top_p", "top_k")},
        "env.rollout.n": "data.n_samples is the number of solutions",
        "rollout.num_engines": "each model has one engine",
        **{f"env.{name}": "evolving.memory_* sets the memory" for name in ("history_length", "memory_type")},
        "env.max_tokens_per_turn": "roles.proposer.max_tokens sets the limit",
        **{f"env.agent.{name}": "it affects only training" for name in ("train", "untrained_roles")},
    }
    resume_rules = {
        "": REQUEST_IDENTITY,
        **dict.fromkeys((*WITHOUT_IDENTITY, "budget"), APPLIED),
        **dict.fromkeys(ENGINE_IDENTITY, REQUEST_IDENTITY),
        "evolving.rounds": ResumeRule("applied", "the new total"),
        "models": ResumeRule("applied", "existing replies are reused; the new model answers the remaining requests"),
    }

    data: EvolvingData = EvolvingData()
    models: dict[str, ServedModel] = {}
    """Models by a name of your choice (required), e.g. {policy: {path: outputs/model}, judge: {base_url: ..., name:
    ...}}. Each has a path or a base_url, and optionally tokenizer_path, trust_remote_code, api_key_env, timeout,
    max_retries, max_concurrent, price_in and price_out (docs/evolving.md)."""
    roles: EvolvingRoles = EvolvingRoles()
    evolving: Evolving = Evolving()
    budget: EvolvingBudget = EvolvingBudget()
    rollout: GenerationRollout = GenerationRollout()
    env: EvolvingEnv = EvolvingEnv()
    reward: ServerReward = ServerReward()
    custom_reward_function: CustomRewardFunction = CustomRewardFunction()
    trainer: EvolvingTrainer = EvolvingTrainer()

    @property
    def all_roles(self) -> dict[str, EvolvingRole]:
        """The sections of `roles` by name."""
        return {name: getattr(self.roles, name) for name in type(self.roles).model_fields}

    @property
    def branches(self) -> list[str]:
        """Model name of each branch."""
        return self.evolving.branches or list(self.models)[:1]

    @property
    def proposer_models(self) -> list[str]:
        """Names of the models that propose."""
        return [self.roles.proposer.model] if self.roles.proposer.model else list(dict.fromkeys(self.branches))
