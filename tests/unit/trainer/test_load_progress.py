from __future__ import annotations

from pathlib import Path

from alphaapollo.config.schema import KLControl
from alphaapollo.launch.resume import StartPoint
from alphaapollo.trainer.lifecycle import load_progress
from alphaapollo.trainer.progress import Progress


def test_only_an_adaptive_kl_controller_resumes_its_coefficient(tmp_path: Path) -> None:
    assert load_progress(StartPoint(tmp_path), KLControl(kl_coef=0.2)) == Progress(kl_coef=0.2)
    Progress(step=3, prompts_consumed=12, kl_coef=0.7).write(tmp_path)
    resumed = StartPoint(tmp_path, tmp_path, 3)
    assert load_progress(resumed, KLControl(type="fixed", kl_coef=0.2)) == Progress(3, 12, 0.2)
    assert load_progress(resumed, KLControl(type="dual", kl_coef=0.2)) == Progress(3, 12, 0.7)
