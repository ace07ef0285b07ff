"""Images of a micro-batch: pixel tensors, the placeholder tokens that they replace, and M-RoPE positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from alphaapollo.batching.batch import Rows, compute_offsets
from alphaapollo.data.images import find_placeholders
from alphaapollo.types import ImageInput


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Distinct images whose placeholder tokens this rank has. The model computes F features from them."""

    tensors: dict[str, Tensor]  # of all images, concatenated: see ImageInput.tensors
    positions: Tensor  # int64 [m]: placeholders in the rank's part of the micro-batch, flattened; ascending
    feature_indices: Tensor  # int64 [m]: image feature of each placeholder
    num_features: int  # F


def make_image_batch(
    rows: Rows,
    flat_indices: np.ndarray,
    find_local: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
    to_device: Callable[[np.ndarray], Tensor],
) -> ImageBatch | None:
    """Make the batch of the images of which this rank has placeholders; None if there are none. An image or prompt that
    rows share is computed once.

    flat_indices: position of each token of the concatenated rows in the micro-batch. find_local: finds this rank's
    tokens among positions; returns their positions in the rank's part, and their indices among the given positions.
    """
    images: dict[str, tuple[int, ImageInput]] = {}
    positions, image_numbers, offsets = [], [], []  # of all placeholders; an offset is an index in the image
    for row, row_images in enumerate(rows.images or ()):
        start = rows.token_offsets[row]
        positions.append(start + find_placeholders(rows.token_ids[start : rows.token_offsets[row + 1]], row_images))
        for image in row_images:
            number, _ = images.setdefault(image.digest, (len(images), image))
            image_numbers.append(np.full(image.num_placeholders, number))
            offsets.append(np.arange(image.num_placeholders))
    if not images:
        return None
    flat_positions, placeholders = np.unique(flat_indices[np.concatenate(positions)], return_index=True)
    local_positions, selected = find_local(flat_positions)
    chosen = placeholders[selected]
    used_numbers, image_indices = np.unique(np.concatenate(image_numbers)[chosen], return_inverse=True)
    if not len(used_numbers):
        return None
    distinct = [image for number, image in images.values() if number in used_numbers]
    starts = compute_offsets(np.array([image.num_placeholders for image in distinct]))
    return ImageBatch(
        tensors={
            name: to_device(np.concatenate([image.tensors[name] for image in distinct])) for name in distinct[0].tensors
        },
        positions=to_device(local_positions),
        feature_indices=to_device(starts[image_indices] + np.concatenate(offsets)[chosen]),
        num_features=int(starts[-1]),
    )


def compute_mrope_positions(rows: Rows) -> np.ndarray | None:
    """Compute the position ids of the concatenated tokens of all rows, int64 [3, sum T]: time, row and column of an
    image's placeholders, and three equal numbers for text. None if no image has a grid."""
    if not any(image.grid for images in rows.images or () for image in images):
        return None
    assert rows.images is not None
    bounds = zip(rows.token_offsets[:-1], rows.token_offsets[1:], rows.images, strict=True)
    positions = [_compute_row_positions(rows.token_ids[start:end], images) for start, end, images in bounds]
    return np.concatenate(positions, axis=1)


def _compute_row_positions(token_ids: np.ndarray, images: Sequence[ImageInput]) -> np.ndarray:
    """Compute the M-RoPE position ids of one row, as transformers' get_rope_index does: an image of h x w placeholders
    takes max(h, w) positions. int64 [3, T]"""
    steps, offsets = np.ones(len(token_ids), dtype=np.int64), np.zeros((3, len(token_ids)), dtype=np.int64)
    placeholders, num_done = find_placeholders(token_ids, images), 0
    for image in images:
        assert image.grid is not None, "all images of a model with M-RoPE have a grid"
        height, width = image.grid
        first, end = placeholders[num_done], placeholders[num_done] + height * width
        steps[first:end], steps[end - 1] = 0, max(height, width)
        offsets[1, first:end], offsets[2, first:end] = np.divmod(np.arange(height * width), width)
        num_done += height * width
    return offsets + np.cumsum(steps) - steps
