"""ProRL's hard reset (arXiv 2505.24864, section 2.3.1): when the policy becomes its own reference."""

from __future__ import annotations

from alphaapollo.config.schema import ReferenceReset
from alphaapollo.trainer.progress import Progress


def reset_is_due(config: ReferenceReset, progress: Progress, step: int, accuracy: float | None) -> bool:
    """After iteration `step`: on schedule, or when validation has stagnated. `accuracy`: of this iteration's
    validation, None without one. Notes both the validation and the reset in `progress`, so that a resumed run decides
    the same."""
    if accuracy is not None:
        if progress.best_accuracy is None or accuracy > progress.best_accuracy + config.min_gain:
            progress.best_accuracy, progress.validations_without_gain = accuracy, 0
        else:
            progress.validations_without_gain += 1
    on_schedule = config.every is not None and step % config.every == 0
    stagnant = config.patience is not None and progress.validations_without_gain >= config.patience
    if on_schedule or stagnant:
        progress.reference_resets += 1
        progress.validations_without_gain = 0
    return on_schedule or stagnant
