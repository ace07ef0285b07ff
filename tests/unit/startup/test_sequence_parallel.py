"""Heads that do not divide among the ranks are refused before a worker starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphaapollo.config.schema import Model
from alphaapollo.startup.input_checks import check_sequence_parallel
from tests.unit.tiny import build_model


def test_the_model_is_named_by_its_key(tmp_path: Path):
    build_model("qwen3").config.save_pretrained(tmp_path)  # 4 heads
    models = {"actor_rollout_ref.model.path": Model(path=str(tmp_path)), "critic.model.path": Model()}
    for size in (1, 2, 4):
        check_sequence_parallel(size, models)
    with pytest.raises(ValueError, match=r"actor_rollout_ref.model.path=.* has 4 attention heads, which 3 ranks"):
        check_sequence_parallel(3, models)


def test_a_model_that_transformers_has_itself_may_carry_code(tmp_path: Path):
    """Its code runs only with leave, and only then is it unknown what its attention does."""
    config = build_model("qwen3").config
    config.auto_map = {"AutoModelForCausalLM": "own.Model"}
    config.save_pretrained(tmp_path)
    check_sequence_parallel(2, {"model.path": Model(path=str(tmp_path))})
    with pytest.raises(ValueError, match="brings its own code, whose attention cannot be split"):
        check_sequence_parallel(2, {"model.path": Model(path=str(tmp_path), trust_remote_code=True)})
