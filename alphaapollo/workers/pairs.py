"""What the workers that learn from preferences share: which of the compared were judged rightly, by data source."""

from __future__ import annotations

import torch
from torch import Tensor

from alphaapollo.data.preference_batch import PreferenceBatch

SHARING = "data.use_prefix_grouper"


def right_by_source(batch: PreferenceBatch, positions: list[int], right: Tensor) -> dict[str, Tensor]:
    """MetricSums of what was compared and of what was right, in all and, where there are several, of each data source.

    right: bool, one a pair (or single answer) of the rows at `positions`.
    """
    sums = {"right": right.sum()}
    if len(batch.source_names) == 1:
        return sums
    step = len(positions) // len(right) if len(right) else 1
    sources = torch.from_numpy(batch.sources[positions[::step]])
    right = right.cpu()
    for index, name in enumerate(batch.source_names):
        sums |= {f"{name}/compared": (sources == index).sum(), f"{name}/right": right[sources == index].sum()}
    return sums
