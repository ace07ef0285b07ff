"""Run agents on many task folders for minutes while processes are killed, and report what is left behind.

python -m scripts.stress_tasks [--seconds 600] [--tasks 200] [--agents 4] [--backend rootless]

Each minute is a driver of its own, whose last act is to be killed by kill -9 while its agents work. Within it, agents
solve tasks, do nothing, leave processes, use too much memory, disk or time, and every few seconds the first process of
a sandbox or a command in it is killed. Exit code 1: something was left, the memory grew, or a failure had no reason.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from alphaapollo.plugins.tasks.harbor import Trial, open_trial
from alphaapollo.plugins.tasks.sandboxes.base import SandboxFailedError
from examples.tasks.make_tasks import write_tasks

MINUTE, KILL_SECONDS, WAIT_SECONDS = 60.0, 3.0, 15.0
GROWTH_MB = 50  # of a driver's memory between its first and its last trial
COMMANDS = {
    "works": "",
    "does nothing": "true",
    "leaves processes": "for i in 1 2 3; do (setsid sleep 999 &); done; sleep 999 &",
    "uses memory": "python3 -c 'x = [bytearray(40 << 20) for _ in range(20)]'",
    "fills the disk": "head -c 1G /dev/zero > /big; mkdir /many; cd /many; for i in $(seq 500); do touch $i; done",
    "takes too long": "sleep 999",
    "forks": "for i in $(seq 900); do sleep 30 & done; wait",
}


def list_children(pid: int) -> list[int]:
    """Return the processes below a process."""
    parents = {}
    for folder in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(folder)] = int(Path(f"/proc/{folder}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
    found, queue = list[int](), [pid]
    while queue:
        parent = queue.pop()
        below = [child for child, one in parents.items() if one == parent]
        found, queue = found + below, queue + below
    return found


def read_memory_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def act(trial: Trial, kind: str) -> None:
    if kind == "works":
        await trial.solve()
    else:
        await trial.exec(COMMANDS[kind], timeout=2)


async def drive(folders: list[Path], agents: int, backend: str, seed: int) -> None:
    """Run agents until this process is killed. Prints a line of JSON for each trial."""
    rng = random.Random(seed)

    async def run_agent() -> None:
        while True:
            folder, kind = rng.choice(folders), rng.choice(list(COMMANDS))
            try:
                async with open_trial(folder, backend) as trial:
                    await act(trial, kind)
                    outcome = f"reward {(await trial.verify()).reward:g}"
            except (SandboxFailedError, ValueError) as error:
                outcome = f"failed: {str(error).strip().splitlines()[-1]}".replace(folder.name, "TASK")
            except Exception as error:  # noqa: BLE001  counted as a failure without a name
                outcome = f"unnamed: {error!r}"
            print(json.dumps({"kind": kind, "outcome": outcome, "memory": read_memory_mb()}), flush=True)

    async def kill_some() -> None:
        while True:
            await asyncio.sleep(KILL_SECONDS)
            if children := list_children(os.getpid()):
                try:
                    os.kill(rng.choice(children), signal.SIGKILL)  # of a sandbox, or a command in it
                except ProcessLookupError:
                    continue

    await asyncio.gather(kill_some(), *(run_agent() for _ in range(agents)))


def run_minute(arguments: list[str], seconds: float) -> tuple[list[dict[str, Any]], list[int]]:
    """Run a driver, kill it, and return its trials and the processes that it has left."""
    with tempfile.TemporaryFile("w+") as output:
        driver = subprocess.Popen([sys.executable, "-m", "scripts.stress_tasks", *arguments], stdout=output)
        time.sleep(seconds)
        children = list_children(driver.pid)
        driver.kill()
        driver.wait()
        deadline = time.monotonic() + WAIT_SECONDS
        while (left := [pid for pid in children if is_alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.1)
        output.seek(0)
        lines = [line for line in output.read().splitlines() if line.endswith("}")]
    return [json.loads(line) for line in lines], left


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--backend", default="rootless")
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.drive:
        folders = sorted(options.drive.iterdir())
        asyncio.run(drive(folders, options.agents, options.backend, options.seed))
    faults, outcomes = list[str](), Counter[tuple[str, str]]()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder), "train", 0, options.tasks)
        while (rest := options.seconds - (time.monotonic() - start)) > 1:
            number = int(time.monotonic() - start)
            words = ["--drive", folder, "--agents", str(options.agents), "--backend", options.backend]
            trials, left = run_minute([*words, "--seed", str(number)], min(MINUTE, rest))
            outcomes.update((one["kind"], one["outcome"]) for one in trials)
            memory = [one["memory"] for one in trials]
            growth = memory[-1] - memory[len(memory) // 4] if memory else 0.0
            print(
                f"{number:4d} s: {len(trials)} trials, memory {growth:+.1f} MB, {len(left)} processes left", flush=True
            )
            faults += [f"no trial ended in the minute from {number} s"] if not trials else []
            faults += [f"processes left: {left}"] if left else []
            faults += [f"memory grew by {growth:.0f} MB"] if growth > GROWTH_MB else []
    faults += [f"no reason: {outcome}" for _, outcome in outcomes if outcome.startswith("unnamed")]
    for (kind, outcome), count in sorted(outcomes.items()):
        print(f"{count:5d}  {kind}: {outcome[:150]}")
    print("\n".join(faults) or "nothing left, memory flat, each failure named")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
