"""Images and token sequences for tests of vision-language models, and their log-probs from plain transformers."""

from __future__ import annotations

import functools
import inspect
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alphaapollo.data.images import ImageProcessor, find_placeholder_ids, load_image_processor
from alphaapollo.types import ImageInput, Row

SIZES = [(32, 48), (60, 20), (100, 40)]  # height and width in pixels


def make_test_image(height: int, width: int, seed: int = 0) -> bytes:
    from PIL import Image

    pixels = np.random.default_rng((seed, height, width)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG")
    return encoded.getvalue()


@functools.cache
def load_processor(folder: Path) -> ImageProcessor:
    from transformers import AutoTokenizer

    processor = load_image_processor(str(folder), AutoTokenizer.from_pretrained(folder))
    assert processor is not None
    return processor


def prepare_encoded_images(folder: Path) -> list[ImageInput]:
    """Three images of different sizes."""
    return [load_processor(folder).prepare(make_test_image(*size)) for size in SIZES]


def make_row(images: Sequence[ImageInput], response: Sequence[int] = (70, 71, 72), seed: int = 0) -> Row:
    """Row with text before, between and after images."""
    text = np.random.default_rng(seed).integers(0, 250, (len(images) + 1, 3)).tolist()
    prompt = text[0] + [
        token for image, after in zip(images, text[1:], strict=True) for token in [*image.token_ids, *after]
    ]
    mask = [0] * len(prompt) + [1] * len(response)
    return Row([*prompt, *response], mask, [0.0] * len(mask), [len(mask) - 1], images=tuple(images))


def make_rows_with_images(folder: Path) -> list[Row]:
    """Rows with 1, 0, 2 and 3 images, of which some are in several rows, and an image in the response."""
    first, second, third = prepare_encoded_images(folder)
    cases = [(first,), (), (second, first), (third, first, second)]
    rows = [make_row(images, seed=index) for index, images in enumerate(cases)]
    later = make_row([third], seed=7)
    mask = [0, 0, 1, *later.action_mask[3:]]
    return [*rows, Row(later.token_ids, mask, later.logprobs, [2, len(mask) - 1], images=later.images)]


def load_plain(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def make_plain_arguments(plain: Any, row: Row) -> dict[str, torch.Tensor]:
    """Arguments with which transformers computes a row and its own position ids."""
    accepted = inspect.signature(plain.forward).parameters
    token_ids = torch.tensor([row.token_ids])
    names = row.images[0].tensors if row.images else ()
    arguments = {
        name: torch.cat([torch.from_numpy(image.tensors[name]) for image in row.images])
        for name in names
        if name in accepted
    }
    if row.images and "mm_token_type_ids" in accepted:
        arguments["mm_token_type_ids"] = (token_ids == row.images[0].placeholder_id).int()
    return {"input_ids": token_ids, **arguments}


def compute_plain_logprobs(plain: Any, row: Row, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of the response over the vocabulary without placeholder tokens."""
    logits = plain(**make_plain_arguments(plain, row)).logits[0, :-1] / temperature
    logits[:, list(find_placeholder_ids(plain.config))] = -1e9
    targets = torch.tensor(row.token_ids[1:])[:, None]
    return logits.log_softmax(-1).gather(1, targets)[row.response_start - 1 :, 0]
