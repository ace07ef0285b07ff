"""SAPO: a soft gate instead of the hard clip."""

from __future__ import annotations

import torch
from torch import Tensor

from alphaapollo.algorithms.masked import log_ratio
from alphaapollo.algorithms.policy_losses.base import PolicyLossInputs, PolicyLossOutput, register_policy_loss
from alphaapollo.config.schema import Actor


def sapo(ratio: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    """Compute the SAPO loss -(4/tau) sigmoid(tau (r - 1)) A (arXiv 2511.20347, Eq. 5-6). Any equal shapes.

    tau is tau_pos where A > 0, else tau_neg. The gradient has weight 1 at ratio r = 1 and decreases on both sides.
    """
    tau = torch.where(advantages > 0, ratio.new_tensor(tau_pos), ratio.new_tensor(tau_neg))
    return -(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * advantages


@register_policy_loss("sapo", reads=("tau_pos", "tau_neg"))
def _sapo(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    ratio = log_ratio(inputs.logp, inputs.old_logp, inputs.mask).exp()
    return PolicyLossOutput(sapo(ratio, inputs.advantages, config.tau_pos, config.tau_neg))
