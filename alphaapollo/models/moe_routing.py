"""Mixture of experts (MoE): statistics of the routers' choices, routing replay, and the load-balancing loss.

    hidden states -> router -> logits [n, E], weights [n, k], experts [n, k] -> experts

`RouterHooks` wraps the forward method of each router. In a forward pass with forced experts (rollout routing replay,
arXiv 2510.11370), a router uses the experts that the engine chose, but computes their weights and gradients itself.
`RoutingRecord` collects the statistics of a forward pass. `ExpertLoadBalancer` computes the loss of transformers
(docs/parallelism.md): the share of tokens that each expert gets is computed over the micro-batches that all ranks run
at the same time, with one all-reduce of 2 x num_experts values per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from alphaapollo.batching.batch import Rows
from alphaapollo.models.decoder import find_decoder_layers, find_language_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


ROUTED_EXPERTS = "routed_experts"
"""Column of a row with rollout.router_replay, uint8 or uint16 [T, layers, k]: experts that the engine chose."""


@dataclass(frozen=True)
class ExpertSizes:
    """Number of experts per MoE layer, and number of experts that each token uses."""

    num_experts: int
    experts_per_token: int  # that the router chooses

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> ExpertSizes | None:
        """Read the numbers of experts and of experts per token from a model's configuration; None for a dense model."""
        text = config.get_text_config()
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next((count for name in names if (count := getattr(text, name, None))), 0)
        chosen = getattr(text, "num_experts_per_tok", None) or getattr(text, "moe_topk", None) or 0
        return cls(experts, chosen) if experts > 1 and chosen else None


@dataclass(eq=False)
class RoutingRecord:
    """Routing statistics of one forward pass over n tokens and L decoder layers, which include layers without experts.
    Each router chooses k of E experts per token."""

    is_real_token: Tensor  # bool [n]: false for padding
    forced_experts: Tensor | None  # integers [n, L, k]: experts to use; None: the routers choose
    counts: Tensor  # float32 [L, E]: tokens sent to each expert, without padding
    num_overridden: Tensor  # float32 []: number of forced choices that the router would not have made
    needs_probabilities: bool  # for load_balancing_loss
    probabilities: Tensor | None = None  # float32 [E]: summed over layers and tokens; has a gradient
    is_recording: bool = True  # false after the forward pass: recomputations by gradient checkpointing are not recorded

    def record_layer(self, layer_index: int, logits: Tensor, experts: Tensor, unforced_experts: Tensor) -> None:
        """Record a router's logits [n, E], the experts used [n, k] and those that it would choose itself [n, k]."""
        real = self.is_real_token.type_as(self.counts)
        # Recomputations compute this, too, because they must save the same tensors for the backward pass.
        probability_sum = (logits.float().softmax(-1) * real[:, None]).sum(0) if self.needs_probabilities else None
        if not self.is_recording:
            return
        if probability_sum is not None:
            self.probabilities = probability_sum if self.probabilities is None else self.probabilities + probability_sum
        real_choices = real[:, None].expand(experts.shape).reshape(-1)
        self.counts[layer_index].scatter_add_(0, experts.reshape(-1), real_choices)
        if self.forced_experts is not None:
            is_overridden = (experts[:, :, None] != unforced_experts[:, None, :]).all(-1)
            self.num_overridden += (is_overridden * real[:, None]).sum()


class RouterHooks:
    """Hooks on the routers of one model, which record statistics and can be forced to use given experts.

    Call `start_recording` before a forward pass. After the pass, set `is_recording` of the returned record to false.
    Forced experts stay in use until the next `start_recording`, because gradient checkpointing repeats forward passes.
    """

    def __init__(self, model: PreTrainedModel, sizes: ExpertSizes):
        self.sizes = sizes
        layers = find_decoder_layers(model)
        self.num_layers = len(layers)
        self.follows_engine = True  # force the experts that the engine chose, if the micro-batch has them
        self.needs_probabilities = False  # collect `probabilities` for load_balancing_loss in passes with gradients
        self.current: RoutingRecord | None = None  # None: do not record or force the next forward pass
        classes = _find_router_classes(model)
        routers = [(i, part) for i, layer in enumerate(layers) for part in layer.modules() if isinstance(part, classes)]
        if not all(_is_supported_router(router, sizes, model.config) for _, router in routers):
            routers = []
        self.layers = [layer for layer, _ in routers]  # indices of the decoder layers with a router
        for layer, router in routers:
            router.forward = self._wrap_router_forward(router.forward, layer)

    @classmethod
    def wrap_routers(cls, model: PreTrainedModel) -> RouterHooks | None:
        """Wrap the routers of a model in place. Returns None if the model has no routers or unsupported routers."""
        sizes = ExpertSizes.from_config(model.config)
        hooks = cls(model, sizes) if sizes else None
        return hooks if hooks and hooks.layers else None

    def start_recording(self, is_real_token: Tensor, token_columns: Mapping[str, Tensor]) -> RoutingRecord:
        """Start to record a forward pass. The arguments are fields of MicroBatch. Raises ValueError if the model has
        other numbers of layers or experts per token than ROUTED_EXPERTS."""
        forced_experts = token_columns.get(ROUTED_EXPERTS) if self.follows_engine else None
        expected = (self.num_layers, self.sizes.experts_per_token)
        if forced_experts is not None and (shape := forced_experts.shape[-2:]) != expected:
            raise ValueError(
                f"rollout.router_replay=true: the engine returned {shape[0]} layers x {shape[1]} experts per token, "
                f"but the model has {expected[0]} x {expected[1]}. Set rollout.router_replay=false."
            )
        counts = torch.zeros(self.num_layers, self.sizes.num_experts, device=is_real_token.device)
        self.current = RoutingRecord(
            is_real_token=is_real_token.flatten(),
            forced_experts=None if forced_experts is None else forced_experts.reshape(-1, *expected),
            counts=counts,
            num_overridden=counts.new_zeros(()),
            needs_probabilities=self.needs_probabilities and torch.is_grad_enabled(),
        )
        return self.current

    def _wrap_router_forward(self, forward: Callable[..., Any], layer_index: int) -> Callable[..., object]:
        def route(*arguments: object, **keywords: object) -> Any:
            current = self.current
            if current is None:
                return forward(*arguments, **keywords)
            forced = None if current.forced_experts is None else current.forced_experts[:, layer_index].long()
            with _TopKOverride(self.sizes, forced) as override:
                output = forward(*arguments, **keywords)
            assert override.unforced_experts is not None, "_is_supported_router has checked this"
            logits, _, experts, *_ = output
            current.record_layer(layer_index, logits, experts, override.unforced_experts)
            return output

        return route


class _TopKOverride(TorchFunctionMode):
    """Context manager in which torch.topk over a router's E scores returns the forced experts, if there are any."""

    def __init__(self, sizes: ExpertSizes, forced_experts: Tensor | None):
        super().__init__()
        self.sizes, self.forced_experts = sizes, forced_experts
        self.unforced_experts: Tensor | None = None  # experts that topk returns without forcing

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0]
        if scores.shape[-1] != self.sizes.num_experts or result[1].shape[-1] != self.sizes.experts_per_token:
            return result  # topk over groups of experts
        self.unforced_experts = result[1].reshape(-1, self.sizes.experts_per_token)
        if self.forced_experts is None:
            return result
        forced = self.forced_experts.view(result[1].shape)
        return torch.return_types.topk((scores.gather(-1, forced), forced))


def load_balancing_loss(counts: Tensor, probabilities: Tensor, tokens: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """Compute the MoE auxiliary loss as transformers does (arXiv 2101.03961, equations 4 to 6, over all layers): E
    sum_e f_e P_e, with f_e the share of tokens sent to expert e (`counts` [E] / `tokens`) and P_e its mean router
    probability (`probabilities` [E], with gradient, / `tokens`). tokens: number of tokens times layers. weight: factor
    of the loss."""
    return counts.shape[0] * (counts / tokens * (probabilities / tokens)).sum() * weight


@torch.no_grad()
def _is_supported_router(router: nn.Module, sizes: ExpertSizes, config: PretrainedConfig) -> bool:
    """Run a router to test whether it chooses experts with torch.topk and returns (logits, weights, experts)."""
    parameter = next(router.parameters(), None)
    if parameter is None:
        return False
    tokens = torch.zeros(3, config.get_text_config().hidden_size, dtype=parameter.dtype, device=parameter.device)
    with _TopKOverride(sizes, None) as override:
        try:
            output = router(tokens)
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):  # the router takes other arguments
            return False
    shapes = [tuple(part.shape) for part in output if isinstance(part, Tensor)] if isinstance(output, tuple) else []
    expected = [(3, sizes.num_experts), (3, sizes.experts_per_token), (3, sizes.experts_per_token)]
    return override.unforced_experts is not None and shapes == expected and not output[2].is_floating_point()


def _find_router_classes(model: PreTrainedModel) -> tuple[type[nn.Module], ...]:
    """Find the module classes whose outputs transformers records as router logits."""
    recorded: dict[str, object] = {}
    for module in (model, model.base_model, find_language_model(model)):
        recorded |= getattr(module, "_can_record_outputs", None) or {}
    recorders = recorded.get("router_logits", ())
    recorders = recorders if isinstance(recorders, list) else [recorders]
    targets = [getattr(recorder, "target_class", None) for recorder in recorders]
    return tuple(target for target in targets if isinstance(target, type))


class ExpertLoadBalancer:
    """Load-balancing loss, multiplied by `coefficient`, and expert loads during one update. All ranks call the same
    methods in the same order. group: ranks that together have every token sequence once; None: all ranks."""

    def __init__(self, routers: RouterHooks, coefficient: float, device: torch.device, group: dist.ProcessGroup | None):
        self.routers, self.coefficient, self.device, self.group = routers, coefficient, device, group
        routers.needs_probabilities = coefficient > 0
        self.counts = torch.zeros(routers.num_layers, routers.sizes.num_experts, dtype=torch.float64, device=device)
        zeros = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(3))
        self.num_overridden, self.num_forced, self.loss = zeros
        self.steps = 0
        self.tokens = torch.ones((), device=device)  # tokens x layers of the optimizer step, over all ranks
        self.denominator: float | None = None  # set if a step has several calls (compute_last_pass_loss)
        self.num_counted = torch.zeros((), device=device)  # this rank's tokens (or rows) in the loss of the last pass

    def begin_step(self, rows: Rows, row_indices: list[int]) -> None:
        """Start an optimizer step on some of this rank's rows (a collective if `coefficient` > 0)."""
        self.steps += 1
        if self.coefficient:
            tokens = float(rows.lengths[row_indices].sum()) * len(self.routers.layers)
            self.tokens = torch.tensor(tokens, device=self.device)
            dist.all_reduce(self.tokens, group=self.group)

    def compute_last_pass_loss(self) -> Tensor | float:
        """Return the last forward pass's part of the load-balancing loss, and add the pass's expert loads to `counts`.
        Gradients add up over ranks and micro-batches. A collective if `coefficient` > 0.

        The passes that all ranks run at the same time are weighted by their share of the step's tokens or, with
        `denominator`, by num_counted / denominator."""
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
        dist.all_reduce(stacked)  # over all ranks, because ranks that share a sequence route different tokens
        counts, probabilities = stacked
        tokens = counts.sum().clamp(min=1.0) / self.routers.sizes.experts_per_token
        share = tokens / self.tokens
        if self.denominator is not None:
            counted = self.num_counted.detach().clone()
            dist.all_reduce(counted, group=self.group)
            share = counted / self.denominator
        self.loss += load_balancing_loss(counts, probabilities, tokens, share)
        return self.coefficient * load_balancing_loss(counts, routing.probabilities, tokens, share)

    def compute_metrics(self) -> dict[str, float]:
        """Compute metrics of the expert loads over all ranks (a collective), see config/metrics.yaml."""
        totals = torch.cat([self.counts.flatten(), self.num_overridden[None], self.num_forced[None]])
        dist.all_reduce(totals)
        totals = torch.cat([totals, self.loss[None]]).cpu()  # the loss is already a sum over ranks
        counts = totals[:-3].view_as(self.counts)[self.routers.layers]
        num_overridden, num_forced, loss = totals[-3:].tolist()
        mean = counts.mean(1, keepdim=True).clamp(min=1e-9)
        metrics = {"expert_load_max": float((counts / mean).max()), "expert_dead": float((counts == 0).double().mean())}
        if num_forced:
            metrics["router_differs"] = num_overridden / num_forced
        if self.coefficient:
            metrics["router_aux_loss"] = loss / max(1, self.steps)
        return metrics
