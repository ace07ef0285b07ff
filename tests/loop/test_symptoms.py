"""The symptoms of docs/debugging.md are produced by their configurations, and not by the healthy run beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.gallery.runs import read_metrics
from examples.symptoms.make_task import make_task
from examples.symptoms.runs import HEALTHY, WARM_UP, find_warnings, holds, list_runs, load_symptoms, read_points
from tests.loop.conftest import prepare, run_forked

SYMPTOMS = load_symptoms()
QUICK = (
    "prompts_too_hard",
    "prompts_too_easy",
    "answers_are_not_read",
    "answers_are_truncated",
    "grader_fails",
    "policy_does_not_change",
    "sft_loss_spikes",
    "dpo_unlearns_chosen",
)  # the others take more iterations, or depend on timing (samples_are_stale)
SLOW = [name for name in SYMPTOMS if name not in QUICK]


class SymptomRuns:
    """Runs each configuration once, and keeps what it printed."""

    def __init__(self, out: Path):
        self.out = out
        self.printed: dict[str, str] = {}
        make_task(out, seed=0)

    def run(self, name: str, *more: str) -> str:
        if name not in self.printed:
            command, words = list_runs(SYMPTOMS.values(), self.out, seed=0)[name]
            module = f"alphaapollo.trainer.main_{command}"
            self.printed[name] = run_forked(module, [*words, *more], self.out / f"{name}.txt")
        return self.printed[name]

    def check(self, name: str, *more: str) -> None:
        """Check that a symptom is shown, with its warning, and not by the healthy run."""
        symptom = SYMPTOMS[name]
        self.run(symptom.healthy, *more)
        warnings = find_warnings(self.run(name, *more))
        lines = read_metrics(self.out / name)
        assert [condition for condition in symptom.shows if not holds(condition, lines)] == []
        assert not symptom.is_shown_by(read_metrics(self.out / symptom.healthy))
        assert not symptom.warning or any(symptom.warning in warning for warning in warnings), warnings


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> SymptomRuns:
    return SymptomRuns(tmp_path_factory.mktemp("symptoms"))


@pytest.mark.nightly
def test_a_symptom_after_a_short_warm_up(runs: SymptomRuns) -> None:
    """The model has learned the form of answers, which the reward function does not read."""
    runs.run(WARM_UP, "trainer.total_training_steps=50")
    sizes = ("trainer.total_training_steps=2", "data.train_batch_size=8", "trainer.val_before_train=False")
    runs.check("answers_are_not_read", *sizes)


@pytest.mark.parametrize("name", SLOW)
def test_configuration_is_accepted(name: str, runs: SymptomRuns) -> None:
    command, words = list_runs(SYMPTOMS.values(), runs.out, seed=0)[name]
    model = f"actor_rollout_ref.model.path={runs.out / 'model'}"  # instead of the model of a warm-up
    assert prepare(f"main_{command}", [*words, model]).plan


@pytest.fixture(scope="module")
def warmed_up(tmp_path_factory: pytest.TempPathFactory) -> SymptomRuns:
    started = SymptomRuns(tmp_path_factory.mktemp("warmed_up"))
    started.run(WARM_UP)
    return started


@pytest.mark.nightly
@pytest.mark.parametrize("name", QUICK)
def test_symptom_is_produced(name: str, warmed_up: SymptomRuns) -> None:
    warmed_up.check(name)


@pytest.mark.nightly
def test_healthy_run_learns_without_warnings(warmed_up: SymptomRuns) -> None:
    assert find_warnings(warmed_up.run(HEALTHY)) == []
    accuracies = [accuracy for _, accuracy in read_points(read_metrics(warmed_up.out / HEALTHY), "reward/accuracy")]
    assert max(accuracies[6:]) > max(accuracies[:2]) + 0.1
