"""Heads that do not divide among ranks, or an engine's processes, are refused before a worker starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphaapollo.config.schema import Model, Rollout
from alphaapollo.launch.input_checks import check_sequence_parallel_size, check_tensor_parallel_size
from tests.unit.tiny import build_model

KEY = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"


def test_the_model_is_named_by_its_key(tmp_path: Path):
    build_model("qwen3").config.save_pretrained(tmp_path)  # 4 heads
    models = {"actor_rollout_ref.model.path": Model(path=str(tmp_path)), "critic.model.path": Model()}
    for size in (1, 2, 4):
        check_sequence_parallel_size(size, KEY, models)
    with pytest.raises(ValueError, match=r"=3 is not supported: .*model.path=.* has 4 attention heads. Set .*=1\.$"):
        check_sequence_parallel_size(3, KEY, models)


def test_a_model_that_transformers_has_itself_may_carry_code(tmp_path: Path):
    """Custom model code runs only with trust_remote_code, and only then its attention is unknown."""
    config = build_model("qwen3").config
    config.auto_map = {"AutoModelForCausalLM": "own.Model"}
    config.save_pretrained(tmp_path)
    check_sequence_parallel_size(2, KEY, {"model.path": Model(path=str(tmp_path))})
    with pytest.raises(ValueError, match="has its own modeling code, whose attention cannot be split"):
        check_sequence_parallel_size(2, KEY, {"model.path": Model(path=str(tmp_path), trust_remote_code=True)})


def test_an_engine_splits_whole_heads(tmp_path: Path):
    build_model("qwen3").config.save_pretrained(tmp_path)  # 4 heads
    for size in (1, 2, 4):
        check_tensor_parallel_size(Model(path=str(tmp_path)), Rollout(tensor_model_parallel_size=size), "rollout")
    with pytest.raises(
        ValueError, match=r"rollout.tensor_model_parallel_size=3 does not divide the 4 .* Set it to one of 1, 2, 4\.$"
    ):
        check_tensor_parallel_size(Model(path=str(tmp_path)), Rollout(tensor_model_parallel_size=3), "rollout")
    split = Rollout(tensor_model_parallel_size=2, expert_parallel_size=2)
    with pytest.raises(
        ValueError, match=r"rollout.expert_parallel_size=2: .* is not a mixture of experts. Set .*=1\.$"
    ):
        check_tensor_parallel_size(Model(path=str(tmp_path)), split, "rollout")
    build_model("qwen3_moe").config.save_pretrained(tmp_path)
    check_tensor_parallel_size(Model(path=str(tmp_path)), split, "rollout")
