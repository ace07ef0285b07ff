"""Plain policy gradient."""

from __future__ import annotations

from torch import Tensor

from alphaapollo.algorithms.policy_losses.base import PolicyLossInputs, PolicyLossOutput, register_policy_loss
from alphaapollo.config.schema import Actor


def policy_gradient(logp: Tensor, advantages: Tensor) -> Tensor:
    """Compute the REINFORCE loss -A log pi. Any equal shapes."""
    return -advantages * logp


@register_policy_loss("gpg", on_policy=True, reads=())  # alpha of GPG is a factor of the advantages
@register_policy_loss("reinforce", on_policy=True, reads=())
def _reinforce(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    return PolicyLossOutput(policy_gradient(inputs.logp, inputs.advantages))
