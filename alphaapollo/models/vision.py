"""Vision-language models: a vision tower computes image features, which replace embeddings of placeholder tokens.

    pixels -> vision tower -> image features [F, H]
    token ids -> embeddings [b, T, H], with features at the placeholders -> language model -> hidden states

"Vision tower" means all modules of the model outside the language model and its head, e.g. also the projector.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from alphaapollo.config.schema import Model
from alphaapollo.data.images import load_image_processor, make_example_picture, reads_pictures
from alphaapollo.models.image_batch import ImageBatch
from alphaapollo.types import ImageInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def find_language_model(model: PreTrainedModel) -> Any:
    """Return the decoder of a vision-language model, without head and vision tower. A text model is returned as is."""
    base = getattr(model, "base_model", model)
    return base.language_model if hasattr(base, "get_image_features") else model


def find_vision_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules of the vision tower: children of the base model except the language model."""
    language = find_language_model(model)
    return [] if language is model else [part for part in model.base_model.children() if part is not language]


def freeze_vision_tower(model: PreTrainedModel) -> None:
    """Exclude the parameters of the vision tower from training."""
    for part in find_vision_modules(model):
        part.requires_grad_(False)


def find_vision_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Return the blocks of the vision tower: the modules in its longest module list."""
    modules = [module for part in find_vision_modules(model) for module in part.modules()]
    return list(max((module for module in modules if isinstance(module, nn.ModuleList)), key=len, default=[]))


def replace_placeholder_ids(token_ids: np.ndarray, placeholder_ids: Sequence[int]) -> np.ndarray:
    """Replace placeholder tokens among arbitrary token ids, which self-checks use as text, by the first other token."""
    other = next(token_id for token_id in range(len(placeholder_ids) + 1) if token_id not in placeholder_ids)
    return np.where(np.isin(token_ids, placeholder_ids), other, token_ids)


def load_example_image(model: Model) -> ImageInput | None:
    """Prepare a generated picture with the model's processor, for self-checks. None if the model reads no pictures.

    Raises ValueError if the model has no processor that can be loaded.
    """
    from transformers import AutoConfig, AutoTokenizer

    trusts = model.trust_remote_code
    if not reads_pictures(AutoConfig.from_pretrained(model.path, trust_remote_code=trusts)):
        return None
    tokenizer = AutoTokenizer.from_pretrained(model.tokenizer_path or model.path, trust_remote_code=trusts)
    processor = load_image_processor(model.path, tokenizer, trusts)
    assert processor is not None
    return processor.prepare(make_example_picture())


def make_image_arguments(method: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Select the tensors of a processor that a method of the model takes; some processors return others, too."""
    accepted = inspect.signature(method).parameters
    return {name: tensor for name, tensor in tensors.items() if name in accepted}


def embed_tokens_and_images(model: PreTrainedModel, token_ids: Tensor, images: ImageBatch) -> dict[str, object]:
    """Compute the embeddings [b, T, H] of tokens and pictures. Returns the inputs of the language model.

    `token_ids`: int64 [b, T], this rank's part.
    """
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


def _select_features(features: Any, images: ImageBatch) -> Tensor:
    """Select the image features of this rank's placeholders, [m, H]. `features`: one tensor per picture, or a tensor
    [crops, n, H]."""
    joined: Tensor = torch.cat(list(features)) if isinstance(features, tuple | list) else features.flatten(0, -2)
    assert len(joined) == images.num_features, f"{len(joined)} image features for {images.num_features} placeholders"
    return joined.index_select(0, images.feature_indices)


def add_zero_vision_gradients(model: PreTrainedModel, states: Tensor) -> Tensor:
    """Add 0 times the parameters of a trained vision tower to hidden states, so that each parameter has a gradient on
    every rank, also if the rank has no pictures. FSDP requires this."""
    if not torch.is_grad_enabled():
        return states
    parameters = [parameter for part in find_vision_modules(model) for parameter in part.parameters()]
    trained = [parameter.sum() for parameter in parameters if parameter.requires_grad]
    return states + 0 * torch.stack(trained).sum().to(states.dtype) if trained else states
