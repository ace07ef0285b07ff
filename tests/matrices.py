"""Arrays over the response tokens of a batch, as matrices with one row per token sequence."""

import numpy as np

from alphaapollo.batching.batch import BatchLayout


def pad(batch: BatchLayout, values: np.ndarray) -> np.ndarray:
    """[n] -> [B, L], padded with 0."""
    inside = is_inside(batch)
    matrix = np.zeros(inside.shape, values.dtype)
    matrix[inside] = values
    return matrix


def flatten(batch: BatchLayout, matrix: np.ndarray) -> np.ndarray:
    """[B, L] -> [n]"""
    return matrix[is_inside(batch)]


def is_inside(batch: BatchLayout) -> np.ndarray:
    lengths = np.diff(batch.response_offsets)
    return np.arange(lengths.max(initial=0)) < lengths[:, None]


def join(batch: BatchLayout, columns: list[np.ndarray]) -> np.ndarray:
    """Columns of all ranks -> [B, L]"""
    return pad(batch, batch.join_columns(columns))


def split(batch: BatchLayout, matrix: np.ndarray) -> list[np.ndarray]:
    """[B, L] -> columns of all ranks"""
    return batch.split_by_rank(flatten(batch, matrix))
