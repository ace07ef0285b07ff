"""Decoder of a language model, without the output head: compute hidden states, and find the decoder layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from alphaapollo.models.micro_batch import MicroBatch
from alphaapollo.models.ulysses import TokenSelection
from alphaapollo.models.vision import add_zero_vision_gradients, embed_tokens_and_images, find_language_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def compute_hidden_states(model: nn.Module, micro: MicroBatch, selection: TokenSelection) -> Tensor:
    """Run a model without head, and return the final hidden states [m, H] of the m selected tokens of this rank."""
    decoder = find_language_model(model)
    arguments: dict[str, object] = {"sequence": micro.sequence} if micro.sequence else {}
    if micro.packing:
        arguments["packing"] = micro.packing
    if micro.images is None:
        arguments["input_ids"] = micro.token_ids
    else:
        if decoder is model:
            raise ValueError(
                f"rows have images, but {type(model).__name__} is a text model. Choose a vision-language model with "
                "the policy's processor."
            )
        arguments |= embed_tokens_and_images(model, micro.token_ids, micro.images)
    output = decoder(position_ids=micro.position_ids, use_cache=False, **arguments)
    states: Tensor = output[0].flatten(0, 1).index_select(0, selection.shard_positions)
    return states if decoder is model else add_zero_vision_gradients(model, states)


def get_attention_head_size(config: PretrainedConfig) -> int:
    """Return the size of one attention head, from a text model's configuration."""
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def find_decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Find the decoder layers: the modules whose class is in `_no_split_modules`, or else the longest module list. The
    vision tower of a vision-language model is left out."""
    decoder = find_language_model(model)
    names = set(decoder._no_split_modules or ())
    layers = [module for module in decoder.modules() if type(module).__name__ in names]
    if layers:
        return layers
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))
