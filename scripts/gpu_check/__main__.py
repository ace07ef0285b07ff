"""Check that training is correct on this machine, and measure its speed and memory.

    make gpu-check                                          # ten minutes on one GPU; minutes on a CPU, with small sizes
    make gpu-check ARGS="--minutes 60"                      # all checks, with complete iterations
    python -m scripts.gpu_check --only attention memory     # some checks; results of others in --out are kept
    python -m scripts.gpu_check --wheels FOLDER             # on a machine with torch and transformers, without an index

FOLDER has the wheels of the other required packages; `python -m scripts.gpu_check.wheels FOLDER` downloads them on a
machine with an index. Each check runs in a separate process with a deadline, in the order of CHECKS. Checks of packages
that are not installed are reported as untested, never as passed. Measurements are appended to measurements.jsonl under
--out at once; table.md and report.json are written after each check, and expected values (expectations.py) are printed
beside measured ones. scripts/gpu_report.py writes a report into the docs. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts import checks  # noqa: E402
from scripts.checks import Outcome  # noqa: E402
from scripts.gpu_check.kit import Kit  # noqa: E402
from scripts.gpu_check.older_torch import adapt_varlen_attention  # noqa: E402
from scripts.gpu_check.report import make_report  # noqa: E402
from scripts.gpu_check.wheels import unpack_wheels  # noqa: E402

# The most informative checks first. Compilation is last: it takes minutes and rarely fails.
CHECKS: dict[str, tuple[int, str]] = {  # NAME or NAME:PART of check_NAME.py -> (deadline in seconds, what it checks)
    "versions": (40, "installed versions, and the speed of matrix products and copies"),
    "attention": (40, "each attention kind against float64, forward and backward; rows are independent"),
    "throughput:0.5b": (80, "update of 0.5B: tokens/s, MFU, its parts, a bare loop in bfloat16, Liger"),
    "memory": (80, "planned and measured memory: checkpointing, LoRA, each offload; speed of offloading"),
    "throughput:1.5b": (80, "the same update of 1.5B"),
    "ipc": (50, "weights sent to another process in buckets: digests, bytes/s, no leak"),
    "worker": (60, "a worker with two layers: gradients, offloads, full KL, save, load, export"),
    "throughput:7b": (100, "update of 8 layers of 7B"),
    "throughput:30b-a3b": (100, "update of 4 layers of 30B-A3B, a mixture of experts"),
    "lm_head": (30, "log-probs and gradients of 16k tokens over 152k words against dense float32"),
    "loop": (120, "complete GRPO runs in one process: fake engine, hf engine, hf engine with 0.5B"),
    "vllm_transfer": (240, "vLLM on the training GPU: IPC in several buckets, sleep, CUDA graphs, experts"),
    "ray": (75, "two iterations on Ray with vLLM and a resume between them, log-prob mismatch"),
    "vision": (225, "two iterations with images and a trained vision tower, three families: log-prob mismatch"),
    "graphs": (70, "vLLM's decoding with and without CUDA graphs"),
    "throughput:compiled": (120, "update of 0.5B with and without torch.compile"),
    "step:0.5b": (900, "three iterations of 0.5B with vLLM: 128 x 8 samples of 1,800 tokens"),
    "step:gsm8k": (900, "three iterations of the recipe gsm8k for one GPU, with random weights"),
}
PATIENCE = 5  # factor on all times on a CPU, which may be shared
MIN_SECONDS = 15.0  # a check needs about this long to import its libraries


def child(name: str, device: str, work: Path, out: Path) -> NoReturn:
    """Run one check in this process."""
    work.mkdir(parents=True, exist_ok=True)
    kit = Kit(device, work, partial(checks.record, out, name))
    module, _, part = name.partition(":")

    def check() -> None:
        adapt_varlen_attention()
        with kit.part("expectations"):
            checks.expect(out, name, find_expectations(name, kit))
        importlib.import_module(f"scripts.gpu_check.check_{module}").run(kit, *([part] if part else []))
        kit.raise_failures()

    checks.child(name, check, out)


def find_expectations(name: str, kit: Kit) -> dict[str, tuple[float, float, str]]:
    """Expected values of a check on this GPU; none on a CPU, where checks use small models."""
    if not kit.on_gpu:
        return {}
    import torch

    from scripts.gpu_check.expectations import list_expectations

    return list_expectations(name, torch.cuda.get_device_name(), kit.memory.get_total())


def run_check(name: str, device: str, work: Path, out: Path, deadline: float) -> Outcome:
    """Run one check in a separate process."""
    command = [sys.executable, "-m", "scripts.gpu_check", "--child", name, "--device", device]
    return checks.run_check(name, [*command, "--work", str(work), "--out", str(out)], out, deadline)


def main() -> int:
    args = parse_arguments()
    if args.child:
        child(args.child, args.device, args.work, args.out)
    out = args.out.resolve()
    if not args.only:
        shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="gpu_check_", ignore_cleanup_errors=True) as folder:
        if args.wheels:
            site = unpack_wheels(args.wheels, Path(folder, "site"))
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
        gpu, driver = find_gpu() if args.device != "cpu" else ("", "")
        device, patience = ("cuda", 1) if gpu or args.device == "cuda" else ("cpu", PATIENCE)
        end = time.monotonic() + 60 * args.minutes * patience

        def run(name: str) -> Outcome:
            left = end - time.monotonic()
            if left < MIN_SECONDS:
                return Outcome(name, "untested", 0, reason=f"no time left; run it with --only {name}")
            return run_check(name, device, Path(folder, "work"), out, min(CHECKS[name][0] * patience, left))

        texts = {name: CHECKS[name][1] for name in args.only or CHECKS}
        title = f"gpu-check on {gpu or device}, {time.strftime('%Y-%m-%d')}"
        status = checks.run_all(texts, out, run, title, partial(make_report, gpu, driver))
    print(f"Report: {out / checks.REPORT}. Write it into the docs: python -m scripts.gpu_report {out / checks.REPORT}")
    return status


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu_check")
    parser.add_argument("--only", nargs="*", choices=list(CHECKS), metavar="NAME", help=", ".join(CHECKS))
    parser.add_argument("--wheels", type=Path, help="folder with wheels, which are unpacked and imported first")
    parser.add_argument("--minutes", type=float, default=10, help="limit of the whole run on a GPU (default: 10)")
    parser.add_argument("--child", choices=list(CHECKS), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def find_gpu() -> tuple[str, str]:
    """Name and driver version of the GPU, or empty texts. Other processes find them: this one has no CUDA context."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    name = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    if not name or not shutil.which("nvidia-smi"):
        return name, "unknown" if name else ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return name, subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
