"""The whole configuration of evolving.main."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import Ratio, Section
from alphaapollo.config.schema.env import Env
from alphaapollo.config.schema.generation import GenerationData, GenerationRollout
from alphaapollo.config.schema.reward import CustomRewardFunction, Reward
from alphaapollo.config.schema.trainer import WatchedRun


class EvolvingData(GenerationData):
    path: str | list[str] = ""
    """The problems: one or several parquet or jsonl files (required). Without a ground truth they are in no figure."""
    n_samples: PositiveInt = 1
    """Solutions that a branch writes in a round."""
    max_prompt_length: PositiveInt = 4096
    """Tokens that an engine of this run is shown at most in one call: question, past solutions, turns."""
    max_response_length: PositiveInt = 1024
    """Tokens of one reply at most, unless a role has its own limit."""


class ServedModel(Section):
    """One model: served by this run (`path`), or by a server that is there (`base_url`)."""

    path: str = ""
    """Hugging Face hub id or a local folder: an engine of this run serves it."""
    tokenizer_path: str = ""
    """Where its tokenizer lies, when not with it."""
    trust_remote_code: bool = False
    """Run the Python code that its folder brings along."""
    base_url: str = ""
    """An OpenAI-compatible server, e.g. http://localhost:8000/v1."""
    name: str = ""
    """What that server calls the model."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the server's key; without one, none is sent."""
    timeout: PositiveFloat = 600.0
    """Seconds for one request to a server."""
    max_retries: NonNegativeInt = 4
    """Further requests after 429, 5xx, a time-out or a broken connection, with growing pauses."""
    max_concurrent: PositiveInt = 64
    """Calls in flight at a time."""
    price_in: NonNegativeFloat = 0.0
    """Money for a million tokens that it reads."""
    price_out: NonNegativeFloat = 0.0
    """Money for a million tokens that it writes."""


class Role(Section):
    """Who does one part of the work."""

    plugin: str = ""
    """The role by its registered name, yours among them; empty = nobody does it."""
    model: str = ""
    """The model by its name in `models`; empty = that of the branch."""
    temperature: NonNegativeFloat = 1.0
    """At which it writes; 0 = greedy."""
    top_p: Ratio = 1.0
    """Nucleus."""
    max_tokens: PositiveInt | None = None
    """Tokens of one of its replies at most; null = data.max_response_length."""


class ToolRole(Role):
    tools: bool = True
    """It may call the tools that the environment is given."""


class Roles(Section):
    proposer: Role = Role(plugin="proposer")
    summariser: Role = Role(plugin="summariser", temperature=0.0)
    verifier: ToolRole = ToolRole(plugin="verifier")
    verifier_of_verifiers: Role = Role()
    aggregator: Role = Role()
    referee: Role = Role(plugin="referee")


class Evolving(Section):
    rounds: PositiveInt = 4
    """Rounds; the first one is round 0."""
    branches: list[str] = []
    """The models that propose, by their names in `models`: each is a branch, and all share one memory; empty = one
    branch with the first model."""
    votes: NonNegativeInt = 3
    """Verifiers of a solution; 0 = nobody judges."""
    asks: NonNegativeInt = 2
    """Further times that a role is asked whose reply lacks what is wanted of it, e.g. a report."""
    memory_type: Literal["simple", "score", "ndimensional"] = "ndimensional"
    """Which past solutions a proposer is shown: the last ones, those of most votes, or by rank of votes and brevity."""
    memory_size: NonNegativeInt = 3
    """Past solutions that a proposer is shown; 0 = none: the rounds are independent."""
    select: Literal["vote", "tournament"] = "vote"
    """The solution that is chosen at the end: by votes and brevity, or the winner of a tournament of the best."""
    finalists: Annotated[int, Field(ge=2)] = 4
    """Solutions in the tournament."""
    max_failures: PositiveInt = 20
    """Calls of one model that fail in a row for want of its server before the run stops; the same command goes on."""
    custom_module: str = ""
    """Python file that registers your own roles."""


class Limits(Section):
    """What a run may take in all, over all its processes."""

    tokens: PositiveInt | None = None
    """Tokens read and written by all models."""
    calls: PositiveInt | None = None
    """Calls of models."""
    seconds: PositiveFloat | None = None
    """Seconds at work."""
    money: PositiveFloat | None = None
    """Money, by the models' prices."""
    reserve: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """Share of each limit that is kept for the end: the tournament, and writing the results."""


class EvolvingTrainer(WatchedRun):
    experiment_name: str = "evolving"
    """Second folder of the run under output_dir."""
    resume_mode: Literal["auto", "disable"] = "auto"
    """auto = what the run's pool.jsonl holds is not asked again; disable = start anew."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where engines of this run work; auto = cuda if there is a GPU."""
    seed: int = 0
    """Seed of everything that is drawn: each call has its own, by what it is for."""
    dry_run: bool = False
    """Compose, check, print the plan, and stop."""


class EvolvingConfig(Section):
    """The whole configuration of evolving.main."""

    data: EvolvingData = EvolvingData()
    models: dict[str, ServedModel] = {}
    """Models by a name of yours, e.g. {policy: {path: outputs/model}, judge: {base_url: ..., name: ...}}: each has a
    path or a base_url; tokenizer_path, trust_remote_code, api_key_env, timeout, max_retries, max_concurrent, price_in
    and price_out are as docs/evolving.md says (required)."""
    roles: Roles = Roles()
    evolving: Evolving = Evolving()
    budget: Limits = Limits()
    rollout: GenerationRollout = GenerationRollout()
    env: Env = Env()
    reward: Reward = Reward()
    custom_reward_function: CustomRewardFunction = CustomRewardFunction()
    trainer: EvolvingTrainer = EvolvingTrainer()
