from __future__ import annotations

from pathlib import Path

import pytest

from alphaapollo.config.schema import Model, Rollout
from alphaapollo.launch.input_checks import check_engine_supports_model


def test_transformers_engine_refuses_vision_language_models(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3VLConfig

    model = Model(path=str(tmp_path))
    Qwen3VLConfig().save_pretrained(tmp_path)
    check_engine_supports_model(model, Rollout(), "rollout")
    with pytest.raises(ValueError, match=r"rollout\.name=hf does not support .* Set rollout\.name=vllm\.$"):
        check_engine_supports_model(model, Rollout(name="hf"), "rollout")
    Qwen3Config().save_pretrained(tmp_path)
    check_engine_supports_model(model, Rollout(name="hf"), "rollout")
