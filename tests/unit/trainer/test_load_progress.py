from __future__ import annotations

from pathlib import Path
from typing import Any

from alphaapollo.config.schema import Config
from alphaapollo.launch.resume import StartPoint
from alphaapollo.trainer.lifecycle import PreparedRun
from alphaapollo.trainer.progress import Progress


def test_only_an_adaptive_kl_controller_resumes_its_coefficient(tmp_path: Path) -> None:
    def progress(start: StartPoint, **kl: Any) -> Progress:
        config = Config.model_validate({"algorithm": {"kl_ctrl": {"kl_coef": 0.2, **kl}}})
        return PreparedRun(config, None, None, start).progress  # type: ignore[arg-type]

    assert progress(StartPoint(tmp_path)) == Progress(kl_coef=0.2)
    Progress(step=3, prompts_consumed=12, kl_coef=0.7).write(tmp_path)
    resumed = StartPoint(tmp_path, tmp_path, 3)
    assert progress(resumed, type="fixed") == Progress(3, 12, 0.2)
    assert progress(resumed, type="dual") == Progress(3, 12, 0.7)
