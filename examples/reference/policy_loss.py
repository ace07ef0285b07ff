"""algorithm.custom_module=examples/reference/policy_loss.py
actor_rollout_ref.actor.policy_loss.loss_mode=squared_ratio"""

from alphaapollo.algorithms.policy_losses import PolicyLossInputs, PolicyLossOutput, register_policy_loss
from alphaapollo.config.schema import Actor


@register_policy_loss("squared_ratio")
def squared_ratio(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    """Policy gradient with a penalty on the squared distance of the ratio from 1."""
    ratio = (inputs.logp - inputs.old_logp).exp()
    penalty = (ratio - 1).square()
    loss = -inputs.advantages * ratio + 0.5 * penalty
    return PolicyLossOutput(loss, {"ratio_penalty": (penalty.detach() * inputs.mask).sum()})
