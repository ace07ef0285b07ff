from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

from alphaapollo.config.changes import ConfigChange
from alphaapollo.config.schema import Config
from alphaapollo.observability.console import Console
from alphaapollo.runs.resume import StartPoint
from alphaapollo.session.progress import CurriculumState, Progress
from alphaapollo.trainer.setup.preparation import RlPreparation


def read_progress(config: Config, start: StartPoint) -> Progress:
    prepared = RlPreparation(config, Console())
    prepared.start = start
    return prepared.progress


def test_only_an_adaptive_kl_controller_resumes_its_coefficient(tmp_path: Path) -> None:
    def progress(start: StartPoint, **kl: Any) -> Progress:
        config = Config.model_validate({"algorithm": {"kl_ctrl": {"kl_coef": 0.2, **kl}}})
        return read_progress(config, start)

    assert progress(StartPoint(tmp_path)) == Progress(kl_coef=0.2)
    Progress(step=3, prompts_consumed=12, kl_coef=0.7).write(tmp_path)
    resumed = StartPoint(tmp_path, tmp_path, 3)
    assert progress(resumed, type="fixed") == Progress(3, 12, 0.2)
    assert progress(resumed, type="dual") == Progress(3, 12, 0.7)


def test_pass_rates_are_those_of_the_same_data_files(tmp_path: Path) -> None:
    state = CurriculumState(array("d", [0.5, 0.25]), {7: 1}, stage=1)
    Progress(step=3, prompts_consumed=9, unfinished=[7], curriculum=state).write(tmp_path)
    resumed = StartPoint(tmp_path, tmp_path, 3)
    other_batch = ConfigChange("data.train_batch_size", 4, 8, "applied")
    other_data = ConfigChange("data.train_files", "a.parquet", "b.parquet", "applied")
    moved = replace(other_data, verdict="ignored")  # with the same content
    restarted = CurriculumState(stage_start=9)
    cases = ((other_batch, state, [7]), (other_data, restarted, []), (moved, state, [7]))
    for change, expected, unfinished in cases:
        progress = read_progress(Config(), replace(resumed, config_changes=(change,)))
        assert (progress.curriculum, progress.unfinished) == (expected, unfinished)
