"""Does this machine train rightly? Ten minutes on one GPU; a minute or two on a CPU, with small sizes.

    make gpu-check                          # or: python -m scripts.gpu_check --only attention lm_head

Each check runs in a process of its own with a deadline, in the order of CHECKS. What is not installed is reported as
untested, never as passed. Writes table.md and result.json under --out; ends with 1 if a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.gpu_check.kit import Kit, Untested  # noqa: E402

CHECKS: dict[str, tuple[int, str]] = {  # NAME of check_NAME.py -> (deadline in seconds, what it holds)
    "versions": (20, "imports, and a product on the device"),
    "attention": (40, "each kind against float64, forward and backward; rows do not see each other"),
    "lm_head": (25, "log-probs and gradients of 16k tokens over 152k words against dense float32"),
    "worker": (110, "a 0.5B policy worker: checkpointing, offload, full KL, save, load, export, gradients"),
    "memory": (30, "what stays after an update, and the planner's peak against the measured one"),
    "throughput": (90, "waits a micro-batch, tokens/s and MFU against a bare loop"),
    "ipc": (30, "weights into another process: digests, bytes/s, no leak"),
    "loop": (60, "whole runs in one process, with the fake and the hf engine"),
    "vllm_transfer": (50, "vLLM on the training GPU: IPC, sleep, digests, log-probs"),
    "ray": (75, "two iterations through Ray and vLLM with a resume between them, probe gap"),
    "graphs": (70, "vLLM's decoding with and without CUDA graphs"),
}
PATIENCE = 5  # of the deadlines on a CPU, where others may use the cores

Status = Literal["passed", "failed", "untested"]


@dataclass(frozen=True)
class Outcome:
    name: str
    status: Status
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


def child(name: str, kit: Kit, answer: Path) -> None:
    """Run one check in this process and write what came of it; a check that fails ends it with its traceback."""
    kit.folder.mkdir(parents=True, exist_ok=True)
    try:
        figures = importlib.import_module(f"scripts.gpu_check.check_{name}").run(kit)
        said: dict[str, Any] = {"status": "passed", "figures": figures}
    except Untested as missing:
        said = {"status": "untested", "reason": str(missing)}
    answer.write_text(json.dumps(said))
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads


def run_check(name: str, device: str, out: Path, deadline: float) -> Outcome:
    """In a process of its own, whose session ends with it."""
    answer, log = out / f"{name}.json", out / f"{name}.log"
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "scripts.gpu_check", "--child", name, "--device", device, "--out", str(out)]
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(deadline)
        ended = process.poll()
        kill_session(process)
    seconds = time.monotonic() - start
    if not answer.is_file():
        why = f"took more than {deadline:.0f} s" if ended is None else last_line(log) or f"ended with {ended}"
        return Outcome(name, "failed", seconds, reason=f"{why} ({log})")
    said = json.loads(answer.read_text())
    return Outcome(name, said["status"], seconds, said.get("figures", {}), said.get("reason", ""))


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """The check's process, and what it has left behind in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""


def table(outcomes: list[Outcome], title: str) -> str:
    lines = [f"# {title}", "", "| check | | seconds | figures |", "|---|---|---|---|"]
    for one in outcomes:
        figures = ", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                            for name, value in one.figures.items())  # fmt: skip
        lines.append(f"| {one.name} | **{one.status}** | {one.seconds:.0f} | {one.reason or figures} |")
    return "\n".join(lines) + "\n"


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
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    outcomes = []
    for name in args.only:
        print(f"{name}: {CHECKS[name][1]} ...", flush=True)
        deadline = CHECKS[name][0] * (1 if device == "cuda" else PATIENCE)
        outcomes.append(run_check(name, device, args.out.resolve(), deadline))
        print(f"    {outcomes[-1].status} in {outcomes[-1].seconds:.0f} s {outcomes[-1].reason}", flush=True)
    versions = outcomes[0].figures if outcomes[0].name == "versions" else {}
    title = f"gpu-check on {versions.get('device', device)}, {time.strftime('%Y-%m-%d')}"
    (args.out / "table.md").write_text(table(outcomes, title))
    (args.out / "result.json").write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    shutil.rmtree(args.out / "work", ignore_errors=True)
    print(table(outcomes, title))
    return int(any(one.status == "failed" for one in outcomes))


def has_gpu() -> str:
    """Asked in another process: this one must not hold a CUDA context."""
    code = "import torch; print(torch.cuda.is_available())"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return "cuda" if "True" in answer.stdout else "cpu"


if __name__ == "__main__":
    raise SystemExit(main())
