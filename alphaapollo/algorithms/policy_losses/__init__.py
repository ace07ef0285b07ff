"""Policy losses: one module per loss or family, registered on import."""

from alphaapollo.algorithms.policy_losses import cispo, covariance, gmpo, gspo, ppo, reinforce, sapo
from alphaapollo.algorithms.policy_losses.base import (
    PolicyLoss,
    PolicyLossInputs,
    PolicyLossOutput,
    TokenSelector,
    get_policy_loss,
    policy_loss_names,
    register_policy_loss,
)

__all__ = [
    "PolicyLoss",
    "PolicyLossInputs",
    "PolicyLossOutput",
    "TokenSelector",
    "cispo",
    "covariance",
    "get_policy_loss",
    "gmpo",
    "gspo",
    "policy_loss_names",
    "ppo",
    "register_policy_loss",
    "reinforce",
    "sapo",
]
