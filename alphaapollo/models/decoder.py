"""Decoder of a language model, without the output head: compute hidden states, and find the decoder layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from alphaapollo.config.schema import Model
from alphaapollo.data.images import load_image_processor, make_example_image, reads_images
from alphaapollo.models.image_batch import ImageBatch
from alphaapollo.models.micro_batch import MicroBatch
from alphaapollo.models.ulysses import TokenSelection
from alphaapollo.types import ImageInput

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


def describe_stateful_layers(config: PretrainedConfig) -> str:
    """Describe the layer types in config.json that carry state along the sequence outside of attention, for messages;
    empty if there are none."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or [])
    stateful = ", ".join(sorted(kinds - {"full_attention", "sliding_attention"}))
    return f"has layers of type {stateful}, which carry state along the sequence" if stateful else ""


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


def find_language_model(model: PreTrainedModel) -> Any:
    """Return the decoder of a vision-language model, without head and vision tower. A text model is returned as is."""
    base = getattr(model, "base_model", model)
    return base.language_model if hasattr(base, "get_image_features") else model


def find_vision_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules of the vision tower: children of the base model except the language model."""
    language = find_language_model(model)
    return [] if language is model else [part for part in model.base_model.children() if part is not language]


def find_vision_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Return the blocks of the vision tower: the modules in its longest module list."""
    modules = [module for part in find_vision_modules(model) for module in part.modules()]
    return list(max((module for module in modules if isinstance(module, nn.ModuleList)), key=len, default=[]))


def replace_placeholder_ids(token_ids: np.ndarray, placeholder_ids: Sequence[int]) -> np.ndarray:
    """Replace image placeholders by the smallest other id. Self-checks use arbitrary ids as text, without images."""
    other = next(token_id for token_id in range(len(placeholder_ids) + 1) if token_id not in placeholder_ids)
    return np.where(np.isin(token_ids, placeholder_ids), other, token_ids)


def load_example_image(model: Model) -> ImageInput | None:
    """Prepare a generated image with the model's processor, for self-checks. None if the model reads no images."""
    from transformers import AutoConfig, AutoTokenizer

    trusts = model.trust_remote_code
    if not reads_images(AutoConfig.from_pretrained(model.path, trust_remote_code=trusts)):
        return None
    tokenizer = AutoTokenizer.from_pretrained(model.tokenizer_path or model.path, trust_remote_code=trusts)
    processor = load_image_processor(model.path, tokenizer, trusts)
    assert processor is not None
    return processor.prepare(make_example_image())


def make_image_arguments(method: Callable[..., object], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Select the tensors of a processor that a method of the model takes. Some processors return further tensors."""
    accepted = inspect.signature(method).parameters
    return {name: tensor for name, tensor in tensors.items() if name in accepted}


def embed_tokens_and_images(model: PreTrainedModel, token_ids: Tensor, images: ImageBatch) -> dict[str, object]:
    """Compute the embeddings [b, T, H] of this rank's tokens [b, T] and images. Returns the inputs of the language
    model."""
    output = model.get_image_features(**make_image_arguments(model.get_image_features, images.tensors))
    embeddings: Tensor = model.get_input_embeddings()(token_ids)
    tokens = embeddings.flatten(0, 1)
    features = _select_features(output.pooler_output, images).to(tokens.dtype)
    inputs: dict[str, object] = {"inputs_embeds": tokens.index_copy(0, images.positions, features).view_as(embeddings)}
    if deepstack := getattr(output, "deepstack_features", None):  # for the first layers of the decoder (Qwen3-VL)
        mask = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
        inputs["visual_pos_masks"] = mask.index_fill(0, images.positions, value=True).view(token_ids.shape)
        inputs["deepstack_visual_embeds"] = [_select_features(layer, images) for layer in deepstack]
    return inputs


def _select_features(features: Tensor | tuple[Tensor, ...] | list[Tensor], images: ImageBatch) -> Tensor:
    """Select the image features of this rank's placeholders, [m, H]. `features`: one tensor per image, or a tensor
    [crops, n, H]."""
    joined: Tensor = torch.cat(list(features)) if isinstance(features, tuple | list) else features.flatten(0, -2)
    assert len(joined) == images.num_features, f"{len(joined)} image features for {images.num_features} placeholders"
    return joined.index_select(0, images.feature_indices)


def add_zero_vision_gradients(model: PreTrainedModel, states: Tensor) -> Tensor:
    """Add 0 times the parameters of a trained vision tower to hidden states, so that each parameter has a gradient on
    every rank, even if the rank has no images. FSDP requires this."""
    if not torch.is_grad_enabled():
        return states
    parameters = [parameter for part in find_vision_modules(model) for parameter in part.parameters()]
    trained = [parameter.sum() for parameter in parameters if parameter.requires_grad]
    return states + 0 * torch.stack(trained).sum().to(states.dtype) if trained else states
