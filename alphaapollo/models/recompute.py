"""Gradient checkpointing: layers that keep little for the backward pass, in which they are computed again.

    enable_gradient_checkpointing   what a layer keeps
    true, or N: every N-th layer    its input
    selective                       its input, and the results of its matrix products and of fused attention

With activation_offload, the inputs are kept in host memory (models/activation_offload.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from alphaapollo.config.schema import Model
from alphaapollo.models.activation_offload import ActivationOffloader
from alphaapollo.models.decoder import find_decoder_layers, find_vision_blocks
from alphaapollo.models.expert_parallel import keep_split_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::_grouped_mm": 0, "mkldnn::_linear_pointwise": 0}
"""Operations that multiply activations by weights, and the index of the argument with the activations."""
ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
    "flash_attn::_flash_attn_varlen_forward",
)
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]  # of the forward pass and the recomputation


def recompute_layers(loaded: PreTrainedModel, model: Model) -> None:
    """Let decoder layers and blocks of a vision tower be recomputed in the backward pass, as the model section says.
    Transformers' own checkpointing needs layers in training mode, in which some models apply dropout."""
    if not model.enable_gradient_checkpointing:
        return
    if model.keeps_products:
        _check_rotary_embeddings(find_decoder_layers(loaded))
    offloader = ActivationOffloader() if model.activation_offload else None
    for layers, uses in ((find_decoder_layers(loaded), offloader), (find_vision_blocks(loaded), None)):
        chosen = layers[model.recompute_interval - 1 :: model.recompute_interval]
        for layer in chosen:
            place = (layer is chosen[0], layer is chosen[-1])
            layer.forward = _RecomputedForward(layer.forward, model.keeps_products, uses, *place)


def _check_rotary_embeddings(layers: Sequence[nn.Module]) -> None:
    """Raise ValueError if the layers rotate queries and keys with Liger's kernel, which overwrites kept results."""
    module = sys.modules[type(layers[0]).__module__]
    if "liger" in str(getattr(getattr(module, "apply_rotary_pos_emb", None), "__module__", "")):
        raise ValueError(
            "model.enable_gradient_checkpointing=selective: another model of this process uses Liger's rotary "
            "embeddings, which overwrite kept results. Set use_liger=false for it, or use another process."
        )


@dataclass(eq=False)
class _RecomputedForward:
    """Forward method of a layer that is recomputed in the backward pass."""

    compute: Callable[..., Any]
    keeps_products: bool
    offloader: ActivationOffloader | None
    is_first: bool  # of the model's recomputed layers
    is_last: bool

    def __call__(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Any:
        contexts = partial(_make_selective_contexts, hidden_states.shape[-1])
        hooks = self.offloader.make_hooks(self.is_first, self.is_last) if self.offloader else nullcontext()
        with hooks:  # they apply to arguments of `checkpoint`, i.e. to the hidden states only
            return checkpoint(
                lambda states: self.compute(states, *arguments, **options),
                hidden_states,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=contexts if self.keeps_products else keep_split_sizes,
            )


def _make_selective_contexts(hidden_size: int) -> Contexts:
    """Return the contexts of a layer that keeps results of products and of attention (`context_fn` of checkpoint)."""
    modes, sizes = create_selective_checkpoint_contexts(partial(_choose_policy, hidden_size)), keep_split_sizes()
    return _enter_both(modes[0], sizes[0]), _enter_both(modes[1], sizes[1])


@contextmanager
def _enter_both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


def _choose_policy(hidden_size: int, _: object, operation: Any, *arguments: Any, **__: Any) -> CheckpointPolicy:
    """Keep the result of attention, and of a product with at least hidden_size / 2 inputs per output: others, e.g. of
    LoRA's B, take more memory than their time is worth."""
    name = operation.name()
    is_kept = name in ATTENTION
    if (index := PRODUCTS.get(name)) is not None:
        is_kept = 2 * arguments[index].shape[-1] >= hidden_size
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
