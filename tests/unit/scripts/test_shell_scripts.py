"""scripts/cluster/slurm.sbatch with a fake Slurm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

SRUN = """#!/usr/bin/env bash
case "$*" in
*hostname*) echo "127.0.1.1 fe80::1 10.0.0.7 192.168.1.7" ;;
*) echo "ran $*"; kill -USR1 "$PPID"; sleep 0.2; exit "${SRUN_EXIT:-3}" ;;
esac
"""
SCONTROL = """#!/usr/bin/env bash
case "$1" in
show) printf 'node1\\nnode2\\n' ;;
*) echo "scontrol $*" ;;
esac
"""


RUNNING = """#!/usr/bin/env bash
case "$*" in
*hostname*) echo 10.0.0.7 ;;
*) export SBATCH="$PPID"; while [ "$1" != -- ]; do shift; done; shift; "$@" ;;
esac
"""
DRIVER = """#!/usr/bin/env bash
trap 'echo saved; kill $!; exit 130' TERM
until [ -s .slurm-17.driver ]; do sleep 0.05; done
kill -USR1 "$SBATCH"
sleep 25 &
wait
"""


def submit(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    binaries = folder / "bin"
    binaries.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        if not (binaries / name).exists():
            (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    given = {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_ID": "17",
    }
    command = ["bash", str(ROOT / "scripts/cluster/slurm.sbatch"), "data.seed=1"]
    return subprocess.run(command, env=given | environment, capture_output=True, text=True, timeout=30, check=False)


def test_the_head_has_an_address_that_others_reach_and_the_time_limit_queues_again(tmp_path: Path) -> None:
    done = submit(tmp_path)
    assert "--address 10.0.0.7:6379 --min-nodes 2 --num-gpus 8" in done.stdout and "trainer.nnodes=2" in done.stdout
    assert "n_gpus_per_node=8 data.seed=1" in done.stdout and "scontrol requeue 17" in done.stdout
    assert done.returncode == 3, "the status of the run, though a signal came before its end"
    assert "--address 10.9.9.9:6379" in submit(tmp_path, HEAD_IP="10.9.9.9").stdout


def test_before_the_time_limit_the_driver_may_save(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", RUNNING), ("python", DRIVER)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    done = submit(tmp_path)
    assert "saved\nscontrol requeue 17\n" in done.stdout and done.returncode == 130, done


def test_the_build_without_gpus_is_refused_on_gpus(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.device").write_text("cpu\n")
    done = submit(tmp_path)
    assert done.returncode == 1 and "DEVICE=gpu make setup" in done.stderr and "ran" not in done.stdout


def test_a_ray_that_does_not_start_is_a_failure(tmp_path: Path) -> None:
    done = submit(tmp_path, SRUN_EXIT="0")  # as symmetric-run ends then
    assert done.returncode == 1 and "nothing was trained" in done.stderr
