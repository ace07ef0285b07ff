"""Shared prefixes of prompts with images. Placeholders have the token id 9."""

from __future__ import annotations

import numpy as np

from alphaapollo.batching.shared_prompts import find_shared_prompts
from alphaapollo.types import ImageInput, Row


def encoded_image(digest: str, size: int = 3) -> ImageInput:
    return ImageInput({"pixel_values": np.zeros((size, 2), np.float32)}, [8, *[9] * size], 9, digest)


def row(images: list[ImageInput], after: list[int]) -> Row:
    """Prompt 1, images, `after`; response 2, 2."""
    tokens = [1, *[token for image in images for token in image.token_ids], *after, 2, 2]
    return Row(tokens, [0] * (len(tokens) - 2) + [1, 1], [0.0] * len(tokens), [len(tokens) - 1], images=tuple(images))


def find(rows: list[Row]) -> tuple[list[int], list[int]]:
    prefixes = find_shared_prompts(rows, [0] * len(rows))
    return prefixes.prefix_ids.tolist(), prefixes.lengths.tolist()


def test_samples_of_one_prompt_share_it_with_its_images():
    ids, lengths = find([row([encoded_image("a"), encoded_image("b")], [5]) for _ in range(3)])
    assert len(set(ids)) == 1 and lengths == [10, 10, 10]


def test_prompts_with_other_images_share_no_placeholder():
    """The tokens are equal. The common prefix ends after the token before the first placeholder, or after an image."""
    ids, lengths = find([row([encoded_image("a")], [5]), row([encoded_image("b")], [5])])
    assert ids[0] == ids[1] and lengths == [2, 2]
    ids, lengths = find(
        [row([encoded_image("a"), encoded_image("b")], [5]), row([encoded_image("a"), encoded_image("c")], [5])]
    )
    assert ids[0] == ids[1] and lengths == [6, 6]


def test_a_prefix_ends_before_an_image_of_another_size():
    ids, lengths = find([row([encoded_image("a", 2)], [9 + 1, 4]), row([encoded_image("b", 5)], [4])])
    assert ids[0] == ids[1] and lengths == [2, 2]


def test_turns_with_own_prompts_share_the_images_of_earlier_turns():
    turns = [
        row([encoded_image("a")], [5]),
        row([encoded_image("a")], [5, 6]),
        row([encoded_image("a"), encoded_image("b")], [7]),
    ]
    ids, lengths = find(turns)
    assert len(set(ids)) == 1 and lengths == [5, 5, 5]
