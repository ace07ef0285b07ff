"""Check multi-node runs: some minutes on two cores, no GPU.

    make cluster-check                      # or: python -m scripts.cluster_check --only two_nodes slurm

The nodes are simulated machines (machines.py) on a real network of Linux namespaces; its speed is not representative.
Each check runs in a separate process with a deadline, in the order of CHECKS. Writes table.md, report.json,
measurements.jsonl and log.txt under --out; the exit status is 1 if a check failed. Needs permission to create
namespaces (root, or user namespaces).
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts import checks  # noqa: E402
from scripts.checks import Outcome, Untested  # noqa: E402
from scripts.cluster_check.kit import Kit  # noqa: E402
from scripts.cluster_check.machines import in_own_network, lay_network, usable  # noqa: E402

CHECKS: dict[str, tuple[int, str]] = {  # NAME of check_NAME.py -> (deadline in seconds, what it checks)
    "two_nodes": (600, "16 iterations on two nodes with an engine each: the reward rises, weights are verified"),
    "three_nodes": (600, "three nodes, adapters served on each"),
    "engine_nodes": (600, "one training node, two nodes for engines only: weights and adapters are copied to them"),
    "ray_job": (600, "ray_job.sh: sequence parallelism and replicas with two ranks per node; exit statuses"),
    "slurm": (900, "slurm.sbatch with fake srun and scontrol; exit statuses"),
    "late": (600, "a missing node is reported in time, a late node is awaited"),
    "differs": (400, "different versions, missing files, outputs that are not shared: reported before workers start"),
    "lost": (600, "a node that dies during a run ends it with an error that names the node"),
}  # deadlines allow for a busy machine


def child(name: str, kit: Kit, out: Path) -> None:
    """Run one check in this process, which has its own network namespace."""

    def check() -> None:
        if reason := usable():
            raise Untested(reason)
        lay_network()
        measurements: dict[str, object] = importlib.import_module(f"scripts.cluster_check.check_{name}").run(kit)
        for measurement, value in measurements.items():
            checks.record(out, name, measurement, value)

    shutil.rmtree(kit.folder, ignore_errors=True)
    kit.folder.mkdir(parents=True)
    checks.child(name, check, out)


def run_check(name: str, out: Path) -> Outcome:
    """Run one check in a separate process and network namespace."""
    command = [sys.executable, "-m", "scripts.cluster_check", "--child", name, "--out", str(out)]
    return checks.run_check(name, command if usable() else in_own_network(command), out, CHECKS[name][0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "cluster_check")
    parser.add_argument("--only", nargs="*", choices=list(CHECKS))
    parser.add_argument("--child", choices=list(CHECKS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, Kit(args.out / args.child), args.out)
    texts, out = {name: CHECKS[name][1] for name in args.only or CHECKS}, args.out.resolve()
    if not args.only:
        shutil.rmtree(out, ignore_errors=True)
    return checks.run_all(texts, out, lambda name: run_check(name, out), f"cluster-check, {time.strftime('%Y-%m-%d')}")


if __name__ == "__main__":
    raise SystemExit(main())
