"""Pairwise loss of a reward model."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor, centring: float = 0.0) -> Tensor:
    """-log s(r_w - r_l - m) + centring (r_w + r_l)^2: the chosen answer wins with probability s(r_w - r_l)
    (arXiv 2204.05862), with a margin m (arXiv 2307.09288, Eq. 2). The second term keeps scores near zero, because the
    first only constrains differences (arXiv 2312.09244, coefficient 0.01).

    chosen, rejected: scores [P]; margin [P], at least 0. Returns [P].
    """
    return -logsigmoid(chosen - rejected - margin) + centring * (chosen + rejected) ** 2
