"""Decoder of a language model, without the output head: compute hidden states, and find the decoder layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from alphaapollo.models.micro_batch import MicroBatch
from alphaapollo.models.ulysses import TokenSelection

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def compute_hidden_states(decoder: nn.Module, micro: MicroBatch, selection: TokenSelection) -> Tensor:
    """Run the decoder, and return the final hidden states [m, H] of the m selected tokens that this rank has."""
    arguments: dict[str, Any] = {"sequence": micro.sequence} if micro.sequence else {}
    if micro.packing:
        arguments["packing"] = micro.packing
    output = decoder(input_ids=micro.token_ids, position_ids=micro.position_ids, use_cache=False, **arguments)
    states: Tensor = output[0]
    return states.flatten(0, 1).index_select(0, selection.shard_positions)


def get_attention_head_size(config: PretrainedConfig) -> int:
    """Return the size of one attention head, from a text model's configuration."""
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def find_decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Find the decoder layers: the modules whose class is in `_no_split_modules`, or else the longest module list."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if layers:
        return layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))
