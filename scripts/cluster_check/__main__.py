"""Does a run on several nodes work? Some minutes on two cores, no GPU.

    make cluster-check                      # or: python -m scripts.cluster_check --only two_nodes slurm

The nodes are machines of paper (machines.py): the network between them is real to every program, and its speed is not.
Each check runs in a process of its own with a deadline, in the order of CHECKS. Writes table.md and result.json under
--out; ends with 1 if a check failed. Needs leave to make namespaces (root, or a kernel that gives it to users).
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts import checks  # noqa: E402
from scripts.checks import Outcome, Untested  # noqa: E402
from scripts.cluster_check.kit import Kit  # noqa: E402
from scripts.cluster_check.machines import in_own_network, lay_network, usable  # noqa: E402

CHECKS: dict[str, tuple[int, str]] = {  # NAME of check_NAME.py -> (deadline in seconds, what it holds)
    "two_nodes": (600, "16 iterations over two nodes with an engine on each; it learns, weights are proved on both"),
    "three_nodes": (600, "three nodes, adapters served on each"),
    "ray_job": (600, "ray_job.sh: two ranks a node share sequences and copies; exit statuses"),
    "slurm": (900, "slurm.sbatch under stand-ins for srun and scontrol; exit statuses"),
    "late": (600, "a missing node is named in time, a late one is waited for"),
    "differs": (400, "another version, missing files, outputs that are not shared: named before workers start"),
    "lost": (600, "a node that dies in mid-run ends it, by name"),
}  # deadlines are for a machine with other work to do


def child(name: str, kit: Kit, answer: Path) -> None:
    """Run one check in this process, whose network is its own."""

    def check() -> dict[str, object]:
        if reason := usable():
            raise Untested(reason)
        lay_network()
        return dict(importlib.import_module(f"scripts.cluster_check.check_{name}").run(kit))

    kit.folder.mkdir(parents=True, exist_ok=True)
    checks.child(check, answer)


def run_check(name: str, out: Path) -> Outcome:
    """In a process of its own, and a network."""
    command = [sys.executable, "-m", "scripts.cluster_check", "--child", name, "--out", str(out)]
    return checks.run_check(name, command if usable() else in_own_network(command), out, CHECKS[name][0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "cluster_check")
    parser.add_argument("--only", nargs="*", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--child", choices=list(CHECKS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, Kit(args.out / args.child), args.out / f"{args.child}.json")
    texts, out = {name: CHECKS[name][1] for name in args.only}, args.out.resolve()
    outcomes = checks.run_all(texts, out, lambda name: run_check(name, out))
    return checks.report(outcomes, f"cluster-check, {time.strftime('%Y-%m-%d')}", args.out)


if __name__ == "__main__":
    raise SystemExit(main())
