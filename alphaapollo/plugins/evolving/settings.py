"""Configuration of the command `evolve`, and what its combinations of keys cannot do."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from alphaapollo.config.requirements import CheckContext, requirement
from alphaapollo.config.schema.base import (
    CODE,
    NAMES_CODE,
    ONLY_AT_START,
    ActiveWhen,
    FilePath,
    FolderName,
    PositiveRatio,
    Requires,
    ResumeRule,
    Section,
)
from alphaapollo.config.schema.env import Env
from alphaapollo.config.schema.generation import (
    APPLIED,
    ENGINE_IDENTITY,
    NOT_SAMPLE_IDENTITY,
    UNREAD_ROLLOUT_KEYS,
    GenerationData,
    GenerationRollout,
    InferenceConfig,
)
from alphaapollo.config.schema.reward import CustomRewardFunction, ServerReward
from alphaapollo.config.schema.trainer import RunSettings

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


class EvolvingConfig(InferenceConfig):
    program = "alphaapollo.evolving.main"
    unread_keys = {
        **UNREAD_ROLLOUT_KEYS,
        **{f"rollout.{name}": "roles.ROLE sets the sampling" for name in ("temperature", "top_p", "top_k", "min_p")},
        "env.rollout.n": "data.n_samples is the number of solutions",
        "rollout.num_engines": "each model has one engine",
        **{f"env.{name}": "evolving.memory_* sets the memory" for name in ("history_length", "memory_type")},
        "env.max_tokens_per_turn": "roles.proposer.max_tokens sets the limit",
        **{f"env.agent.{name}": "it affects only training" for name in ("train", "untrained_roles")},
    }
    resume_rules = {
        "": REQUEST_IDENTITY,
        **dict.fromkeys((*NOT_SAMPLE_IDENTITY, "budget"), APPLIED),
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

    @property
    def has_engines(self) -> bool:
        """Whether this run serves a model itself."""
        return any(model.path for model in self.models.values())


@requirement(EvolvingConfig, "models", "it is required", "Set models.policy.path=MODEL, or base_url and name")
def models_are_missing(config: EvolvingConfig, context: CheckContext) -> object:
    return context.device and not config.models


@requirement(ServedModel, "path base_url", "one of them must be set, not both", "Set path, or base_url and name")
def model_has_no_single_source(model: ServedModel, context: CheckContext) -> object:
    return bool(model.path) == bool(model.base_url)


@requirement(EvolvingConfig, "env.env_name", "this run must serve models.{}", "Set models.{}.path, not base_url")
def agents_lack_engines(config: EvolvingConfig, context: CheckContext) -> object:
    own = [name for name in config.proposer_models if name in config.models and not config.models[name].path]
    return config.env.env_name == "agent" and ", ".join(own)


@requirement(EvolvingConfig, "evolving.branches", "{0} is not in models", "Set one of {1}")
def models_are_unknown(config: EvolvingConfig, context: CheckContext) -> object:
    named = {f"evolving.branches[{index}]": name for index, name in enumerate(config.evolving.branches)}
    named |= {f"roles.{role}.model": section.model for role, section in config.all_roles.items() if section.model}
    unknown = [f"{key}={name}" for key, name in named.items() if name not in config.models]
    return config.models and unknown and (unknown[0], ", ".join(config.models))


@requirement(EvolvingConfig, "roles.proposer.plugin", "nothing would be proposed", "Set roles.proposer.plugin=proposer")
def proposer_is_missing(config: EvolvingConfig, context: CheckContext) -> object:
    return not config.roles.proposer.plugin


@requirement(EvolvingConfig, "budget.money", "no model has a price", "Set price_in and price_out of a model")
def prices_are_missing(config: EvolvingConfig, context: CheckContext) -> object:
    return config.budget.money and not any(model.price_in or model.price_out for model in config.models.values())
