"""The load of a mixture of experts over one update: its figures, and the loss that evens it out.

The loss is transformers' (models/moe_routing.py), whose f_e, the share of the tokens that an expert gets, is
of the micro-batches that all ranks compute at the same time: one exchange of 2 E numbers each. A micro-batch counts by
its tokens among those of the optimizer step, prompts among them, padding not. So ranks, also those that share
sequences, change nothing; the number of micro-batches does, for f_e is not known before the last of them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from alphaapollo.data.batch import Rows
from alphaapollo.models.moe_routing import Routers, balance_loss


class ExpertLoadBalancer:
    """Of one rank. All ranks call the same methods in the same order.

    Args:
        coefficient: of the loss; 0: none.
        data: ranks that together have every row once; None: all.
    """

    def __init__(self, routers: Routers, coefficient: float, device: torch.device, data: dist.ProcessGroup | None):
        self.routers, self.coefficient, self.device, self.data = routers, coefficient, device, data
        routers.balances = coefficient > 0
        self.counts = torch.zeros(routers.num_layers, routers.sizes.num_experts, dtype=torch.float64, device=device)
        self.differs = torch.zeros((), dtype=torch.float64, device=device)
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.steps = 0
        self.forced = torch.zeros((), dtype=torch.float64, device=device)
        self.tokens = torch.ones((), device=device)  # of the optimizer step, over all ranks, times layers

    def begin_step(self, rows: Rows, positions: list[int]) -> None:
        """`positions`: of this rank's rows of the optimizer step. A collective where there is a loss."""
        self.steps += 1
        if self.coefficient:
            tokens = float(rows.lengths[positions].sum()) * len(self.routers.layers)
            self.tokens = torch.tensor(tokens, device=self.device)
            dist.all_reduce(self.tokens, group=self.data)

    def note(self) -> Tensor | float:
        """Of the pass that was: this rank's part of the loss, whose gradient adds up over ranks and micro-batches. A
        collective where there is a loss."""
        now = self.routers.now
        assert now is not None, "a forward pass comes first"
        self.counts += now.counts
        self.differs += now.differs
        if now.forced is not None:
            self.forced += now.counts.sum()
        if not self.coefficient:
            return 0.0
        assert now.probabilities is not None
        both = torch.stack([now.counts.sum(0), now.probabilities.detach()])
        dist.all_reduce(both)
        counts, everyone = both
        tokens = counts.sum().clamp(min=1.0) / self.routers.sizes.chosen
        share = tokens / self.tokens
        self.loss += balance_loss(counts, everyone, tokens, share)
        return self.coefficient * balance_loss(counts, now.probabilities, tokens, share)

    def figures(self) -> dict[str, float]:
        """Over all ranks (a collective). docs/metrics.md explains them."""
        together = torch.cat([self.counts.flatten(), self.differs[None], self.forced[None]])
        dist.all_reduce(together)
        counts = together[:-2].view_as(self.counts)[self.routers.layers]
        differs, forced = together[-2:].tolist()
        mean = counts.mean(1, keepdim=True).clamp(min=1e-9)
        figures = {
            "expert_load_max": float((counts / mean).max()),
            "expert_dead": float((counts == 0).double().mean()),
        }
        if forced:
            figures["router_differs"] = differs / forced
        if self.coefficient:
            figures["router_aux_loss"] = float(self.loss) / max(1, self.steps)
        return figures
