"""Mixture of experts (MoE): statistics of the routers' choices, routing replay, and the load-balancing loss.

    hidden states -> router -> logits [n, E], weights [n, k], experts [n, k] -> experts

`Routers` wraps the forward method of each router. In a pass with forced experts (rollout routing replay, arXiv
2510.11370) a router uses the engine's choice of experts, but computes the weights and gradients of the experts itself.
`RoutingPass` collects the statistics of a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from alphaapollo.config.schema import Model
from alphaapollo.models.decoder import find_decoder_layers
from alphaapollo.models.load import load_without_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of a mixture of experts, from its configuration."""

    num_experts: int  # experts per layer
    per_token: int  # experts that a router chooses per token

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> ExpertSizes | None:
        """Read the sizes from a model's configuration; None for a dense model."""
        text = config.get_text_config()
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next((count for name in names if (count := getattr(text, name, None))), 0)
        per_token = getattr(text, "num_experts_per_tok", None) or getattr(text, "moe_topk", None) or 0
        return cls(experts, per_token) if experts > 1 and per_token else None


@dataclass(eq=False)
class RoutingPass:
    """Routing record of one forward pass over n tokens. L counts all decoder layers, also those without experts."""

    is_real: Tensor  # bool [n]: false for padding
    forced: Tensor | None  # integers [n, L, k]: experts to use
    counts: Tensor  # float32 [L, E]: real tokens sent to each expert
    num_changed: Tensor  # float32 []: forced choices of real tokens that the router would not have made
    needs_probabilities: bool  # for load_balancing_loss
    probabilities: Tensor | None = None  # float32 [E]: summed over layers and real tokens; has a gradient
    is_open: bool = True  # false after the forward pass: recomputations by gradient checkpointing are not recorded

    def record(self, layer: int, logits: Tensor, experts: Tensor, router_choice: Tensor) -> None:
        """Record a router's logits [n, E], the used experts [n, k] and the router's unforced choice [n, k]."""
        real = self.is_real.type_as(self.counts)
        # Recomputations compute this, too, because they must save the same tensors for the backward pass.
        share = (logits.float().softmax(-1) * real[:, None]).sum(0) if self.needs_probabilities else None
        if not self.is_open:
            return
        if share is not None:
            self.probabilities = share if self.probabilities is None else self.probabilities + share
        spread = real[:, None].expand(experts.shape).reshape(-1)
        self.counts[layer].scatter_add_(0, experts.reshape(-1), spread)
        if self.forced is not None:
            changed = (experts[:, :, None] != router_choice[:, None, :]).all(-1)
            self.num_changed += (changed * real[:, None]).sum()


class Routers:
    """Routers of one model.

    `begin_pass` starts a forward pass. The caller sets `is_open` of the result to false after the pass. Forced experts
    are used until the next `begin_pass`, so the backward pass uses them, too.
    """

    def __init__(self, model: PreTrainedModel, sizes: ExpertSizes):
        self.sizes = sizes
        layers = find_decoder_layers(model)
        self.num_layers = len(layers)
        self.needs_probabilities = False  # collect `probabilities` for load_balancing_loss in passes with gradients
        self.current: RoutingPass | None = None  # None: do not record or force the next forward pass
        kinds = _find_router_classes(model)
        found = [(i, part) for i, layer in enumerate(layers) for part in layer.modules() if isinstance(part, kinds)]
        if not all(_is_supported(router, sizes, model.config) for _, router in found):
            found = []
        self.layers = [layer for layer, _ in found]  # indices of the decoder layers with a router
        for layer, router in found:
            router.forward = self._wrap_forward(router.forward, layer)

    @classmethod
    def wrap(cls, model: PreTrainedModel) -> Routers | None:
        """Wrap the routers of a model. Returns None if the model has no routers or unsupported routers."""
        sizes = ExpertSizes.from_config(model.config)
        routers = cls(model, sizes) if sizes else None
        return routers if routers and routers.layers else None

    def begin_pass(self, is_real: Tensor, forced: Tensor | None) -> RoutingPass:
        """Start a pass over tokens of any shape. `forced`: that shape + [L, k]. Raises ValueError for other L or k."""
        if forced is not None and forced.shape[-2:] != (self.num_layers, self.sizes.per_token):
            raise ValueError(
                f"rollout.router_replay: the engine returned experts of shape {list(forced.shape[-2:])} (layers, "
                f"experts per token), the model has {[self.num_layers, self.sizes.per_token]}. Set the key to false."
            )
        counts = torch.zeros(self.num_layers, self.sizes.num_experts, device=is_real.device)
        self.current = RoutingPass(
            is_real=is_real.flatten(),
            forced=None if forced is None else forced.reshape(-1, *forced.shape[-2:]),
            counts=counts,
            num_changed=counts.new_zeros(()),
            needs_probabilities=self.needs_probabilities and torch.is_grad_enabled(),
        )
        return self.current

    def _wrap_forward(self, forward: Callable[..., Any], layer: int) -> Callable[..., Any]:
        def route(*arguments: Any, **keywords: Any) -> Any:
            current = self.current
            if current is None:
                return forward(*arguments, **keywords)
            forced = None if current.forced is None else current.forced[:, layer].long()
            with _TopKOverride(self.sizes, forced) as override:
                output = forward(*arguments, **keywords)
            assert override.router_choice is not None, "_is_supported has checked this"
            current.record(layer, output[0], output[2], override.router_choice)
            return output

        return route


class _TopKOverride(TorchFunctionMode):
    """Context manager in which torch.topk over a router's E scores returns the forced experts, if any."""

    def __init__(self, sizes: ExpertSizes, forced: Tensor | None):
        super().__init__()
        self.sizes, self.forced = sizes, forced
        self.router_choice: Tensor | None = None  # experts that topk returns without forcing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0]
        if scores.shape[-1] != self.sizes.num_experts or result[1].shape[-1] != self.sizes.per_token:
            return result  # topk over groups of experts
        self.router_choice = result[1].reshape(-1, self.sizes.per_token)
        if self.forced is None:
            return result
        forced = self.forced.view(result[1].shape)
        return torch.return_types.topk((scores.gather(-1, forced), forced))


def load_balancing_loss(counts: Tensor, probabilities: Tensor, tokens: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """Compute the MoE auxiliary loss as transformers does (arXiv 2101.03961, equations 4 to 6, over all layers).

    The loss is E sum_e f_e P_e, with f_e the share of tokens sent to expert e and P_e its mean router probability.
    Its value is k if the load is even.

    Args:
        counts: [E] tokens per expert, constants.
        probabilities: [E], summed over tokens and layers; has the gradient.
        tokens: [] number of tokens times layers.
        weight: `tokens` divided by the tokens times layers of the optimizer step.
    """
    return counts.shape[0] * (counts / tokens * (probabilities / tokens)).sum() * weight


def check_routers(model: Model, key: str, balance: bool) -> None:
    """Raise ValueError if a model lacks routers or, with `balance`, a load-balancing loss, which `key` needs."""
    loaded = load_without_weights(model)
    if Routers.wrap(loaded) is None:
        raise ValueError(
            f"{key}: {type(loaded).__name__} is not a mixture of experts with supported routers (docs/moe.md). Remove "
            "the key."
        )
    if balance and not hasattr(loaded.config.get_text_config(), "router_aux_loss_coef"):
        raise ValueError(f"{key}: transformers has no load-balancing loss for {type(loaded).__name__}. Remove the key.")


@torch.no_grad()
def _is_supported(router: nn.Module, sizes: ExpertSizes, config: PretrainedConfig) -> bool:
    """Return whether a router returns logits, weights and experts, chosen by torch.topk. Tries it on three tokens."""
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
    expected = [(3, sizes.num_experts), (3, sizes.per_token), (3, sizes.per_token)]
    return override.router_choice is not None and shapes == expected and not output[2].is_floating_point()


def _find_router_classes(model: PreTrainedModel) -> tuple[type[nn.Module], ...]:
    """Find the router classes, from the outputs that transformers records as router logits."""
    recorded: dict[str, Any] = {}
    for module in (model, model.base_model):
        recorded |= getattr(module, "_can_record_outputs", None) or {}
    recorders = recorded.get("router_logits", ())
    recorders = recorders if isinstance(recorders, list) else [recorders]
    targets = [getattr(recorder, "target_class", None) for recorder in recorders]
    return tuple(target for target in targets if isinstance(target, type))
