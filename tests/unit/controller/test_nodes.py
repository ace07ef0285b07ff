"""Messages about the nodes of a cluster: which are missing, and what differs on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from alphaapollo.config.schema import Rollout, TuningTrainer
from alphaapollo.controller.ray_cluster import (
    ClusterNode,
    compute_code_version,
    describe_missing_nodes,
    describe_node_differences,
    inspect_node,
)

HEAD, SECOND, SMALL = ClusterNode("10.0.0.1", "a", 8), ClusterNode("10.0.0.2", "b", 8), ClusterNode("10.0.0.3", "c", 4)


def asks(nodes: int, gpus: int, device: str) -> TuningTrainer:
    return TuningTrainer.model_validate({"nnodes": nodes, "n_gpus_per_node": gpus, "device": device})


CORES = [replace(node, gpus=0) for node in (HEAD, SECOND)]


def test_missing_nodes_are_counted_and_present_ones_named() -> None:
    request = asks(2, 8, "cuda")
    assert describe_missing_nodes([HEAD, SECOND], request) == ""
    missing = describe_missing_nodes([HEAD, SMALL], request)
    for fact in ("trainer.nnodes=2", "8 GPUs", "2 have joined: 10.0.0.1 (a, 8 GPUs)", "10.0.0.3 (c, 4 GPUs)"):
        assert fact in missing
    assert "0 have joined" in describe_missing_nodes([], request)


def test_nodes_for_engines_count_too() -> None:
    request, engines = asks(1, 8, "cuda"), Rollout(nnodes=1, n_gpus_per_node=4)
    assert describe_missing_nodes([SMALL, HEAD], request, engines) == ""
    missing = describe_missing_nodes([SMALL, SMALL], request, engines)
    for fact in ("trainer.nnodes=1", "actor_rollout_ref.rollout.nnodes=1", "8 and 4 GPUs", "2 have joined"):
        assert fact in missing
    assert describe_missing_nodes([HEAD], request, engines)
    assert describe_missing_nodes(CORES[:1], asks(1, 1, "cpu"), engines)


def test_without_gpus_any_node_counts() -> None:
    assert describe_missing_nodes(CORES, asks(2, 1, "cpu")) == describe_missing_nodes(CORES, asks(2, 1, "auto")) == ""
    missing = describe_missing_nodes(CORES, asks(3, 2, "cpu"))
    assert "3 node(s)" in missing and "2 have joined: 10.0.0.1 (a), 10.0.0.2 (b)" in missing
    assert describe_missing_nodes([*CORES, SMALL], asks(2, 1, "auto")), "a GPU is there: nodes without are not enough"
    assert describe_missing_nodes(CORES, asks(1, 1, "cuda")), "their GPUs may still come"


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
