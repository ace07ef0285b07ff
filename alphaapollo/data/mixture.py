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
        raise ValueError(
            f"{key}: shares of the trained prompts must sum to 1. Set {_format_shares(data.source_weights)} or, if "
            f"these are passes over each file, {_format_shares(passes)}."
        )
    weights = [data.source_weights[file] for file in file_sizes]
    stream = WeightedFileStream([*file_sizes.values()], weights, seed, data.shuffle, start)
    for (file, size), quota in zip(file_sizes.items(), stream.quotas, strict=True):
        if not size or not quota:
            raise ValueError(
                f"{key}: {make_source_names(data.train_files)[file]} has {size} rows and {quota} of the "
                f"{stream.num_prompts} prompts of an epoch. Raise the limits (data.truncation, data.train_max_samples) "
                "or the share, or remove the file and its share."
            )
    return stream


def describe_mixture(data: TrainingFiles, file_sizes: Mapping[int, int], epochs: float) -> dict[str, str]:
    """Return one line per training file: number of rows, share of the trained prompts, and passes in the run; none for
    a single file."""
    lines, total = dict[str, str](), sum(file_sizes.values())
    names = make_source_names(data.train_files)
    for file, name in enumerate(names if len(names) > 1 else []):
        size = file_sizes[file]
        share = data.source_weights[file] if data.source_weights else size / total
        lines[f"  {name}"] = (
            f"{size} rows, {share:.0%} of the prompts, {share * total * epochs / max(size, 1):.2f} passes"
        )
    return lines


def _format_shares(weights: Sequence[float]) -> str:
    return format_value([round(weight / sum(weights), 3) for weight in weights])
