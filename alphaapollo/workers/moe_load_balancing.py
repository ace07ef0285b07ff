"""Load-balancing loss and expert-load metrics of a mixture-of-experts model.

The loss is that of transformers (docs/moe.md). The share of tokens that each expert gets is computed over the
micro-batches that all ranks run at the same time, with one all-reduce of 2 x num_experts values per micro-batch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from alphaapollo.data.batch import Rows
from alphaapollo.models.moe_routing import RouterHooks, load_balancing_loss


class ExpertLoadBalancer:
    """Load-balancing loss and expert loads during one update. All ranks call the same methods in the same order.

    Args:
        coefficient: factor of the loss; 0 = no loss.
        group: ranks that together have every token sequence once; None: all ranks.
    """

    def __init__(self, routers: RouterHooks, coefficient: float, device: torch.device, group: dist.ProcessGroup | None):
        self.routers, self.coefficient, self.device, self.group = routers, coefficient, device, group
        routers.needs_probabilities = coefficient > 0
        self.counts = torch.zeros(routers.num_layers, routers.sizes.num_experts, dtype=torch.float64, device=device)
        self.num_overridden = torch.zeros((), dtype=torch.float64, device=device)
        self.num_forced = torch.zeros((), dtype=torch.float64, device=device)
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.steps = 0
        self.tokens = torch.ones((), device=device)  # tokens x layers of the optimizer step, over all ranks

    def begin_step(self, rows: Rows, row_indices: list[int]) -> None:
        """Start an optimizer step on some of this rank's rows (a collective if `coefficient` > 0)."""
        self.steps += 1
        if self.coefficient:
            tokens = float(rows.lengths[row_indices].sum()) * len(self.routers.layers)
            self.tokens = torch.tensor(tokens, device=self.device)
            dist.all_reduce(self.tokens, group=self.group)

    def compute_last_pass_loss(self) -> Tensor | float:
        """Return the last forward pass's part of the load-balancing loss, and add its expert loads to `counts`.

        Gradients add up over ranks and micro-batches. A collective if `coefficient` > 0.
        """
        routing = self.routers.current
        assert routing is not None, "run a forward pass first"
        self.counts += routing.counts
        self.num_overridden += routing.num_overridden
        if routing.forced_experts is not None:
            self.num_forced += routing.counts.sum()
        if not self.coefficient:
            return 0.0
        assert routing.probabilities is not None
        stacked = torch.stack([routing.counts.sum(0), routing.probabilities.detach()])
        dist.all_reduce(stacked)
        counts, probabilities = stacked
        tokens = counts.sum().clamp(min=1.0) / self.routers.sizes.experts_per_token
        share = tokens / self.tokens
        self.loss += load_balancing_loss(counts, probabilities, tokens, share)
        return self.coefficient * load_balancing_loss(counts, routing.probabilities, tokens, share)

    def compute_metrics(self) -> dict[str, float]:
        """Compute metrics of the expert loads over all ranks (a collective), see docs/metrics.md."""
        together = torch.cat([self.counts.flatten(), self.num_overridden[None], self.num_forced[None]])
        dist.all_reduce(together)
        counts = together[:-2].view_as(self.counts)[self.routers.layers]
        num_overridden, num_forced = together[-2:].tolist()
        mean = counts.mean(1, keepdim=True).clamp(min=1e-9)
        metrics = {"expert_load_max": float((counts / mean).max()), "expert_dead": float((counts == 0).double().mean())}
        if num_forced:
            metrics["router_differs"] = num_overridden / num_forced
        if self.coefficient:
            metrics["router_aux_loss"] = float(self.loss) / max(1, self.steps)
        return metrics
