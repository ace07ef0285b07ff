"""The symptoms of docs/debugging.md are produced by their configurations, and not by the healthy run beside them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.gallery.runs import read_metrics
from examples.symptoms.make_task import make_task
from examples.symptoms.runs import HEALTHY, WARM_UP, find_warnings, holds, list_runs, load_symptoms, read_points
from tests.loop.conftest import DEADLINE, ROOT
from tests.loop.warm import Program

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

RunCommand = Callable[..., str]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("symptoms")
    make_task(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def run(out: Path) -> Iterator[RunCommand]:
    """Function that runs a command once, and returns what it printed."""
    printed: dict[str, str] = {}
    started: list[Program] = []

    def run_once(name: str, *more: str) -> str:
        if name not in printed:
            command, words = list_runs(SYMPTOMS.values(), out, seed=0)[name]
            module = f"alphaapollo.trainer.main_{command}"
            environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
            started.append(Program(module, [*words, *more], out / f"{name}.txt", environment, ROOT, warm=True))
            assert started[-1].wait(DEADLINE) == 0, started[-1].printed[-4000:]
            printed[name] = started[-1].printed
        return printed[name]

    run_once(WARM_UP)
    yield run_once
    for program in started:
        program.signal(9)


@pytest.mark.parametrize("name", QUICK)
def test_symptom_is_produced(name: str, out: Path, run: RunCommand) -> None:
    symptom = SYMPTOMS[name]
    run(symptom.healthy)
    warnings = find_warnings(run(name))
    lines = read_metrics(out / name)
    assert [condition for condition in symptom.shows if not holds(condition, lines)] == []
    assert not symptom.is_shown_by(read_metrics(out / symptom.healthy))
    assert not symptom.warning or any(symptom.warning in warning for warning in warnings), warnings


def test_healthy_run_learns_without_warnings(out: Path, run: RunCommand) -> None:
    assert find_warnings(run(HEALTHY)) == []
    accuracies = [accuracy for _, accuracy in read_points(read_metrics(out / HEALTHY), "reward/accuracy")]
    assert max(accuracies[6:]) > max(accuracies[:2]) + 0.1


@pytest.mark.parametrize("name", SLOW)
def test_configuration_is_accepted(name: str, out: Path, run: RunCommand) -> None:
    model = f"actor_rollout_ref.model.path={out / WARM_UP / 'model'}"  # instead of the model of another warm-up
    assert "dry run: the configuration is valid" in run(name, model, "trainer.dry_run=True")
