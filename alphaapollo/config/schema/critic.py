"""`critic`: the value model."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import Section
from alphaapollo.config.schema.model import Lora, Optimizer, RoleFsdp


class CriticModel(Lora):
    path: str = ""
    """The critic's trunk (its value head is fresh); empty = actor_rollout_ref.model.path."""


class Critic(Section):
    model: CriticModel = CriticModel()
    optim: Optimizer = Optimizer(lr=1e-5)
    ppo_epochs: PositiveInt = 1
    """Passes of the critic over a batch."""
    grad_clip: PositiveFloat = 1.0
    """Largest gradient norm of the critic."""
    cliprange_value: PositiveFloat | None = 0.5
    """Value clipping around the old values; null = off."""
    ulysses_sequence_parallel_size: PositiveInt | None = None
    """null = the actor's, which it must be: both get the same micro-batches."""
    fsdp_config: RoleFsdp = RoleFsdp()
