"""TRL baseline of step.py: its virtual environment, and a search for its fastest settings."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from alphaapollo.config.resolve import has_bfloat16_instructions

ROOT = Path(__file__).resolve().parents[2]
TRL = "trl==1.16.0"
VLLM_IN_PROCESS = {  # environment variables of TRL with vLLM
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_COMPILE_DISABLE": "1",
    "MASTER_ADDR": "127.0.0.1",
}


@dataclass(frozen=True)
class Settings:
    """TRL settings that determine its speed."""

    dtype: str
    micro_batch: int  # completions
    threads: int
    engine: str = "vllm"  # vllm: in its process; generate: Hugging Face's generate

    def __str__(self) -> str:
        return f"{self.engine}, {self.dtype}, micro-batch {self.micro_batch}, {self.threads} thread(s)"


@dataclass(frozen=True)
class Task:
    """Work of one step, the same for both sides."""

    model: str
    prompts: str
    num_prompts: int
    group: int
    max_tokens: int
    max_model_len: int  # tokens of the longest sequence of vLLM
    lr: float = 1e-6
    gradient_checkpointing: bool = False


def environment(threads: int) -> dict[str, str]:
    """Environment variables of either side."""
    return os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def trl_python(folder: Path) -> Path:
    """Python of a virtual environment with TRL beside the packages of this one; created on the first call."""
    python, stamp = folder / "bin" / "python", folder / ".installed"
    packages = sysconfig.get_path("purelib")
    wanted = f"{TRL} beside {packages}"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {TRL} into {folder}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        (own,) = (folder / "lib").glob("python*/site-packages")
        (own / "packages.pth").write_text(f"import site; site.addsitedir({packages!r})\n")
        install = '. scripts/pip_settings.sh; exec "$0" -m uv pip install --quiet --no-deps --python "$@"'
        subprocess.run(["bash", "-c", install, sys.executable, str(python), TRL], cwd=ROOT, check=True)
        stamp.write_text(wanted)
    return python


def time_trl(python: Path, task: Task, settings: Settings, warmup: int, steps: int) -> dict[str, Any]:
    """Run TRL and return the seconds of each step after the warm-up and the tokens per completion."""
    given = asdict(task) | asdict(settings) | {"warmup": warmup, "steps": steps}
    command = [str(python), str(ROOT / "scripts/bench/_trl_side.py"), json.dumps(given)]
    environ = environment(settings.threads) | (VLLM_IN_PROCESS if settings.engine == "vllm" else {})
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"TRL failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1]) | {"settings": asdict(settings)}


def search(python: Path, task: Task, first: Settings, micro_batches: Sequence[int]) -> tuple[Settings, Settings]:
    """Search with a few short runs, each printed. Returns the best settings at the dtype of `first`, and overall."""
    seconds: dict[Settings, float] = {}

    def measure(settings: Settings) -> None:
        if settings not in seconds:
            seconds[settings] = min(time_trl(python, task, settings, warmup=1, steps=2)["step_seconds"])
            print(f"TRL, {settings}: {seconds[settings]:.2f} s per step", file=sys.stderr, flush=True)

    def best() -> Settings:
        return min(seconds, key=seconds.__getitem__)

    for micro_batch in micro_batches:
        measure(replace(first, micro_batch=micro_batch))
    for threads in (first.threads // 2, 2 * first.threads):
        if 0 < threads <= len(os.sched_getaffinity(0)):
            measure(replace(best(), threads=threads))
    same = best()
    other = "bfloat16" if first.dtype == "float32" else "float32"
    if other == "float32" or has_bfloat16_instructions():  # other CPUs convert each number
        measure(replace(same, dtype=other))
    return same, best()


def median(side: dict[str, Any]) -> float:
    """Median seconds of a step."""
    return statistics.median(side["step_seconds"])
