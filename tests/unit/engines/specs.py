"""Settings of engines for tests."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from alphaapollo.config.schema import Rollout
from alphaapollo.engines.types import EngineSpec

DEFAULTS = {"index": 0, "model_path": "org/model", "trust_remote_code": False, "dtype": "float32", "log_path": "log"}


def make_spec(device: Any = "cpu", **settings: Any) -> EngineSpec:
    """Spec of an engine, as config/resolve.py and the memory plan would choose it. `settings`: fields of EngineSpec;
    others are fields of Rollout."""
    own = {field.name: settings.pop(field.name) for field in fields(EngineSpec) if field.name in settings}
    resolved = {"enforce_eager": device == "cpu", "max_num_seqs": 256, "gpu_memory_utilization": 0.5}
    rollout = Rollout(**resolved | settings)  # type: ignore[arg-type]
    return EngineSpec(**DEFAULTS | {"max_model_len": 300, "rollout": rollout, "device": device} | own)  # type: ignore[arg-type]


def check_items(found: Any, expected: dict[str, Any]) -> None:
    """Check some items of a mapping. The value `...` means that there is no such key."""
    assert {key: found.get(key, ...) for key in expected} == expected
