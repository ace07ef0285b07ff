"""scripts/cluster/slurm.sbatch on two nodes, with fake srun and scontrol commands that start real processes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from scripts.checks import ROOT
from scripts.cluster_check.kit import SETTINGS, FinishedRun, Kit, expect
from scripts.cluster_check.machines import Machine, machines

SRUN = """#!/usr/bin/env python3
# srun OPTIONS COMMAND: runs on every node of the allocation or of --nodelist; exits with the largest status.
import json, os, subprocess, sys, time

words, only = sys.argv[1:], None
while words[0].startswith("--"):
    option, _, value = words.pop(0).partition("=")
    value = value or words.pop(0)
    only = value if option == "--nodelist" else only
enter = json.loads(os.environ["FAKE_SLURM_NODES"])
tasks = [subprocess.Popen([*enter[name], *words]) for name in ([only] if only else enter)]
codes = [task.wait() for task in tasks]
sys.exit(max(codes))
"""
SCONTROL = """#!/usr/bin/env bash
[ "$1 $2" = "show hostnames" ] && printf '%s\\n' node1 node2
"""


def run(kit: Kit) -> dict[str, Any]:
    binaries = kit.folder / "bin"
    binaries.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    with machines(2, kit.folder / "logs", {}) as nodes:
        engines = "actor_rollout_ref.rollout.num_engines=2"
        done = sbatch(kit, nodes, binaries, "slurm", engines, "actor_rollout_ref.rollout.name=hf")
        expect(done, 0, "2 x process of 1 thread(s) on 2 node(s)")
        assert len(done.metrics) == 1 and done.metrics[0]["sync/probe_gap"] < 5e-5, done.metrics
        refused = sbatch(kit, nodes, binaries, "refused", "actor_rollout_ref.actor.fsdp_config.fsdp_size=3")
        expect(refused, 2, "fsdp_size=3, trainer.n_gpus_per_node=1, trainer.nnodes=2: it must divide")
    return {"exit statuses": "0, 2", "probe_gap": done.metrics[0]["sync/probe_gap"]}


def sbatch(kit: Kit, nodes: list[Machine], binaries: Path, name: str, *words: str) -> FinishedRun:
    """Run the batch script with the fake commands."""
    allocation = {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "FAKE_SLURM_NODES": json.dumps({node.name: node.command() for node in nodes}),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "17",
    }
    command = ["bash", str(ROOT / "scripts" / "cluster" / "slurm.sbatch"), *kit.words(name, *words)]
    log = kit.folder / "logs" / f"{name}.log"
    with log.open("w") as out:
        environment = os.environ | SETTINGS | allocation
        code = subprocess.run(command, env=environment, stdout=out, stderr=out, check=False).returncode
    return FinishedRun(code, log.read_text(errors="replace"), kit.metrics(name))
