"""Check that training is correct on this machine: ten minutes on one GPU, a minute or two on a CPU with small sizes.

    make gpu-check                          # or: python -m scripts.gpu_check --only attention lm_head

Each check runs in a separate process with a deadline, in the order of CHECKS. Checks of packages that are not installed
are reported as untested, never as passed. Writes table.md and result.json under --out; the exit status is 1 if a check
failed.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts import checks  # noqa: E402
from scripts.checks import Outcome  # noqa: E402
from scripts.gpu_check.kit import Kit  # noqa: E402

CHECKS: dict[str, tuple[int, str]] = {  # NAME of check_NAME.py -> (deadline in seconds, what it checks)
    "versions": (20, "installed versions, and a matrix product on the device"),
    "attention": (40, "each attention kind against float64, forward and backward; rows are independent"),
    "lm_head": (25, "log-probs and gradients of 16k tokens over 152k words against dense float32"),
    "worker": (110, "a 0.5B policy worker: checkpointing, offload, full KL, save, load, export, gradients"),
    "memory": (30, "memory that remains after an update, and the planned peak against the measured one"),
    "throughput": (90, "device synchronizations per micro-batch, tokens/s and MFU against a minimal loop"),
    "ipc": (30, "weights sent to another process: digests, bytes/s, no leak"),
    "loop": (60, "complete runs in one process, with the fake and the hf engine"),
    "vllm_transfer": (50, "vLLM on the training GPU: IPC, sleep, digests, log-probs"),
    "ray": (75, "two iterations on Ray with vLLM and a resume between them, log-prob mismatch"),
    "graphs": (70, "vLLM's decoding with and without CUDA graphs"),
}
PATIENCE = 5  # factor on deadlines on a CPU, which may be shared


def child(name: str, kit: Kit, answer: Path) -> NoReturn:
    """Run one check in this process."""
    kit.folder.mkdir(parents=True, exist_ok=True)
    checks.child(lambda: dict(importlib.import_module(f"scripts.gpu_check.check_{name}").run(kit)), answer)


def run_check(name: str, device: str, out: Path, deadline: float) -> Outcome:
    """Run one check in a separate process."""
    command = [sys.executable, "-m", "scripts.gpu_check", "--child", name, "--device", device, "--out", str(out)]
    return checks.run_check(name, command, out, deadline)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu_check")
    parser.add_argument("--only", nargs="*", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--child", choices=list(CHECKS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, Kit(args.device, args.out / "work"), args.out / f"{args.child}.json")
    device = has_gpu() if args.device == "auto" else args.device
    texts, out = {name: CHECKS[name][1] for name in args.only}, args.out.resolve()
    patience = 1 if device == "cuda" else PATIENCE
    outcomes = checks.run_all(texts, out, lambda name: run_check(name, device, out, CHECKS[name][0] * patience))
    versions = outcomes[0].figures if outcomes[0].name == "versions" else {}
    title = f"gpu-check on {versions.get('device', device)}, {time.strftime('%Y-%m-%d')}"
    shutil.rmtree(args.out / "work", ignore_errors=True)
    return checks.report(outcomes, title, args.out)


def has_gpu() -> str:
    """Whether a GPU is usable, tested in another process so that this one has no CUDA context."""
    code = "import torch; print(torch.cuda.is_available())"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return "cuda" if "True" in answer.stdout else "cpu"


if __name__ == "__main__":
    raise SystemExit(main())
