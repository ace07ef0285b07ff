"""Convert prepared images to vLLM's multimodal inputs, so that vLLM itself does not preprocess images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from alphaapollo.data.images import CACHE_SIZE, EXCLUDED_LOGIT, find_placeholders
from alphaapollo.types import ImageInput

if TYPE_CHECKING:
    from vllm.inputs.engine import MultiModalInput
    from vllm.multimodal.inputs import MultiModalKwargsItem, PlaceholderRange
    from vllm.multimodal.processing import BaseMultiModalProcessor


class ImagePromptBuilder:
    """Builder of vLLM's prompts with images. `processor`: vLLM's multimodal processor of the model, which knows how
    the processed tensors of an image are passed to the model."""

    def __init__(self, processor: BaseMultiModalProcessor[Any]):
        self._processor = processor
        self._build_item_cached = lru_cache(CACHE_SIZE)(self._build_item)

    def build_prompt(self, token_ids: list[int], images: Sequence[ImageInput], cache_salt: str) -> MultiModalInput:
        """Build a prompt from token ids with expanded placeholders and the images in it, in order."""
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import MultiModalKwargsItems

        return mm_input(
            token_ids,
            MultiModalKwargsItems({"image": [self._build_item_cached(image) for image in images]}),
            {"image": [image.digest for image in images]},  # keys of vLLM's prefix and encoder caches
            {"image": find_placeholder_ranges(token_ids, images)},
            cache_salt=cache_salt,
        )

    def _build_item(self, image: ImageInput) -> MultiModalKwargsItem:
        from vllm.multimodal.inputs import MultiModalKwargsItems

        tensors = {name: torch.from_numpy(array) for name, array in image.tensors.items()}
        if "num_patches" in tensors:  # vLLM's names of InternVL's inputs
            tensors["image_num_patches"] = tensors.pop("num_patches")
            tensors["image_token_id"] = torch.tensor(image.placeholder_id)
        fields = self._processor._get_mm_fields_config(tensors, {})
        (item,) = MultiModalKwargsItems.from_hf_inputs(tensors, fields)["image"]
        return item


def find_placeholder_ranges(token_ids: Sequence[int], images: Sequence[ImageInput]) -> list[PlaceholderRange]:
    """Return the range of the placeholders of each image. Other tokens may be between the placeholders."""
    from vllm.multimodal.inputs import PlaceholderRange

    ranges = []
    ends = np.cumsum([image.num_placeholders for image in images])
    for positions in np.split(find_placeholders(token_ids, images), ends[:-1]):
        first, length = int(positions[0]), int(positions[-1] - positions[0]) + 1
        mask = torch.zeros(length, dtype=torch.bool)
        mask[positions - first] = True
        ranges.append(PlaceholderRange(first, length, None if mask.all() else mask))
    return ranges


def exclude_from_logits(model: Any, token_ids: Sequence[int], device: torch.device) -> None:
    """Make a loaded vLLM model return EXCLUDED_LOGIT as logit of `token_ids`, so that they are never sampled."""
    ids = torch.tensor(token_ids, dtype=torch.long, device=device)
    compute_logits = model.compute_logits

    def compute_logits_without_excluded(*arguments: object, **options: object) -> torch.Tensor | None:
        logits = compute_logits(*arguments, **options)
        if logits is not None:  # other tensor-parallel ranks
            logits.index_fill_(1, ids, EXCLUDED_LOGIT)
        return logits

    model.compute_logits = compute_logits_without_excluded


def clear_deepstack_features(model: Any) -> None:
    """Set Qwen3-VL's buffers of image features for its first layers to zeros, which vLLM assumes for prompts without
    images. Sleep frees them, and waking does not restore them."""
    for features in getattr(model, "deepstack_input_embeds", ()):
        features.zero_()
