"""Convert prepared images to vLLM's multimodal inputs, so that vLLM itself does not preprocess images."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from alphaapollo.data.image_messages import IMAGE_PART, ImageReader
from alphaapollo.data.images import CACHE_SIZE, ImageProcessor, find_placeholders, read_image_size
from alphaapollo.types import EncodedImage, ImageInput, JsonObject

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


def clear_deepstack_features(model: Any) -> None:
    """Set Qwen3-VL's buffers of image features for its first layers to zeros, which vLLM assumes for prompts without
    images. Sleep frees them, and waking does not restore them."""
    for features in getattr(model, "deepstack_input_embeds", ()):
        features.zero_()


MAX_PIXELS = 2**24  # of an image in a request
IMAGE_URL = "image_url"  # key of a part with an image in OpenAI's APIs; vLLM converts Anthropic's parts to it


@dataclass(frozen=True)
class ChatImages:
    """Images of a chat, and its messages without them."""

    messages: list[JsonObject]  # with digests instead of images, so that vLLM does not load the images
    images: list[tuple[ImageInput, ...]]  # of each message
    sent: dict[str, EncodedImage]  # images as the client sent them, by digest

    def add_digests(self, conversation: list[JsonObject]) -> list[JsonObject]:
        """Return vLLM's parsed messages, with the content of `messages` in those that have images. vLLM's parser drops
        the digests, but they distinguish chats with different images."""
        assert len(conversation) == len(self.messages)
        triples = zip(conversation, self.messages, self.images, strict=True)
        return [{**parsed, "content": given["content"]} if images else parsed for parsed, given, images in triples]


@dataclass(frozen=True)
class ChatImageReader:
    """Reader of the images of chats. `processor` is None if the policy does not read images."""

    processor: ImageProcessor | None
    allow_urls: bool  # download http(s) URLs

    async def read(self, messages: list[JsonObject]) -> ChatImages:
        """Prepare the images of a chat. Raises ValueError if an image is unusable, or if the policy reads no images."""
        replaced, images, sent = list(messages), list[tuple[ImageInput, ...]](), dict[str, EncodedImage]()
        for index, message in enumerate(messages):
            content = message.get("content") if isinstance(message, dict) else None
            received_parts = content if isinstance(content, list) else []
            prepared: list[ImageInput] = []
            parts: list[JsonObject] = []
            for part in received_parts:
                if isinstance(part, dict) and IMAGE_URL in part:
                    encoded_image, image = await asyncio.to_thread(self._prepare, part[IMAGE_URL])
                    prepared.append(image)
                    sent[image.digest] = encoded_image
                    part = {"type": IMAGE_PART, IMAGE_PART: None, "uuid": image.digest}
                parts.append(part)
            if prepared:
                replaced[index] = {**message, "content": parts}
            images.append(tuple(prepared))
        return ChatImages(replaced, images, sent)

    def _prepare(self, value: object) -> tuple[EncodedImage, ImageInput]:
        if self.processor is None:
            raise ValueError("The chat has an image, but the policy does not read images. Send text only.")
        url = value.get("url") if isinstance(value, dict) else value
        if not isinstance(url, str) or not url.startswith(("data:", "http://", "https://")):
            raise ValueError(f"image_url is {url!r:.80}. Send a data: URL, e.g. data:image/png;base64,...")
        encoded_image = ImageReader(allow_urls=self.allow_urls).read(url)
        width, height = read_image_size(encoded_image)
        if width * height > MAX_PIXELS:
            raise ValueError(f"The image has {width} x {height} pixels. Send one with at most {MAX_PIXELS}.")
        return encoded_image, self.processor.prepare(encoded_image)

    def expand_placeholders(self, token_ids: list[int], images: list[tuple[ImageInput, ...]]) -> list[int]:
        """Replace the placeholder of each image by the tokens of the image."""
        if self.processor is None:
            return token_ids
        return self.processor.expand_placeholders(token_ids, [*chain.from_iterable(images)])
