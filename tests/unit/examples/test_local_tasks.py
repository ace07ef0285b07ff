"""Tasks in Harbor's format of the example tasks. Their scripts run in temporary folders instead of /app and /logs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from examples.tasks.make_tasks import KINDS, write_tasks

BASH = "/usr/bin/bash"
LOCAL = Path(__file__).parents[3] / "examples/tasks/local"
AGENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
VERIFIER = {"PATH": "/nowhere", "HOME": "/nowhere", "PYTHONPATH": "/nowhere"}  # test.sh depends on none of them


def judge(task: Path, folder: Path, command: str) -> float:
    """Reward for a command of an agent."""
    app, logs = folder / "app", folder / "logs"
    shutil.rmtree(folder, ignore_errors=True)
    app.mkdir(parents=True)
    (logs / "verifier").mkdir(parents=True)
    for line in (task / "environment/Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            _, source, target = line.split()
            shutil.copy(task / "environment" / source, f"{folder}{target}")

    def run(script: str, environment: dict[str, str]) -> None:
        script = re.sub(r"/(app|logs)\b", rf"{folder}/\1", script)  # not /apple.txt
        subprocess.run(
            [BASH, "-c", script], cwd=app, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=60
        )

    run(command, AGENT)
    run((task / "tests/test.sh").read_text(), VERIFIER)
    assert [path.name for path in (logs / "verifier").iterdir()] == ["reward.txt"]
    return float((logs / "verifier/reward.txt").read_text())


def read_tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_generator_writes_the_tasks_of_the_repository(tmp_path: Path) -> None:
    for _ in range(2):  # again: replaces them
        write_tasks(tmp_path / "train", "train", seed=0, count=len(KINDS))
        assert read_tree(tmp_path / "train") == read_tree(LOCAL)


@pytest.mark.parametrize(("split", "seed"), [("train", 0), ("held_out", 2)])
def test_solutions_get_1_and_doing_nothing_0(tmp_path: Path, split: str, seed: int) -> None:
    write_tasks(tmp_path / "tasks", split, seed, len(KINDS))
    for task in (tmp_path / "tasks").iterdir():
        solution = (task / "solution/solve.sh").read_text()
        command = solution.splitlines()[-1]
        rewards = [judge(task, tmp_path / "root", one) for one in (solution, command, "true")]
        assert rewards == [1, 1, 0], task.name


REWARDS = [
    ("create", "echo red, please > iron.txt", 0.5),
    ("create", "ln -s /etc/hostname iron.txt", 0),
    ("delete", "rm *", 0),
    ("copy", "mv owl.txt rice.txt", 0.5),
    ("count", "wc -l moon.txt > kite.txt", 0.5),
    ("largest", "ls -S > pond.txt", 0.5),
    ("replace", "sed -i s/bread/wolf/ dove.txt", 0.5),
    ("replace", "sed -i s/bread/wolf/g *", 0),
    ("sort", "cp green.txt sand.txt", 0.5),
    ("column", "cut -d, -f2 tiger.csv > hill.txt", 0.5),
    ("column", "cut -d, -f1 tiger.csv | tee hill.txt > tiger.csv", 0),
    ("repair", "echo 'print(72)' > sys.py", 0),
    ("repair", "echo 'import sys; print(eval(\"*\".join(sys.argv[1:])))' > mul.py", 1),
    ("repair", 'echo \'print(open("/logs/verifier/reward.txt", "w").write("1"))\' > mul.py', 0),
    ("repair", "echo 'import os; os.kill(os.getppid(), 9)' > mul.py", 0),
    ("script", "echo 'while :; do :; done' > fog.sh", 0),
    ("script", "echo '(sleep 1; ln -sf /app/x /logs/verifier/reward.txt) & echo x' > fog.sh; echo 1 > x", 0),
    ("script", "mkdir bin; echo 'echo echo boat' > bin/bash; chmod +x bin/bash", 0),
    ("delete", "echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json", 0),
    ("delete", "ln -s /app/1 /logs/verifier/reward.txt; echo 1 > 1", 0),
    ("copy", "rm -rf /logs; cp owl.txt rice.txt", 1),
]


@pytest.mark.parametrize(("kind", "command", "reward"), REWARDS)
def test_reward_of_a_command(tmp_path: Path, kind: str, command: str, reward: float) -> None:
    assert judge(LOCAL / f"{kind}-0", tmp_path, command) == reward
