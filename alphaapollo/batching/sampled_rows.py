"""Checks of what rows say about how they were sampled: Row.logprobs, temperature and weight_versions.

A loss with a ratio divides by the probability with which a token was sampled. Without log-probs of the policy before
the update, that is the engine's, which has to be known, and at the temperature of the trainer's probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alphaapollo.types import Row


def check_engine_log_probs(rows: Sequence[Row], temperature: float) -> None:
    """Raise ValueError if the engine's log-probs of a row are no denominators of the trainer's probabilities at
    `temperature`."""
    for number, row in enumerate(rows):
        missing = np.isnan(np.asarray(row.logprobs)[np.asarray(row.action_mask) != 0])
        if missing.any():
            raise ValueError(
                f"row {number}: no engine sampled {missing.sum()} of its {len(missing)} trained tokens, so the loss "
                "lacks their old log-probs. Pass old_logprobs=[...], e.g. log_probs(rows) before the first step."
            )
        if row.temperature not in (None, temperature):
            raise ValueError(
                f"row {number} was sampled at temperature {row.temperature:g}, but the trainer computes probabilities "
                f"at rollout.temperature={temperature:g}. Make them equal, or pass old_logprobs=[...]."
            )


def are_of_version(rows: Sequence[Row], version: int | None) -> bool:
    """Whether weights of this version sampled all tokens of the rows."""
    return all({one for one, _ in row.weight_versions} == {version} for row in rows)
