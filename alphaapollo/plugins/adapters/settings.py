"""`env.verifiers`, `env.openenv` and `env.reasoning_gym`: the environments of other packages."""

from typing import Annotated, ClassVar

from pydantic import NonNegativeInt

from alphaapollo.config.schema.base import CHANGES_DATA, CHANGES_ENVIRONMENT, NAMES_CODE, Scalar, Section


class ReasoningGym(Section):
    reads_prompt: ClassVar[bool] = True  # env.prompt

    tasks: Annotated[list[str], CHANGES_DATA] = []
    """Names of reasoning-gym tasks, one of which is drawn per row; [all] = all of them."""
    level: NonNegativeInt | None = None
    """Difficulty level in reasoning-gym's curriculum of each task; null = the task's default settings."""
    settings: dict[str, dict[str, Scalar | list[Scalar]]] = {}
    """Settings by task, e.g. {chain_sum: {max_terms: 3}}; they override the settings of the level."""


class Verifiers(Section):
    name: Annotated[str, CHANGES_ENVIRONMENT, NAMES_CODE] = ""
    """Name of an installed taskset of verifiers, e.g. gsm8k-v1."""
    args: Annotated[dict[str, Scalar | list[Scalar]], NAMES_CODE] = {}
    """Settings of the taskset."""
    python: Annotated[str, NAMES_CODE] = ""
    """Python program of the installation that has verifiers 0.4; empty = the program of this run."""


class OpenEnv(Section):
    reads_prompt: ClassVar[bool] = True

    url: Annotated[str, NAMES_CODE] = ""
    """URL of the environment server, e.g. http://localhost:8000."""
    action_field: str = "message"
    """Field of the action that receives the model's answer; an answer that is a JSON object is the complete action."""
    observation_field: str = ""
    """Field of the observation that the model sees; empty = the complete observation as JSON."""
