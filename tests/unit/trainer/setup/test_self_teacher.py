"""What a self-teacher cannot read is an error before a worker starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config
from alphaapollo.trainer.setup.teacher_checks import check_self_teacher
from alphaapollo.types import Prompt
from tests.unit.tiny import save_model

WITH_DEMONSTRATION = Prompt(0, "test", "text", extra_info={"demonstration": "4"})


def config_of(model: Path, *words: str) -> Config:
    lengths = ["data.max_prompt_length=40", "data.max_response_length=20"]
    return load_config(Config, "ppo", ["algorithm=sdft", f"actor_rollout_ref.model.path={model}", *lengths, *words])


def test_prompts_and_lengths_are_checked(tmp_path: Path) -> None:
    """The model reads 128 tokens: a prompt of 108 and a response of 20."""
    model = save_model("qwen3", tmp_path / "model")
    check_self_teacher(config_of(model), [WITH_DEMONSTRATION])
    check_self_teacher(config_of(model, "teacher.self_teacher.max_prompt_length=108"), [WITH_DEMONSTRATION])
    with pytest.raises(
        ValueError, match=r"up to 129 tokens.*Set teacher.self_teacher.max_prompt_length to at most 108"
    ):
        check_self_teacher(config_of(model, "teacher.self_teacher.max_prompt_length=109"), [WITH_DEMONSTRATION])
    with pytest.raises(ValueError, match="row 1 has None"):
        check_self_teacher(config_of(model), [WITH_DEMONSTRATION, Prompt(1, "test", "text")])


def test_a_vision_language_model_is_refused(vision_folder: Callable[[str], Path]) -> None:
    config = config_of(vision_folder("qwen3_vl"))
    with pytest.raises(ValueError, match=r"context=demonstration does not support .*, a vision-language model"):
        check_self_teacher(config, [WITH_DEMONSTRATION])
