"""Kill, stop, damage and fill at random instants, and see that the end is the undisturbed run's, bit for bit.

    python -m scripts.chaos --seed 7                                  # ten kills in the synchronous loop, minutes
    python -m scripts.chaos --seed 7 --kills 25 --stops 5 --damages 5 --fills 1 --scenes sync_single sync_multi \
        async_single async_multi                                      # the table of docs/reliability.md, hours
    python -m scripts.chaos --kills 0 --stops 20 --steps 80           # each kind of process stopped, many to a run
    python -m scripts.chaos --soak 300                                # one long run with deaths all along it, and how
                                                                      # its memory grows

A run is disturbed again and again until it is through; the same command begins it again whenever it has ended. Then its
metrics (without times), rollouts and model are compared with those of a run that nobody disturbed; of an asynchronous
one, whose order nobody can foretell, it is seen that every iteration and every group is accounted for. Writes table.md
and result.json under --out; ends with 1 if something was not as promised. A disk that fills up needs leave to mount.
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

from scripts.chaos.rounds import Rounds  # noqa: E402
from scripts.chaos.scenes import ROLES, SCENES, Place  # noqa: E402

STOPPED = [role for role in ROLES if role != "driver"]  # a driver that is stopped can tell nobody


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scenes", nargs="+", choices=list(SCENES), default=["sync_single"])
    parser.add_argument("--kills", type=int, default=10, help="of each scene")
    parser.add_argument("--roles", nargs="+", choices=list(ROLES), default=list(ROLES), help="who is killed")
    parser.add_argument("--stops", type=int, default=0, help="of each scene and each role but the driver")
    parser.add_argument("--damages", type=int, default=0, help="of each scene: a file of the newest checkpoint")
    parser.add_argument("--fills", type=int, default=0, help="of each scene: a disk that fills up")
    parser.add_argument("--steps", type=int, default=8, help="iterations of a run")
    parser.add_argument("--soak", type=int, default=0, help="iterations of one long run, instead of all that")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "chaos")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    out = args.out.resolve()
    every = [disturb(args, Place(out, scene)) for scene in args.scenes]
    report(args, every)
    return 1 if any(rounds.problems for rounds in every) else 0


def disturb(args: argparse.Namespace, place: Place) -> Rounds:
    """All that is to be done to the runs of one scene."""
    rng = random.Random(f"{args.seed} {place.scene}")
    roles = [role for role in args.roles if role in SCENES[place.scene].roles]
    if args.soak:
        rounds = Rounds(place, rng, args.soak, save_freq=10, longest=30.0)
        rounds.undisturbed()
        rounds.soak(roles)
        return rounds
    rounds = Rounds(place, rng, args.steps)
    rounds.undisturbed()
    rounds.kills(args.kills, roles)
    for role in (role for role in STOPPED if role in roles and args.stops):
        rounds.stops(args.stops, role)
    rounds.damages(args.damages)
    rounds.fills(args.fills)
    return rounds


def report(args: argparse.Namespace, every: list[Rounds]) -> None:
    """Print the table, and write it with every single harm."""
    problems = [problem for rounds in every for problem in rounds.problems]
    text = "\n".join([f"# chaos, seed {args.seed}, {time.strftime('%Y-%m-%d')}", "", *table(every), ""])
    text += "".join(f"* {problem}\n" for problem in problems)
    if args.soak:
        text += "\n".join(["", *memory_table(every), ""])
    print(text)
    (args.out / "table.md").write_text(text)
    harms = [{"scene": rounds.place.scene} | asdict(harm) for rounds in every for harm in rounds.harms]
    (args.out / "result.json").write_text(json.dumps({"harms": harms, "problems": problems}, indent=1))
    print(json.dumps({"harms": len(harms), "problems": len(problems)}))


def table(every: list[Rounds]) -> list[str]:
    """A line for each scene, deed and victim: how often, what became of it, and the slowest."""
    lines = [
        "| scene | what | whom | times | what became of it | slowest, s | problems |",
        "|---|---|---|---|---|---|---|",
    ]
    for rounds in every:
        for what, whom in sorted({(harm.what, harm.whom) for harm in rounds.harms}):
            same = [harm for harm in rounds.harms if (harm.what, harm.whom) == (what, whom)]
            became = [harm.became for harm in same]
            counts = ", ".join(f"{word} {became.count(word)}" for word in sorted(set(became)))
            slowest, bad = max(harm.seconds for harm in same), sum(bool(harm.problem) for harm in same)
            scene = rounds.place.scene
            lines.append(f"| {scene} | {what} | {whom} | {len(same)} | {counts} | {slowest:.0f} | {bad} |")
    return lines


def memory_table(every: list[Rounds]) -> list[str]:
    """A line for each scene, run and figure of memory."""
    lines = ["| scene | run | memory | MiB an iteration | at the end, MiB | most, MiB |", "|---|---|---|---|---|---|"]
    for rounds in every:
        for run, figures in rounds.memory.items():
            for name, own in figures.items():
                cells = (rounds.place.scene, run, name, f"{own.slope:+.3f}", f"{own.last:.0f}", f"{own.most:.0f}")
                lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
