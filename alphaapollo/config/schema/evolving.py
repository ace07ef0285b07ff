"""Configuration of evolving.main."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import CODE, ONLY_AT_START, FilePath, FolderName, PositiveRatio, ResumeRule, Section
from alphaapollo.config.schema.env import Env
from alphaapollo.config.schema.generation import UNREAD_ROLLOUT_KEYS, GenerationData, GenerationRollout
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
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    base_url: str = ""
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

    def find_problems(self) -> Iterator[str]:
        if bool(self.path) == bool(self.base_url or self.name):
            yield "path or base_url must be set, not both. Set path, or base_url and name of an existing server."
        elif self.base_url and not self.name:
            yield "name is required with base_url. Set the name of the model on the server."


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
        **dict.fromkeys(("budget", "rollout", "trainer"), ResumeRule("applied")),
        **dict.fromkeys(
            ("rollout.name", "rollout.dtype", "rollout.engine_kwargs.vllm", "trainer.seed"), REQUEST_IDENTITY
        ),
        **dict.fromkeys(("env.episode_timeout", "reward.timeout", "reward.num_workers"), ResumeRule("applied")),
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

    def find_problems(self) -> Iterator[str]:
        evolving = self.evolving
        for name in self.proposer_models if self.env.env_name == "agent" else ():
            if name in self.models and not self.models[name].path:
                yield (
                    f"models.{name}.base_url={self.models[name].base_url}: with env.env_name=agent, this run must "
                    f"serve the model that proposes. Set models.{name}.path, or another env.env_name."
                )
        named = {f"evolving.branches[{index}]": name for index, name in enumerate(evolving.branches)}
        named |= {f"roles.{role}.model": section.model for role, section in self.all_roles.items() if section.model}
        for key, name in named.items():
            if self.models and name not in self.models:
                yield f"{key}={name} is not in models. Set one of {', '.join(self.models)}."
        if not self.roles.proposer.plugin:
            yield "roles.proposer.plugin is empty, so nothing would be proposed. Set roles.proposer.plugin=proposer."
        if evolving.votes and not self.roles.verifier.plugin:
            yield f"evolving.votes={evolving.votes} needs roles.verifier.plugin. Set it, or evolving.votes=0."
        longest = self.data.max_response_length
        for name, role in self.all_roles.items():
            if role.max_tokens and role.max_tokens > longest:
                key = f"roles.{name}.max_tokens={role.max_tokens}"
                yield f"{key} exceeds data.max_response_length={longest}. Lower max_tokens."
        if self.budget.money is not None and not any(
            model.price_in or model.price_out for model in self.models.values()
        ):
            yield f"budget.money={self.budget.money:g} needs prices. Set price_in and price_out of a model in `models`."
