"""Pictures of a micro-batch: tensors for the vision tower, positions of image features, and M-RoPE position ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from alphaapollo.data.batch import Rows, compute_offsets
from alphaapollo.data.images import find_placeholders
from alphaapollo.types import ImageInput


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Distinct pictures whose placeholder tokens this rank has. The model computes F features from them."""

    tensors: dict[str, Tensor]  # of all pictures, concatenated: see ImageInput.tensors
    positions: Tensor  # int64 [m]: placeholders in the rank's part of the micro-batch, flattened; ascending
    feature_indices: Tensor  # int64 [m]: image feature of each placeholder
    num_features: int  # F


@dataclass(frozen=True)
class PlaceholderLayout:
    """Placeholder tokens of the pictures of some rows. A picture or prompt that rows share is listed once."""

    pictures: list[ImageInput]  # distinct
    positions: np.ndarray  # int64 [p]: in the flattened tokens of the micro-batch, ascending
    picture_indices: np.ndarray  # int64 [p]: picture of each placeholder
    offsets: np.ndarray  # int64 [p]: image feature of each placeholder, counted from the picture's first

    @classmethod
    def of_rows(cls, rows: Rows, flat_indices: np.ndarray) -> PlaceholderLayout | None:
        """Find the placeholders of rows. `flat_indices`: position of each token of the concatenated rows. None if the
        rows have no pictures."""
        pictures: dict[str, tuple[int, ImageInput]] = {}
        positions, indices, offsets = [], [], []
        for row, images in enumerate(rows.images or ()):
            start = rows.token_offsets[row]
            positions.append(start + find_placeholders(rows.token_ids[start : rows.token_offsets[row + 1]], images))
            for image in images:
                index, _ = pictures.setdefault(image.digest, (len(pictures), image))
                indices.append(np.full(image.num_placeholders, index))
                offsets.append(np.arange(image.num_placeholders))
        if not pictures:
            return None
        flat, first = np.unique(flat_indices[np.concatenate(positions)], return_index=True)
        found = [image for _, image in pictures.values()]
        return cls(found, flat, np.concatenate(indices)[first], np.concatenate(offsets)[first])

    def make_image_batch(
        self, local_positions: np.ndarray, selected: np.ndarray, to_device: Callable[[np.ndarray], Tensor]
    ) -> ImageBatch | None:
        """Make the batch of the pictures of the placeholders `selected`, which are at `local_positions`. None if there
        are none."""
        used, picture_indices = np.unique(self.picture_indices[selected], return_inverse=True)
        if not len(used):
            return None
        pictures = [self.pictures[index] for index in used]
        starts = compute_offsets(np.array([picture.num_placeholders for picture in pictures]))
        return ImageBatch(
            tensors={
                name: to_device(np.concatenate([picture.tensors[name] for picture in pictures]))
                for name in pictures[0].tensors
            },
            positions=to_device(local_positions),
            feature_indices=to_device(starts[picture_indices] + self.offsets[selected]),
            num_features=int(starts[-1]),
        )


def compute_mrope_positions(rows: Rows) -> np.ndarray | None:
    """Compute the position ids of the concatenated tokens of all rows, int64 [3, sum T]: time, row and column of a
    picture's placeholders, and three equal numbers for text. None if no picture has a grid."""
    if not any(image.grid for images in rows.images or () for image in images):
        return None
    assert rows.images is not None
    bounds = zip(rows.token_offsets[:-1], rows.token_offsets[1:], rows.images, strict=True)
    return np.concatenate([_compute_row_positions(rows.token_ids[a:b], images) for a, b, images in bounds], axis=1)


def _compute_row_positions(token_ids: np.ndarray, images: Sequence[ImageInput]) -> np.ndarray:
    """Compute the M-RoPE position ids of one row, as transformers' get_rope_index does. int64 [3, T]

    A picture of h x w placeholders takes max(h, w) positions.
    """
    steps, placed = np.ones(len(token_ids), dtype=np.int64), np.zeros((3, len(token_ids)), dtype=np.int64)
    placeholders, done = find_placeholders(token_ids, images), 0
    for image in images:
        assert image.grid is not None, "all pictures of a model with M-RoPE have a grid"
        height, width = image.grid
        first, end = placeholders[done], placeholders[done] + height * width
        steps[first:end], steps[end - 1] = 0, max(height, width)
        placed[1, first:end], placed[2, first:end] = np.divmod(np.arange(height * width), width)
        done += height * width
    return placed + np.cumsum(steps) - steps
