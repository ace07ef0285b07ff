from __future__ import annotations

from typing import Any

import numpy as np

from alphaapollo.engines.weight_sync.verification import Probe
from alphaapollo.session.publish import make_probe
from alphaapollo.types import ImageInput

PAD = 9


class Images:
    """Image processor for which every image has four tokens."""

    placeholder_id = PAD

    def prepare(self, encoded_image: bytes) -> ImageInput:
        assert encoded_image.startswith(b"\x89PNG")
        return ImageInput({"pixel_values": np.zeros(1)}, [7, PAD, PAD, 8], PAD, "digest")


class TextRenderer:
    images: Any = None

    def encode_prompt(self, content: str) -> list[int]:
        return [int(digit) for digit in content]


class VisionRenderer(TextRenderer):
    images = Images()


def test_probe_of_a_text_model_repeats_the_prompt() -> None:
    renderer: Any = TextRenderer()
    assert make_probe(renderer, "123", 5) == Probe([1, 2, 3, 1, 2])
    assert len(make_probe(renderer, "1", 500).token_ids) == 64
    token_ids, sampling = make_probe(renderer, "123", 5).make_sample_request()
    assert (token_ids, sampling.max_tokens) == ([1, 2, 3], 2)


def test_probe_of_a_vision_model_begins_with_an_image() -> None:
    """The image of the prompt (two placeholders) is left out, because its pixels are not part of the probe."""
    renderer: Any = VisionRenderer()
    probe = make_probe(renderer, "12993", 8)
    assert probe.token_ids == [7, PAD, PAD, 8, 1, 2, 3, 1] and len(probe.images) == 1
    assert len(make_probe(renderer, "1", 500).token_ids) == 4 + 64
    assert make_probe(renderer, "1", 5).make_sample_request()[0] == [7, PAD, PAD, 8], "the image stays complete"
    assert make_probe(renderer, "12", 4) == Probe([1, 2, 1, 2]), "the image does not fit"


def test_placeholders_are_not_compared() -> None:
    image = ImageInput({}, [7, PAD, PAD, 8], PAD, "digest")
    assert Probe([7, PAD, PAD, 8, 1], (image,)).select_text([-1e9, -1e9, -0.5, -0.25]) == [-0.5, -0.25]
    assert Probe([7, PAD]).select_text([-3.0]) == [-3.0]
