"""What is said of a cluster's nodes: who is missing, and what is not the same on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from alphaapollo.controller import nodes
from alphaapollo.controller.nodes import RUN_FOLDER, Look, Node, Wanted, differences, installed, look, shortage

HEAD, SECOND, SMALL = Node("10.0.0.1", "a", 8), Node("10.0.0.2", "b", 8), Node("10.0.0.3", "c", 4)
CORES = [replace(node, gpus=0) for node in (HEAD, SECOND)]


def test_missing_nodes_are_counted_and_those_that_are_there_named() -> None:
    wanted = Wanted(nodes=2, gpus=8, device="cuda", patience=1)
    assert shortage([HEAD, SECOND], wanted) == ""
    assert shortage([HEAD, SMALL], wanted) == (
        "trainer.nnodes=2 asks for 2 node(s) with trainer.n_gpus_per_node=8 GPUs, and 1 have come: 10.0.0.1 (a, 8 GPUs)"
        "; with fewer: 10.0.0.3 (c, 4 GPUs)"
    )
    assert shortage([], wanted).endswith("and 0 have come: none")


def test_without_gpus_any_node_counts() -> None:
    assert shortage(CORES, Wanted(2, 1, "cpu", 1)) == shortage(CORES, Wanted(2, 1, "auto", 1)) == ""
    assert "asks for 3 node(s), and 2 have come: 10.0.0.1 (a), 10.0.0.2 (b)" in shortage(CORES, Wanted(3, 2, "cpu", 1))
    assert shortage([*CORES, SMALL], Wanted(2, 1, "auto", 1)), "a GPU is there: nodes without are not enough"
    assert shortage(CORES, Wanted(1, 1, "cuda", 1)), "their GPUs may still come"


def test_nodes_that_have_the_same_do_not_differ(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "README.md").write_text("here")
    paths = {"model.path": "model"}
    here = look(paths, str(tmp_path))
    assert here.files == {"model.path": (1, 2)} and here.versions["torch"] == installed("torch") != nodes.NOTHING
    assert differences(here, here, paths) == []


def test_each_difference_is_named_with_its_fix() -> None:
    paths = {"model.path": "/models/m", "reward": "/r.py", RUN_FOLDER: "/out/config.yaml", "same": "/s.py"}
    here = Look("a", {"Python": "3.12.1", "torch": "2.13.0", "vllm": "0.32.0"},
                {"model.path": (3, 5000), "reward": (1, 9), RUN_FOLDER: (1, 7), "same": (1, 1)})  # fmt: skip
    there = Look("b", {"Python": "3.12.1", "torch": "2.12.0"},
                 {"model.path": (2, 4000), "reward": None, RUN_FOLDER: None, "same": (1, 1)})  # fmt: skip
    assert differences(there, here, paths) == [
        "torch is 2.12.0, not 2.13.0, vllm is none, not 0.32.0. Give all nodes one environment: the same .venv or the "
        "same image.",
        "model.path=/models/m holds 2 file(s) of 4,000 bytes, not 3 file(s) of 5,000 bytes. Copy it anew.",
        "reward=/r.py is not there. Copy it to the same path, or to a folder that all share.",
        "trainer.output_dir: /out/config.yaml is not the driver's there. Set it to a folder that all nodes share.",
    ]


def test_our_own_files_count_as_a_version() -> None:
    assert nodes.code().startswith("0.") and "(files " in nodes.code()
    assert installed("no_such_library") == nodes.NOTHING
