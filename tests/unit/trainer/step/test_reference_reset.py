from __future__ import annotations

from alphaapollo.config.schema import ReferenceReset
from alphaapollo.trainer.progress import Progress
from alphaapollo.trainer.step.reference_reset import reset_is_due


def test_on_schedule() -> None:
    progress = Progress()
    due = [reset_is_due(ReferenceReset(every=2), progress, step, None) for step in (1, 2, 3, 4)]
    assert due == [False, True, False, True]
    assert progress.reference_resets == 2


def test_when_validation_stagnates_and_again_when_it_goes_on() -> None:
    progress, config = Progress(), ReferenceReset(patience=2, min_gain=0.01)
    accuracies = [0.5, 0.505, 0.6, 0.6, 0.55, None, 0.6, 0.61, 0.7]
    due = [reset_is_due(config, progress, step, accuracy) for step, accuracy in enumerate(accuracies, start=1)]
    # without gain: .505 | .6 (the second), .55 -> reset | .6, .61 (within min_gain) -> reset | .7 gains
    assert due == [False, False, False, False, True, False, False, True, False]
    assert (progress.best_accuracy, progress.validations_without_gain, progress.reference_resets) == (0.7, 0, 2)


def test_off_by_default() -> None:
    progress = Progress()
    assert not any(reset_is_due(ReferenceReset(), progress, step, 0.5) for step in range(1, 20))
