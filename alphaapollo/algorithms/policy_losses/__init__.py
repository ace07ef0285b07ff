"""Policy losses: one module per loss or family, registered on import."""

from alphaapollo.algorithms.policy_losses import cispo, covariance, gmpo, gspo, ppo, reinforce, sapo  # noqa: F401
from alphaapollo.algorithms.policy_losses.base import (
    PolicyLoss,
    PolicyLossInputs,
    PolicyLossOutput,
    get_policy_loss,
    policy_loss_names,
    register_policy_loss,
)

__all__ = [
    "PolicyLoss",
    "PolicyLossInputs",
    "PolicyLossOutput",
    "get_policy_loss",
    "policy_loss_names",
    "register_policy_loss",
]
