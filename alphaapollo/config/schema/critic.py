"""`critic`: the value model of PPO."""

from __future__ import annotations

from typing import Annotated

from pydantic import PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import CHANGES_MODEL, FilePath, Section
from alphaapollo.config.schema.model import Lora, Optimizer, RoleFsdp


class CriticModel(Lora):
    path: Annotated[str, CHANGES_MODEL, FilePath("model")] = ""
    """Model that the critic starts from, with a new value head; empty = actor_rollout_ref.model.path."""


class Critic(Section):
    model: CriticModel = CriticModel()
    optim: Optimizer = Optimizer(lr=1e-5)
    ppo_epochs: PositiveInt = 1
    """Passes of the critic over a batch."""
    grad_clip: PositiveFloat = 1.0
    """Maximum gradient norm."""
    cliprange_value: PositiveFloat | None = 0.5
    """Clip range of values around the old values; null = off."""
    fsdp_config: RoleFsdp = RoleFsdp()
