"""Policy losses: one module per family, registered on import."""

from alphaapollo.algorithms.policy_losses import gspo, ppo  # noqa: F401
from alphaapollo.algorithms.policy_losses.base import PolicyLoss as PolicyLoss
from alphaapollo.algorithms.policy_losses.base import PolicyLossInputs as PolicyLossInputs
from alphaapollo.algorithms.policy_losses.base import PolicyLossOutput as PolicyLossOutput
from alphaapollo.algorithms.policy_losses.base import get_policy_loss as get_policy_loss
from alphaapollo.algorithms.policy_losses.base import policy_loss_names as policy_loss_names
from alphaapollo.algorithms.policy_losses.base import register_policy_loss as register_policy_loss
