"""Sections env.plugins.openenv and env.plugins.verifiers of the configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from alphaapollo.config.schema.base import CHANGES_ENVIRONMENT, NAMES_CODE, Scalar, Section


class Verifiers(Section):
    name: Annotated[str, CHANGES_ENVIRONMENT, NAMES_CODE] = ""
    """Name of an installed taskset of verifiers, e.g. gsm8k-v1."""
    args: Annotated[dict[str, Scalar | list[Scalar]], NAMES_CODE] = Field(default_factory=dict)
    """Settings of the taskset."""
    python: Annotated[str, NAMES_CODE] = ""
    """Python program of the installation that has verifiers 0.4; empty = the program of this run."""


class OpenEnv(Section):
    url: Annotated[str, NAMES_CODE] = ""
    """URL of the environment server, e.g. http://localhost:8000."""
    prompt: str = "{observation}\n\nAct with <answer>...</answer>."
    """First message to the model, with the placeholder {observation}."""
    action_field: str = "message"
    """Field of the action that receives the model's answer; an answer that is a JSON object is the complete action."""
    observation_field: str = ""
    """Field of the observation that the model sees; empty = the complete observation as JSON."""
