"""Images in the chats of agents. The model's image processor prepares them instead of vLLM, as for all rollouts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import chain
from typing import Any

from alphaapollo.data.image_messages import IMAGE_PART, ImageReader
from alphaapollo.data.images import ImageProcessor, read_image_size
from alphaapollo.types import EncodedImage, ImageInput

MAX_PIXELS = 2**24  # of an image in a request
IMAGE_URL = "image_url"  # key of a part with an image in OpenAI's APIs; vLLM converts Anthropic's parts to it


@dataclass(frozen=True)
class ChatImages:
    """Images of a chat: `images` has those of each message."""

    messages: list[Any]  # with digests instead of images, so that vLLM does not load them
    images: list[tuple[ImageInput, ...]]
    sent: dict[str, EncodedImage]  # images by digest

    def add_digests(self, conversation: list[Any]) -> list[Any]:
        """Replace the content of parsed messages with images by parts with digests. vLLM drops them when it parses
        `messages`, but two chats with different images are different."""
        assert len(conversation) == len(self.messages)
        triples = zip(conversation, self.messages, self.images, strict=True)
        return [{**parsed, "content": sent["content"]} if images else parsed for parsed, sent, images in triples]


@dataclass(frozen=True)
class ChatImageReader:
    """Reader of the images of chats. `processor` is None if the policy does not read images."""

    processor: ImageProcessor | None
    allow_urls: bool  # download http(s) URLs

    async def read(self, messages: list[Any]) -> ChatImages:
        """Prepare the images of a chat. Raises ValueError if one is not usable, or the policy reads none."""
        contents = [message.get("content") if isinstance(message, dict) else None for message in messages]
        replaced, images, sent = list(messages), list[tuple[ImageInput, ...]](), dict[str, EncodedImage]()
        for index, content in enumerate(contents):
            found: list[ImageInput] = []
            parts: list[Any] = []
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict) and IMAGE_URL in part:
                    encoded_image, image = await asyncio.to_thread(self._prepare, part[IMAGE_URL])
                    found.append(image)
                    sent[image.digest] = encoded_image
                    part = {"type": IMAGE_PART, IMAGE_PART: None, "uuid": image.digest}
                parts.append(part)
            if found:
                replaced[index] = {**messages[index], "content": parts}
            images.append(tuple(found))
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
