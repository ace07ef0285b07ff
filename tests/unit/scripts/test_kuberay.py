"""scripts/cluster/kuberay.yaml: its command exists, and its head and worker sections agree."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config

ROOT = Path(__file__).resolve().parents[3]
JOB: dict[str, Any] = yaml.safe_load((ROOT / "scripts/cluster/kuberay.yaml").read_text())["spec"]
CLUSTER = JOB["rayClusterSpec"]


def test_the_run_asks_for_the_nodes_that_are_started() -> None:
    python, *words = shlex.split(JOB["entrypoint"])
    assert [python, *words[:3]] == ["python", "-m", "alphaapollo", "rl"]
    trainer = load_config(Config, "ppo", words[3:]).trainer
    (group,) = CLUSTER["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == trainer.nnodes
    (worker,) = group["template"]["spec"]["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == str(trainer.n_gpus_per_node)
    assert trainer.device == "cuda", "on a head without GPUs auto would mean its CPU, as long as the others are late"


def test_one_image_with_its_ray_and_one_shared_folder() -> None:
    pods = [CLUSTER["headGroupSpec"]["template"]["spec"], CLUSTER["workerGroupSpecs"][0]["template"]["spec"]]
    assert len({pod["containers"][0]["image"] for pod in pods}) == 1
    pinned = re.search(r"^ray==(\S+)", (ROOT / "requirements/gpu.txt").read_text(), re.MULTILINE)
    assert pinned and CLUSTER["rayVersion"] == pinned[1]
    for pod in pods:
        (mount,), (volume,) = pod["containers"][0]["volumeMounts"], pod["volumes"]
        assert mount["name"] == volume["name"] and mount["mountPath"] == "/shared"
    files = re.findall(r"(?:files|path|output_dir)=(\S+)", JOB["entrypoint"])
    assert len(files) == 4 and all(path.startswith("/shared/") for path in files)
