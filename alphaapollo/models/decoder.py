"""The decoder below the head: a micro-batch through it, and where its layers are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from alphaapollo.models.attention.backends import trunk_arguments
from alphaapollo.models.micro_batch import MicroBatch
from alphaapollo.models.ulysses import Positions

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def response_states(trunk: nn.Module, micro: MicroBatch) -> Tensor:
    """The hidden states from which each response token is predicted, those of this rank. -> [m, H]"""
    return states_at(trunk, micro, micro.states)


def states_at(trunk: nn.Module, micro: MicroBatch, positions: Positions) -> Tensor:
    """The hidden states of this rank's tokens of `positions`. -> [m, H]"""
    output: Any = trunk(
        input_ids=micro.token_ids,
        position_ids=micro.position_ids,
        use_cache=False,
        **trunk_arguments(micro),
    )
    states: Tensor = output[0]
    return states.flatten(0, 1).index_select(0, positions.local)


def head_size(config: PretrainedConfig) -> int:
    """Numbers of one attention head; of a text configuration."""
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks that FSDP gathers one at a time: what the model says must not be split, else its longest list."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if layers:
        return layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))
