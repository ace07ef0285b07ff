from __future__ import annotations

from pathlib import Path

from alphaapollo.config.keys import accepted_keys
from alphaapollo.config.schema import Config, KLController
from alphaapollo.launch.resume import Start
from alphaapollo.trainer.lifecycle import find_progress
from alphaapollo.trainer.progress import Progress
from alphaapollo.trainer.setup.resume_rule import IDENTITY


def test_the_keys_of_the_identity_exist() -> None:
    assert accepted_keys(Config).keys() >= IDENTITY.keys()


def test_only_a_moving_controller_gets_its_coefficient_back(tmp_path: Path) -> None:
    assert find_progress(Start(tmp_path), KLController(kl_coef=0.2)) == Progress(kl_coef=0.2)
    Progress(step=3, prompts_consumed=12, kl_coef=0.7).write(tmp_path)
    resumed = Start(tmp_path, tmp_path, 3)
    assert find_progress(resumed, KLController(type="fixed", kl_coef=0.2)) == Progress(3, 12, 0.2)
    assert find_progress(resumed, KLController(type="dual", kl_coef=0.2)) == Progress(3, 12, 0.7)
