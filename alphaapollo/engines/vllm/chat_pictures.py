"""Pictures in the chats of agents. The model's image processor prepares them instead of vLLM, as for all rollouts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import chain
from typing import Any

from alphaapollo.data.image_messages import PICTURE_PART, PictureReader
from alphaapollo.data.images import ImageProcessor, read_picture_size
from alphaapollo.types import ImageInput, Picture

MAX_PIXELS = 2**24  # of a picture in a request
IMAGE_URL = "image_url"  # key of a part with a picture in OpenAI's APIs; vLLM converts Anthropic's parts to it


@dataclass(frozen=True)
class ChatPictures:
    """Pictures of a chat: `images` has those of each message."""

    messages: list[Any]  # with digests instead of pictures, so that vLLM does not load them
    images: list[tuple[ImageInput, ...]]
    sent: dict[str, Picture]  # pictures by digest

    def add_digests(self, conversation: list[Any]) -> list[Any]:
        """Replace the content of parsed messages with pictures by parts with digests. vLLM drops them when it parses
        `messages`, but two chats with different pictures are different."""
        assert len(conversation) == len(self.messages)
        triples = zip(conversation, self.messages, self.images, strict=True)
        return [{**parsed, "content": sent["content"]} if images else parsed for parsed, sent, images in triples]


@dataclass(frozen=True)
class ChatPictureReader:
    """Reader of the pictures of chats. `processor` is None if the policy does not read pictures."""

    processor: ImageProcessor | None
    allow_urls: bool  # download http(s) URLs

    async def read(self, messages: list[Any]) -> ChatPictures:
        """Prepare the pictures of a chat. Raises ValueError if one is not usable, or the policy reads none."""
        contents = [message.get("content") if isinstance(message, dict) else None for message in messages]
        replaced, images, sent = list(messages), list[tuple[ImageInput, ...]](), dict[str, Picture]()
        for index, content in enumerate(contents):
            found: list[ImageInput] = []
            parts: list[Any] = []
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict) and IMAGE_URL in part:
                    picture, image = await asyncio.to_thread(self._prepare, part[IMAGE_URL])
                    found.append(image)
                    sent[image.digest] = picture
                    part = {"type": PICTURE_PART, PICTURE_PART: None, "uuid": image.digest}
                parts.append(part)
            if found:
                replaced[index] = {**messages[index], "content": parts}
            images.append(tuple(found))
        return ChatPictures(replaced, images, sent)

    def _prepare(self, value: object) -> tuple[Picture, ImageInput]:
        if self.processor is None:
            raise ValueError("The chat has a picture, but the policy does not read pictures. Send text only.")
        url = value.get("url") if isinstance(value, dict) else value
        if not isinstance(url, str) or not url.startswith(("data:", "http://", "https://")):
            raise ValueError(f"image_url is {url!r:.80}. Send a data: URL, e.g. data:image/png;base64,...")
        picture = PictureReader(allow_urls=self.allow_urls).read(url)
        width, height = read_picture_size(picture)
        if width * height > MAX_PIXELS:
            raise ValueError(f"The picture has {width} x {height} pixels. Send one with at most {MAX_PIXELS}.")
        return picture, self.processor.prepare(picture)

    def expand_placeholders(self, token_ids: list[int], images: list[tuple[ImageInput, ...]]) -> list[int]:
        """Replace the placeholder of each picture by the tokens of the picture."""
        if self.processor is None:
            return token_ids
        return self.processor.expand_placeholders(token_ids, [*chain.from_iterable(images)])
