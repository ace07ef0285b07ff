"""The early import of vLLM has the environment that the run's engines will need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alphaapollo.config.schema import Config
from alphaapollo.controller.placement import detect_machine
from alphaapollo.engines.vllm.settings import build_cpu_environment
from alphaapollo.launch import early_imports
from alphaapollo.launch.early_imports import predict_engine_environment
from alphaapollo.launch.plan import resolve_plan
from alphaapollo.planning.threads import choose_cpu_threads


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_imports, "find_version", lambda _: "2.13.0+cpu")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def make_config(folder: Path, trainer: dict[str, Any] | None = None, **rollout: Any) -> Config:
    role = {"model": {"path": str(folder)}, "rollout": rollout}
    settings = {"output_dir": str(folder), "device": "cpu", **(trainer or {})}
    return Config.model_validate({"actor_rollout_ref": role, "trainer": settings})


@pytest.mark.parametrize(
    "rollout", [{}, {"num_engines": 2}, {"tensor_model_parallel_size": 2}, {"enforce_eager": False}, {"cpu_threads": 1}]
)
@pytest.mark.parametrize("trainer", [{}, {"async_mode": "separate"}, {"n_gpus_per_node": 2}])
def test_the_environment_is_that_of_the_planned_engines(
    tmp_path: Path, rollout: dict[str, Any], trainer: dict[str, Any]
) -> None:
    config, machine = make_config(tmp_path, trainer, **rollout), detect_machine()
    plan = resolve_plan(choose_cpu_threads(config, machine)[0], machine, [])
    assert predict_engine_environment(config) == build_cpu_environment(plan.rollout, str(tmp_path))


def test_nothing_is_imported_for_other_engines_and_dry_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert predict_engine_environment(make_config(tmp_path, name="hf")) is None
    assert predict_engine_environment(make_config(tmp_path, {"dry_run": True})) is None
    monkeypatch.setattr(early_imports, "find_version", lambda _: "2.13.0")  # a build for GPUs
    assert predict_engine_environment(make_config(tmp_path)) is None
