"""Tokens, and for a vision-language model an image, by whose log-probs weight syncs are verified."""

from __future__ import annotations

from alphaapollo.data.images import make_example_image
from alphaapollo.data.rendering import Renderer
from alphaapollo.types import ImageInput, Message
from alphaapollo.weight_sync.verification import Probe

PROBE_TOKENS = 64


def make_probe(renderer: Renderer, content: list[Message] | str, max_tokens: int) -> Probe:
    """Make a probe of at most `max_tokens` tokens: a generated image if the model has vision, and the start of the
    text of a prompt. The image comes first, so that the log-probs of the text depend on it."""
    text = renderer.encode_prompt(content)
    images: tuple[ImageInput, ...] = ()
    if renderer.images is not None:
        text = [token for token in text if token != renderer.images.placeholder_id]
        image = renderer.images.prepare(make_example_image())
        images = (image,) * (len(image.token_ids) < max_tokens)  # if it does not fit, prompts have no images either
    token_ids = [token for image in images for token in image.token_ids]
    length = min(PROBE_TOKENS, max_tokens - len(token_ids))
    return Probe(token_ids + (text * PROBE_TOKENS)[:length], images)  # a prompt may be a single token
