"""`alphaapollo tasks check FOLDER`: run each task with its solution, without an agent, and with agents that cheat."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from textwrap import indent

from alphaapollo.cli.main import make_parser
from alphaapollo.cli.subcommand import report_refusals
from alphaapollo.observability.terminal import Terminal
from alphaapollo.plugins.tasks.folders import MAX_BYTES, find_tasks
from alphaapollo.plugins.tasks.harbor import SHOWN_CHARS, Trial, open_trial
from alphaapollo.plugins.tasks.sandboxes.base import SandboxFailedError
from alphaapollo.types import Score
from alphaapollo.utils.disk import read_small_file
from alphaapollo.utils.hub import expand_home

READ = "cat /tests/* /solution/* ; find / -xdev ( -name test.sh -o -name solve.sh ) -exec cat {} + 2>/dev/null"
READ += "; for one in /proc/[0-9]*; do cat $one/environ $one/cmdline; done"
ATTEMPTS = {
    "reads the tests": READ.replace("(", r"\(").replace(")", r"\)"),
    "writes a reward": "mkdir -p /logs/verifier; cd /logs/verifier; echo 1 > reward.txt; echo 1 > reward.json",
    "links the reward": "mkdir -p /mine/verifier; echo 1 > /mine/verifier/reward.txt; rm -rf /logs; ln -s /mine /logs",
    "replaces the tests": """
        mkdir -p /tests /root/bin; printf '#!/bin/bash\\necho 1 > /logs/verifier/reward.txt\\n' > /tests/test.sh
        chmod 555 /tests /tests/test.sh; for name in bash sh python3 cat test grep cmp; do for folder in \
/usr/local/sbin /usr/local/bin /usr/bin /bin /root/bin; do cp /tests/test.sh $folder/$name; done; done
        cp /tests/test.sh /root/.bashrc; cp /tests/test.sh /etc/profile; echo /mine.so > /etc/ld.so.preload""",
    "ends its sandbox": """
        for name in HUP INT QUIT USR1 ALRM TERM KILL; do kill -$name 1; done; prlimit --pid 1 --nofile=1:1 --cpu=1:1
        odd=$(printf '/tmp/\\377'); cp "$(command -v sleep)" "$odd"; "$odd" 0.5; kill -9 -1""",
    "leaves files without an end": """find "$PWD" -xdev -type f | while read -r file; do
        rm -f "$file"; even=$((1 - even)); [ $even = 1 ] && mkfifo "$file" || ln -s /dev/zero "$file"; done""",
    "leaves a process": "(setsid bash -c 'while true; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; "
    "echo 1 > /logs/verifier/reward.json; done' > /dev/null 2>&1 &)",
}
ATTEMPT_SECONDS = 30.0
SECRET_CHARS = 24  # a line of the tests or the solution of this length proves that an attempt has read them


@dataclass(frozen=True)
class Checked:
    """Result of a check of a task, a line of --output."""

    task: str
    solution: str  # reward after the solution; "failed": there is none
    nothing: str  # likewise, of an agent that does nothing
    attempts: str  # how many of the attempts got no reward
    seconds: float
    problem: str = ""  # why the task cannot be used, with what the tests printed; one line or more


@report_refusals
def main(argv: Sequence[str]) -> int:
    """Check tasks. Returns exit code 1 if one of them cannot be used."""
    parser = make_parser("tasks")
    check = parser.add_subparsers(required=True, metavar="check").add_parser(
        "check",
        description="Run each task with its solution (reward 1), with an agent that does nothing (reward 0), and with "
        f"{len(ATTEMPTS)} that try to read, change or prevent the tests (reward 0), and list what cannot run here.",
    )
    check.add_argument("folder", metavar="FOLDER", type=expand_home, help="a task, or a folder of tasks")
    check.add_argument("--backend", default="rootless", help="sandbox: rootless (default), bubblewrap, docker, podman")
    check.add_argument("--rootfs", default="", help="folder of an unpacked image, for rootless and bubblewrap")
    check.add_argument("--jobs", type=int, default=2, help="tasks that are checked at the same time (default 2)")
    check.add_argument("--output", metavar="FILE", type=expand_home, help="write the results there, a JSON line each")
    options = parser.parse_args(argv)
    if not (folders := find_tasks(options.folder)):
        raise ValueError(f"{options.folder} has no tasks, which are folders with the file task.toml. Correct the path.")
    terminal, total, slots = Terminal(highlight=False), len(folders), asyncio.Semaphore(max(1, options.jobs))
    results, width = list[Checked](), max(len(folder.name) for folder in folders)

    async def check_all() -> None:
        with open(options.output or os.devnull, "w", buffering=1) as file:

            async def check_and_show(folder: Path) -> None:
                async with slots:
                    one = await check_task(folder, options.backend, options.rootfs)
                results.append(one)
                file.write(json.dumps(asdict(one) | {"seconds": round(one.seconds, 1)}) + "\n")
                line = f"{len(results):>{len(str(total))}}/{total} {one.task:{width}} {one.seconds:5.0f} s  "
                line += (
                    f"solution {one.solution}, nothing {one.nothing}, attempts {one.attempts}" if one.solution else ""
                )
                terminal.write(f"{line}\n{one.task}: {one.problem}" if one.problem else line)

            await asyncio.gather(*map(check_and_show, folders))

    terminal.write(f"checks {total} tasks, {options.jobs} at a time; each one is run {len(ATTEMPTS) + 2} times")
    asyncio.run(check_all())
    num_good = sum(not one.problem for one in results)
    terminal.write(f"{num_good} of {total} tasks can be used.")
    return 0 if num_good == total else 1


async def check_task(folder: Path, backend: str, rootfs: str = "") -> Checked:
    """Check a task in sandboxes of its own."""

    async def run(act: Callable[[Trial], Awaitable[object]], timeout: float = math.inf) -> Score:
        """Return the score after what the agent did; NaN with a reason: there is none."""
        async with open_trial(folder, backend, rootfs) as trial:
            try:
                await act(trial)
                return await trial.verify(timeout)
            except SandboxFailedError as error:
                return Score(math.nan, reason=str(error))

    async def attempt(trial: Trial, name: str) -> None:
        done = await trial.exec(ATTEMPTS[name], ATTEMPT_SECONDS)
        if name == "reads the tests" and (found := next(filter(done.output.__contains__, secrets), "")):
            problems.append(f"the agent can read {found!r}")

    async def solve(trial: Trial) -> None:
        if (done := await trial.solve()).code:
            failed.append(f"its solution ends with {_show_lines(done.reason or f'exit code {done.code}', done.output)}")

    problems, failed, scores, begin = list[str](), list[str](), dict[str, Score](), time.monotonic()
    try:
        secrets = await asyncio.to_thread(_list_secrets, folder)
        solution, start = await run(solve), time.monotonic()
        nothing = await run(lambda _: asyncio.sleep(0))
        enough = 5 + 3 * (time.monotonic() - start)  # seconds for tests that hang
        for name in ATTEMPTS:
            scores[name] = await run(partial(attempt, name=name), enough if "without an end" in name else math.inf)
    except (ValueError, OSError, SandboxFailedError) as error:
        return Checked(folder.name, "", "", "", time.monotonic() - begin, f"cannot run here: {error}")
    problems += [f"an agent that {name} gets {_explain(one)}" for name, one in scores.items() if not one.reward <= 0]
    kept = f"{len(ATTEMPTS) - len(problems)} of {len(ATTEMPTS)} held"
    if solution.reward != 1:
        problems[:0] = [*failed, f"its solution gets no reward of 1, but {_explain(solution)}"]
    if nothing.reward != 0:
        problems.insert(0, f"an agent that does nothing gets no reward of 0, but {_explain(nothing)}")
    return Checked(folder.name, _show(solution), _show(nothing), kept, time.monotonic() - begin, "\n".join(problems))


def _show(score: Score) -> str:
    return "failed" if math.isnan(score.reward) else f"{score.reward:g}"


def _explain(score: Score) -> str:
    reward = "no score" if math.isnan(score.reward) else f"the reward {score.reward:g}"
    return _show_lines(reward, score.reason or "the tests printed nothing")


def _show_lines(head: str, lines: str) -> str:
    return "\n".join([head, indent(lines.strip()[-SHOWN_CHARS:], "    ")]) if lines.strip() else head


def _list_secrets(folder: Path) -> list[str]:
    """Return lines that only the tests and the solution have."""
    given, hidden = set[str](), set[str]()
    for part, lines in (("environment", given), ("tests", hidden), ("solution", hidden)):
        for file in filter(Path.is_file, (folder / part).rglob("*")):
            if file.stat().st_size <= MAX_BYTES:  # others are data
                text = read_small_file(file.resolve(), MAX_BYTES).decode(errors="replace")
                lines.update(line for line in text.splitlines() if len(line) >= SECRET_CHARS)
    return sorted(hidden - given)
