"""Models that do not support Ulysses sequence parallelism. workers/test_sequence_parallel.py has the numbers."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.models.ulysses import check_ulysses_support

KEY = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"


def config(**fields: Any) -> Any:
    text = SimpleNamespace(**({"num_attention_heads": 14} | fields))
    return SimpleNamespace(model_type="qwen3", get_text_config=lambda: text)


@pytest.mark.parametrize(
    ("fields", "fact"),
    [
        ({}, f"14 attention heads. Set {KEY}=2."),
        ({"num_attention_heads": 0}, "0 attention heads"),
        ({"num_attention_heads": 8, "layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"num_attention_heads": 8, "custom_code": True}, "modeling code"),
    ],
)
def test_models_that_do_not_support_ulysses(fields: dict[str, Any], fact: str):
    with pytest.raises(ValueError, match=f"{KEY}=4 .*{re.escape(fact)}"):
        check_ulysses_support(config(**fields), "some/model", 4, KEY, fields.get("custom_code", False))


def test_models_that_support_ulysses():
    check_ulysses_support(config(layer_types=["full_attention", "sliding_attention"]), "some/model", 7, KEY, False)
