"""Mixtures of training files: the order of their rows with data.source_weights, and its description in the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from alphaapollo.config.keys import format_value
from alphaapollo.config.schema.data import TrainingFiles
from alphaapollo.data.examples import make_source_names
from alphaapollo.data.stream import PromptStream, WeightedFileStream


def make_stream(
    data: TrainingFiles, file_sizes: Mapping[int, int], seed: int, start: int = 0
) -> PromptStream | WeightedFileStream:
    """Create the order of training rows. file_sizes: index in data.train_files -> number of rows. start: see
    PromptStream. Raises ValueError if a file has a weight, but no rows in an epoch."""
    if data.source_weights is None:
        return PromptStream(sum(file_sizes.values()), seed, data.shuffle, start)
    key = f"data.source_weights={format_value(data.source_weights)}"
    if abs(sum(data.source_weights) - 1) > 0.01:  # not in the configuration's checks: an old one may have passes
        passes = [data.source_weights[file] * size for file, size in file_sizes.items()]
        shares, of_passes = map(_format_shares, (data.source_weights, passes))
        raise ValueError(
            f"{key}: the shares of the trained prompts must sum to 1. Set {shares}, or, if these are passes over each "
            f"file, {of_passes}."
        )
    empty = next((file for file, size in file_sizes.items() if not size), None)
    if empty is not None:
        raise ValueError(
            f"data.source_weights has a weight for {make_source_names(data.train_files)[empty]}, but the limits of "
            "length and number (data.truncation, data.train_max_samples) exclude all of its rows. Raise the limits, or "
            "remove the file and its weight."
        )
    weights = [data.source_weights[file] for file in file_sizes]
    stream = WeightedFileStream([*file_sizes.values()], weights, seed, data.shuffle, start)
    if 0 in stream.quotas:
        file = list(file_sizes)[stream.quotas.index(0)]
        raise ValueError(
            f"{key}: an epoch of {stream.num_prompts} prompts has none of {make_source_names(data.train_files)[file]}. "
            "Raise its share, or remove the file and its share."
        )
    return stream


def describe_mixture(data: TrainingFiles, file_sizes: Mapping[int, int], epochs: float) -> dict[str, str]:
    """Return one line per training file: number of rows, share of the trained prompts, and passes in the run; none for
    a single file."""
    lines, total = dict[str, str](), sum(file_sizes.values())
    names = make_source_names(data.train_files) if len(file_sizes) > 1 else []
    for file, name in enumerate(names):
        size = file_sizes[file]
        share = data.source_weights[file] if data.source_weights else size / total
        passes = share * total * epochs / max(size, 1)
        lines[f"  {name}"] = f"{size} rows, {share:.0%} of the prompts, {passes:.2f} passes"
    return lines


def _format_shares(weights: Sequence[float]) -> str:
    return format_value([round(weight / sum(weights), 3) for weight in weights])
