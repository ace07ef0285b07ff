"""Inject faults at random times and check that the run ends with the results of an undisturbed run, bit for bit.

    python -m scripts.chaos --seed 7                                  # ten kills in the synchronous loop, minutes
    python -m scripts.chaos --seed 7 --kills 25 --stops 5 --damages 5 --fills 1 --scenes sync_single sync_multi \
        async_single async_multi                                      # the table of docs/reliability.md, hours
    python -m scripts.chaos --kills 0 --stops 20 --steps 80           # each kind of process stopped, many to a run
    python -m scripts.chaos --roles engine --steps 40 --scenes sync_single async_single  # ten dead engines in each loop
    python -m scripts.chaos --soak 300                                # one long run with kills throughout, and
                                                                      # the growth of its memory

Faults are kills, stops (SIGSTOP), damaged checkpoint files and full disks. The same command restarts the run until it
is complete. Its metrics (without times), rollouts and model are then compared with those of an undisturbed run. An
asynchronous run has no fixed order, so the check is that every iteration and every group is accounted for. Writes
table.md and result.json under --out; the exit status is 1 if a check failed. Full disks need permission to mount.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.chaos.campaign import FaultCampaign  # noqa: E402
from scripts.chaos.scenes import ROLES, SCENES, SceneFolders  # noqa: E402

STOPPED = [role for role in ROLES if role != "driver"]  # a stopped driver cannot report anything


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scenes", nargs="+", choices=list(SCENES), default=["sync_single"])
    parser.add_argument("--kills", type=int, default=10, help="kills in each scene")
    parser.add_argument("--roles", nargs="+", choices=list(ROLES), default=list(ROLES), help="roles to kill")
    parser.add_argument("--stops", type=int, default=0, help="stops in each scene for each role except the driver")
    parser.add_argument("--damages", type=int, default=0, help="damaged checkpoint files in each scene")
    parser.add_argument("--fills", type=int, default=0, help="full disks in each scene")
    parser.add_argument("--steps", type=int, default=8, help="iterations of a run")
    parser.add_argument("--soak", type=int, default=0, help="iterations of one long run, in place of the other faults")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "chaos")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    out = args.out.resolve()
    every = [disturb(args, SceneFolders(out, scene)) for scene in args.scenes]
    report(args, every)
    return 1 if any(campaign.problems for campaign in every) else 0


def disturb(args: argparse.Namespace, folders: SceneFolders) -> FaultCampaign:
    """Inject all faults into the runs of one scene."""
    rng = random.Random(f"{args.seed} {folders.scene}")
    roles = [role for role in args.roles if role in SCENES[folders.scene].roles]
    if args.soak:
        campaign = FaultCampaign(folders, rng, args.soak, save_freq=10, longest=30.0)
        campaign.undisturbed()
        campaign.soak(roles)
        return campaign
    campaign = FaultCampaign(folders, rng, args.steps)
    campaign.undisturbed()
    campaign.kills(args.kills, roles)
    for role in (role for role in STOPPED if role in roles and args.stops):
        campaign.stops(args.stops, role)
    campaign.damages(args.damages)
    campaign.fills(args.fills)
    return campaign


def report(args: argparse.Namespace, every: list[FaultCampaign]) -> None:
    """Print the table, and write it with every single fault."""
    problems = [problem for campaign in every for problem in campaign.problems]
    text = "\n".join([f"# chaos, seed {args.seed}, {time.strftime('%Y-%m-%d')}", "", *table(every), ""])
    text += "".join(f"* {problem}\n" for problem in problems)
    if args.soak:
        text += "\n".join(["", *make_memory_table(every), ""])
    print(text)
    (args.out / "table.md").write_text(text)
    harms = [{"scene": campaign.folders.scene} | asdict(fault) for campaign in every for fault in campaign.faults]
    (args.out / "result.json").write_text(json.dumps({"harms": harms, "problems": problems}, indent=1))
    print(json.dumps({"harms": len(harms), "problems": len(problems)}))


def table(every: list[FaultCampaign]) -> list[str]:
    """Markdown table with the outcomes of each kind of fault, by scene and target."""
    lines = [
        "| scene | fault | target | times | outcomes | slowest, s | problems |",
        "|---|---|---|---|---|---|---|",
    ]
    for campaign in every:
        for kind, target in sorted({(fault.kind, fault.target) for fault in campaign.faults}):
            same = [fault for fault in campaign.faults if (fault.kind, fault.target) == (kind, target)]
            outcomes = [fault.outcome for fault in same]
            counts = ", ".join(f"{word} {outcomes.count(word)}" for word in sorted(set(outcomes)))
            slowest, bad = max(fault.seconds for fault in same), sum(bool(fault.problem) for fault in same)
            scene = campaign.folders.scene
            lines.append(f"| {scene} | {kind} | {target} | {len(same)} | {counts} | {slowest:.0f} | {bad} |")
    return lines


def make_memory_table(every: list[FaultCampaign]) -> list[str]:
    """Markdown table with the memory metrics of each run."""
    lines = ["| scene | run | memory | MiB per iteration | at the end, MiB | peak, MiB |", "|---|---|---|---|---|---|"]
    for campaign in every:
        for run, figures in campaign.memory.items():
            for name, own in figures.items():
                cells = (campaign.folders.scene, run, name, f"{own.slope:+.3f}", f"{own.last:.0f}", f"{own.most:.0f}")
                lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
