"""Mixture of experts: what the routers of a model choose, seen and forced.

    hidden states -> router -> logits [n, E], weights [n, k], experts [n, k] -> experts

`Routers` wraps each router's forward. In a pass with forced experts (rollout routing replay, arXiv 2510.11370) the
router computes as ever, but takes the experts that the engine took; their weights, and with them the gradient, are its
own. What a pass shows is in its `RoutingPass`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from alphaapollo.config.schema import Model
from alphaapollo.models.decoder import decoder_layers
from alphaapollo.models.load import load_without_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class ExpertSizes:
    """Of a model's configuration."""

    num_experts: int  # that a router chooses from
    chosen: int  # experts a token

    @classmethod
    def of(cls, config: PretrainedConfig) -> ExpertSizes | None:
        """None for a dense model."""
        text = config.get_text_config()
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next((count for name in names if (count := getattr(text, name, None))), 0)
        chosen = getattr(text, "num_experts_per_tok", None) or getattr(text, "moe_topk", None) or 0
        return cls(experts, chosen) if experts > 1 and chosen else None


@dataclass(eq=False)
class RoutingPass:
    """One forward pass over n tokens: what is forced, and what was seen. L counts decoder layers, also those without
    experts."""

    is_real: Tensor  # bool [n]: no padding
    forced: Tensor | None  # integers [n, L, k]
    counts: Tensor  # float32 [L, E]: real tokens that went to each expert
    differs: Tensor  # float32 []: forced choices of real tokens that the router would not have made
    balances: bool  # its probabilities are wanted, for balance_loss
    probabilities: Tensor | None = None  # float32 [E]: summed over layers and real tokens; has a gradient
    is_open: bool = True  # false after the forward pass: checkpointing computes again in the backward pass

    def note(self, layer: int, logits: Tensor, experts: Tensor, own: Tensor) -> None:
        """What a router has said: its logits [n, E], the experts that were taken and those it would take [n, k]."""
        real = self.is_real.type_as(self.counts)
        share = (logits.float().softmax(-1) * real[:, None]).sum(0) if self.balances else None
        if not self.is_open:
            return  # checkpointing has computed again what a gradient needs
        if share is not None:
            self.probabilities = share if self.probabilities is None else self.probabilities + share
        spread = real[:, None].expand(experts.shape).reshape(-1)
        self.counts[layer].scatter_add_(0, experts.reshape(-1), spread)
        if self.forced is not None:
            missing = (experts[:, :, None] != own[:, None, :]).all(-1)
            self.differs += (missing * real[:, None]).sum()


class Routers:
    """The routers of one model. `begin` opens a pass, `end` closes what it notes; what is forced stays so for the
    backward pass, until the next `begin`."""

    def __init__(self, model: PreTrainedModel, sizes: ExpertSizes):
        self.sizes = sizes
        layers = decoder_layers(model)
        self.num_layers = len(layers)
        self.balances = False  # passes with a gradient note what balance_loss needs
        self.now: RoutingPass | None = None
        kinds = _router_classes(model)
        found = [(i, one) for i, layer in enumerate(layers) for one in layer.modules() if isinstance(one, kinds)]
        if not all(_is_known(router, sizes, model.config) for _, router in found):
            found = []
        self.layers = [layer for layer, _ in found]
        for layer, router in found:
            router.forward = self._wrapped(router.forward, layer)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Routers | None:
        """None where there are none, or others than those that this file knows."""
        sizes = ExpertSizes.of(model.config)
        routers = cls(model, sizes) if sizes else None
        return routers if routers and routers.layers else None

    def begin(self, is_real: Tensor, forced: Tensor | None) -> RoutingPass:
        """Args: see RoutingPass; any shape [.., ] and [.., L, k]."""
        if forced is not None and forced.shape[-2:] != (self.num_layers, self.sizes.chosen):
            raise ValueError(
                f"rollout.router_replay: the engine returned experts of {list(forced.shape[-2:])} (layers, experts a "
                f"token), but the model has {[self.num_layers, self.sizes.chosen]}. Set it to false."
            )
        counts = torch.zeros(self.num_layers, self.sizes.num_experts, device=is_real.device)
        self.now = RoutingPass(
            is_real=is_real.flatten(),
            forced=None if forced is None else forced.reshape(-1, *forced.shape[-2:]),
            counts=counts,
            differs=counts.new_zeros(()),
            balances=self.balances and torch.is_grad_enabled(),
        )
        return self.now

    def end(self) -> None:
        if self.now is not None:
            self.now.is_open = False

    def forget(self) -> None:
        """The next pass is nobody's."""
        self.now = None

    def _wrapped(self, forward: Callable[..., Any], layer: int) -> Callable[..., Any]:
        def route(*arguments: Any, **keywords: Any) -> Any:
            now = self.now
            if now is None:
                return forward(*arguments, **keywords)
            wanted = None if now.forced is None else now.forced[:, layer].long()
            with _Choice(self.sizes, wanted) as choice:
                output = forward(*arguments, **keywords)
            assert choice.own is not None, "_is_known has seen to it"
            now.note(layer, output[0], output[2], choice.own)
            return output

        return route


class _Choice(TorchFunctionMode):
    """Within, the top k of a router's E numbers are the wanted experts; `own`: what they would have been."""

    def __init__(self, sizes: ExpertSizes, wanted: Tensor | None):
        super().__init__()
        self.sizes, self.wanted = sizes, wanted
        self.own: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0]
        if scores.shape[-1] != self.sizes.num_experts or result[1].shape[-1] != self.sizes.chosen:
            return result  # of groups of experts
        self.own = result[1].reshape(-1, self.sizes.chosen)
        if self.wanted is None:
            return result
        wanted = self.wanted.view(result[1].shape)
        return torch.return_types.topk((scores.gather(-1, wanted), wanted))


def balance_loss(counts: Tensor, probabilities: Tensor, tokens: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """The load-balancing loss of transformers (arXiv 2101.03961, equations 4 to 6; top k of all layers together):
    E sum_e f_e P_e with f_e the tokens an expert gets, P_e the mean probability of its router, both a token and layer.
    It is k where the load is even.

    Args:
        counts: [E], constants.
        probabilities: [E], summed over tokens and layers; has the gradient.
        tokens: [] x layers, that the counts are of.
        weight: of these tokens among all.
    """
    return counts.shape[0] * (counts / tokens * (probabilities / tokens)).sum() * weight


def check_routers(model: Model, key: str, balance: bool) -> None:
    """ValueError: a model, built without weights, that has no routers, or with `balance` none of a kind for which
    transformers has a load-balancing loss. `key`: for which they are needed."""
    loaded = load_without_weights(model)
    if Routers.of(loaded) is None:
        raise ValueError(
            f"{key}: {type(loaded).__name__} is no mixture of experts, or none whose routers are known (docs/moe.md). "
            "Leave it out."
        )
    if balance and not hasattr(loaded.config.get_text_config(), "router_aux_loss_coef"):
        raise ValueError(f"{key}: transformers has no such loss for {type(loaded).__name__}. Leave it out.")


@torch.no_grad()
def _is_known(router: nn.Module, sizes: ExpertSizes, config: PretrainedConfig) -> bool:
    """Tried on three tokens: it answers with logits, weights and experts, and takes them by torch.topk."""
    parameter = next(router.parameters(), None)
    if parameter is None:
        return False
    tokens = torch.zeros(3, config.get_text_config().hidden_size, dtype=parameter.dtype, device=parameter.device)
    with _Choice(sizes, None) as choice:
        try:
            output = router(tokens)
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):  # it wants something else
            return False
    shapes = [tuple(one.shape) for one in output if isinstance(one, Tensor)] if isinstance(output, tuple) else []
    expected = [(3, sizes.num_experts), (3, sizes.chosen), (3, sizes.chosen)]
    return choice.own is not None and shapes == expected and not output[2].is_floating_point()


def _router_classes(model: PreTrainedModel) -> tuple[type[nn.Module], ...]:
    """Those whose logits transformers records, as (logits, weights, experts)."""
    recorded: dict[str, Any] = {}
    for module in (model, model.base_model):
        recorded |= getattr(module, "_can_record_outputs", None) or {}
    recorders = recorded.get("router_logits", ())
    targets = [
        getattr(one, "target_class", None) for one in (recorders if isinstance(recorders, list) else [recorders])
    ]
    return tuple(target for target in targets if isinstance(target, type))
