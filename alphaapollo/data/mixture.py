"""Mixtures of training files: the order of their rows with data.source_weights, and its description in the plan."""

from __future__ import annotations

from collections.abc import Mapping

from alphaapollo.config.schema.data import TrainingFiles
from alphaapollo.data.examples import make_source_names
from alphaapollo.data.stream import PromptStream, WeightedFileStream


def make_stream(
    data: TrainingFiles, file_sizes: Mapping[int, int], seed: int, start: int = 0
) -> PromptStream | WeightedFileStream:
    """Create the order of training rows. file_sizes: index in data.train_files -> number of rows. start: see
    PromptStream. Raises ValueError if a file has a weight, but no rows."""
    if data.source_weights is None:
        return PromptStream(sum(file_sizes.values()), seed, data.shuffle, start)
    empty = next((file for file, size in file_sizes.items() if not size), None)
    if empty is not None:
        raise ValueError(
            f"data.source_weights has a weight for {make_source_names(data.train_files)[empty]}, but the limits of "
            "length and number (data.truncation, data.train_max_samples) exclude all of its rows. Raise the limits, or "
            "remove the file and its weight."
        )
    weights = [data.source_weights[file] for file in file_sizes]
    return WeightedFileStream([*file_sizes.values()], weights, seed, data.shuffle, start)


def describe_mixture(data: TrainingFiles, file_sizes: Mapping[int, int], epochs: float) -> dict[str, str]:
    """Return one line per training file: number of rows, share of each batch, and passes in the run; none for a single
    file."""
    lines, weights = dict[str, str](), data.source_weights or [1.0] * len(file_sizes)
    total = sum(size * weights[file] for file, size in file_sizes.items())
    names = make_source_names(data.train_files) if len(file_sizes) > 1 else []
    for file, name in enumerate(names):
        share, passes = file_sizes[file] * weights[file] / total, weights[file] * epochs
        lines[f"  {name}"] = f"{file_sizes[file]} rows x {weights[file]:g}, {share:.0%} of a batch, {passes:.2f} passes"
    return lines
