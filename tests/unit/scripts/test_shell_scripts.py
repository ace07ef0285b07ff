"""slurm.sbatch with a fake Slurm, ray_job.sh and skypilot.yaml with a fake Ray, and examples/small_run.sh with a Python
that only makes a folder."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config, DpoConfig, SftConfig
from scripts.checks import ROOT

SRUN = """case "$*" in
*hostname*) echo "127.0.1.1 fe80::1 10.0.0.7 192.168.1.7" ;;
*) echo "ran $*"; kill -USR1 "$PPID"; sleep 0.2; exit "${SRUN_EXIT:-3}" ;;
esac
"""
SCONTROL = """case "$1" in
show) printf 'node1\\nnode2\\n' ;;
*) echo "scontrol $*" ;;
esac
"""
RUNNING = """case "$*" in
*hostname*) echo 10.0.0.7 ;;
*) export SBATCH="$PPID"; while [ "$1" != -- ]; do shift; done; shift; "$@" ;;
esac
"""
DRIVER = """trap 'echo saved; kill $!; exit 130' TERM
until [ -s .slurm-17.driver ]; do sleep 0.05; done
kill -USR1 "$SBATCH"
sleep 25 &
wait
"""
NODES = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_ID": "17"}


def write_programs(folder: Path, programs: dict[str, str]) -> Path:
    for name, text in programs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (folder / name).chmod(0o755)
    return folder


def submit(
    folder: Path, srun: str = SRUN, driver: str = "", words: Sequence[str] = ("data.seed=1",), **variables: str
) -> subprocess.CompletedProcess[str]:
    programs = {"srun": srun, "scontrol": SCONTROL} | ({"python": driver} if driver else {})
    path = f"{write_programs(folder / 'bin', programs)}:{os.environ['PATH']}"
    variables = {"PATH": path, "SLURM_SUBMIT_DIR": str(folder), **NODES, **variables}
    command = ["bash", str(ROOT / "scripts/cluster/slurm.sbatch"), *words]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=30, check=False)


def test_the_head_has_an_address_that_others_reach_and_the_time_limit_queues_again(tmp_path: Path) -> None:
    done = submit(tmp_path)
    assert "--address 10.0.0.7:6379 --min-nodes 2 --num-gpus 8" in done.stdout and "trainer.nnodes=2" in done.stdout
    assert "n_gpus_per_node=8 data.seed=1" in done.stdout and "scontrol requeue 17" in done.stdout
    assert done.returncode == 3, "the status of the run, though a signal came before its end"
    assert "--address 10.9.9.9:6379" in submit(tmp_path, HEAD_IP="10.9.9.9").stdout


@pytest.mark.parametrize(
    ("words", "program"),  # SIZES: where slurm.sbatch adds the sizes of the allocation
    [
        ("data.seed=1", "python -m alphaapollo rl SIZES data.seed=1"),
        ("--config a.yaml", "python -m alphaapollo rl SIZES --config a.yaml"),
        ("sft data.seed=1", "python -m alphaapollo sft SIZES data.seed=1"),
        ("loops/mine.py model data.seed=1", "python loops/mine.py model data.seed=1 SIZES"),
    ],
)
def test_any_command_runs_on_the_nodes(tmp_path: Path, words: str, program: str) -> None:
    sizes = "trainer.nnodes=2 trainer.n_gpus_per_node=8"
    assert f".slurm-17 {program.replace('SIZES', sizes)}\n" in submit(tmp_path, words=words.split()).stdout
    script = (ROOT / "scripts/cluster/ray_job.sh").read_text()
    python = "case $* in *submit*) echo ${@: -1} ;; esac\n"  # prints the command of the job
    write_programs(tmp_path, {"ray/cluster/ray_job.sh": script, ".venv/bin/python": python})
    command = ["bash", str(tmp_path / "ray/cluster/ray_job.sh"), "http://head", *words.split()]
    job = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert f"exec {tmp_path}/.venv/bin/{program.replace(' SIZES', '')}\n" in job.stdout


def test_each_node_of_a_cloud_joins_and_the_first_one_runs_the_command(tmp_path: Path) -> None:
    task = yaml.safe_load((ROOT / "scripts/cluster/skypilot.yaml").read_text())
    python = """echo "ray $*" >>calls
        case "$SKYPILOT_NODE_RANK $*" in
        "0 "*--block*) exec sleep 60 ;;
        "0 "*health-check*) grep -q -- --head calls ;; # as long as the head has not started
        esac
    """
    command = "sh -c 'echo \"$RAY_ADDRESS $0 $*\"; exit 3'"
    write_programs(tmp_path / ".venv/bin", {"python": python})
    sizes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    for rank in ("1", "0"):
        variables = {"PATH": os.environ["PATH"], "SKYPILOT_NODE_RANK": rank, "COMMAND": command}
        done = subprocess.run(["bash", "-c", task["run"]], env=sizes | variables, cwd=tmp_path, stdout=-1, timeout=50)
        expected = (3, b"10.0.0.1:6379 trainer.nnodes=2 trainer.n_gpus_per_node=8\n") if rank == "0" else (0, b"")
        assert (done.returncode, done.stdout) == expected
    calls = (tmp_path / "calls").read_text()
    assert calls.count("health-check --address 10.0.0.1:6379") >= 2 and "start --head" in calls
    assert "start --block --address 10.0.0.1:6379 --num-gpus 8" in calls
    words = task["envs"]["COMMAND"].split()
    assert words[:2] == ["alphaapollo", "rl"] and load_config(Config, "ppo", words[2:]).trainer.device == "cuda"


def test_before_the_time_limit_the_driver_may_save(tmp_path: Path) -> None:
    done = submit(tmp_path, RUNNING, DRIVER)
    assert "saved\nscontrol requeue 17\n" in done.stdout and done.returncode == 130, done


def test_what_trains_nothing_is_a_failure(tmp_path: Path) -> None:
    done = submit(tmp_path, SRUN_EXIT="0")  # as symmetric-run ends if Ray does not start
    assert done.returncode == 1 and "nothing was trained" in done.stderr
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.device").write_text("cpu\n")
    done = submit(tmp_path)
    assert done.returncode == 1 and "DEVICE=gpu make setup" in done.stderr and "ran" not in done.stdout


def test_a_small_run_keeps_earlier_results(tmp_path: Path) -> None:
    script = (ROOT / "examples/small_run.sh").read_text()
    python = 'mkdir -p work/out\necho "$*" >>work/out/calls\n'
    earlier = {"work/out/precious": "1", "work/out.1/older": "2"}
    write_programs(tmp_path, {"examples/small_run.sh": script, ".venv/bin/python": python, **earlier})
    command = ["bash", "examples/small_run.sh", "quickstart", "grpo", "3", "work/out/"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True)
    assert "work/out.2" in done.stdout
    files = sorted(
        str(file.relative_to(tmp_path / "work")) for file in (tmp_path / "work").rglob("*") if file.is_file()
    )
    assert files == ["out.1/older", "out.2/precious", "out/calls"]
    assert "model.path=work/out/model" in (tmp_path / "work/out/calls").read_text()


def test_sft_dpo_and_grpo_each_start_from_the_model_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("quickstart/sft_dpo_grpo.sh", "preferences/run.sh", "preferences/warm_up.sh")
    scripts = {f"examples/{name}": (ROOT / "examples" / name).read_text() for name in names}
    write_programs(tmp_path, {**scripts, ".venv/bin/python": 'echo "$*" >>calls\n'})
    command = ["bash", "examples/quickstart/sft_dpo_grpo.sh", "3", "work/out/"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=30, check=True)
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    programs = {words[1].rpartition("_")[2]: words[2:] for words in calls if "alphaapollo.trainer" in words[1]}
    monkeypatch.chdir(ROOT)
    sft = load_config(SftConfig, "sft", programs["sft"])
    dpo = load_config(DpoConfig, "dpo", programs["dpo"])
    grpo = load_config(Config, "ppo", programs["ppo"])
    starts = [sft.model.path, dpo.model.path, grpo.actor_rollout_ref.model.path]
    assert starts == ["work/out/model", "work/out/sft/model", "work/out/dpo/model"]
    assert [one.trainer.folder for one in (sft, dpo, grpo)] == [
        Path("work/out", name) for name in ("sft", "dpo", "grpo")
    ]
    assert dpo.trainer.total_training_steps == 96 and grpo.trainer.seed == 3
