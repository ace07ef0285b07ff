"""Messages about the nodes of a cluster: which are missing, and what differs on them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from alphaapollo.config.schema import Rollout, TuningTrainer
from alphaapollo.controller import ray_cluster
from alphaapollo.controller.ray_cluster import (
    compute_code_version,
    describe_node_differences,
    inspect_node,
)


def is_enough(monkeypatch: pytest.MonkeyPatch, gpus: list[int], nodes: int, device: str, engine_nodes: int = 0) -> bool:
    """Whether a run with this many nodes starts on nodes with these numbers of GPUs."""
    trainer = TuningTrainer.model_validate({"nnodes": nodes, "device": device, "start_timeout": 1e-6})
    names = {"Alive": True, "NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "a"}
    found = [names | {"Resources": {"GPU": float(count)} if count else {}} for count in gpus]
    monkeypatch.setattr(ray_cluster.ray, "nodes", lambda: [*found, {"Alive": False}])
    try:
        ray_cluster.wait_for_nodes(trainer, Rollout(nnodes=engine_nodes))
    except ValueError as error:
        assert "have joined" in str(error) and "trainer.nnodes" in str(error)
        return False
    return True


def test_a_run_waits_for_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    check = partial(is_enough, monkeypatch)
    assert check([8, 8], 2, "cuda") and not check([8], 2, "cuda") and not check([8, 0], 2, "cuda")
    assert check([8, 4], 1, "auto", 1) and not check([8], 1, "auto", 1)
    assert check([0, 0], 2, "cpu") and check([0, 0], 2, "auto") and not check([0, 0], 3, "cpu")
    assert not check([0, 0, 4], 2, "auto"), "a GPU is there: nodes without are not enough"
    assert not check([0, 0], 1, "cuda"), "their GPUs may still come"


def test_nodes_that_have_the_same_do_not_differ(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "README.md").write_text("here")
    paths = {"model.path": "model"}
    here = inspect_node(paths, str(tmp_path))
    assert here["model.path=model"] == "1 files of 2 bytes"
    assert here["torch"][:1].isdigit() and "+" not in str(here)
    assert describe_node_differences(here, here) == ""


def test_each_difference_is_named() -> None:
    here = {"Python": "3.12.1", "torch": "2.13.0", "model.path=/m": "3 files of 5,000 bytes", "reward=/r.py": "x"}
    there = here | {"torch": "2.12.0", "model.path=/m": "missing"}
    text = describe_node_differences(there, here)
    assert text == "torch is 2.12.0, not 2.13.0, model.path=/m is missing, not 3 files of 5,000 bytes"


def test_our_own_files_count_as_a_version() -> None:
    assert compute_code_version().startswith("0.") and "(files " in compute_code_version()
