"""Files and functions stay small enough to be read."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 60
WORDS = 95_000  # of all pages in docs/, without the blocks that scripts write
GENERATED = re.compile(r"<!-- ([\w-]+): written by .*?<!-- end of \1 -->", re.DOTALL)
CORE = 44280  # non-blank lines of Python in alphaapollo/ without plugins/
# Likewise, of each package and plug-in. Raising a number needs its reason in CHANGELOG.md, under Size.
BUDGETS = {
    ".": 950,
    "algorithms": 2200,
    "batching": 650,
    "cli": 400,
    "config": 3650,
    "controller": 2100,
    "data": 3100,
    "engines": 3500,
    "environments": 1100,
    "evolving": 50,
    "finetuning": 750,
    "launch": 1100,
    "models": 4330,
    "observability": 1550,
    "own_loop": 1350,
    "planning": 1800,
    "plugins/adapters": 600,
    "plugins/chat": 250,
    "plugins/code_grader": 550,
    "plugins/doctor": 150,
    "plugins/evolving": 1900,
    "plugins/gguf": 350,
    "plugins/grader_audit": 200,
    "plugins/mcp": 200,
    "plugins/plan": 100,
    "plugins/port": 1050,
    "plugins/quantize": 400,
    "plugins/search": 200,
    "plugins/sglang": 750,
    "plugins/skill": 50,
    "plugins/suites": 200,
    "plugins/sweeps": 1050,
    "plugins/tasks": 2250,
    "plugins/tinker": 1750,
    "plugins/trackers": 100,
    "plugins/verify": 1800,
    "plugins/viewer": 2500,
    "processes": 1000,
    "rewards": 2200,
    "rollout": 2000,
    "runs": 1550,
    "session": 950,
    "tools": 1550,
    "trainer": 3500,
    "utils": 1250,
    "workers": 2150,
}


def too_long(root: Path) -> list[str]:
    found = []
    for folder in ("alphaapollo", "examples", "scripts", "tests"):
        for path in sorted((root / folder).rglob("*.py")):
            name, text = str(path.relative_to(root)), path.read_text(encoding="utf-8")
            if (lines := len(text.splitlines())) > LINES_OF_A_FILE:
                found.append(f"{name}: {lines} lines")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    lines = (node.end_lineno or 0) - node.lineno + 1
                    if lines > LINES_OF_A_FUNCTION:
                        found.append(f"{name}:{node.lineno} {node.name}: {lines} lines")
    return found


def count_lines(package: Path) -> Counter[str]:
    """Non-blank lines of each package (`.`: files beside them), and of each plug-in (`plugins/NAME`)."""
    counts = Counter[str]()
    for path in package.rglob("*.py"):
        folders = path.relative_to(package).parts[:-1]
        name = "/".join(folders[: 2 if folders[:1] == ("plugins",) else 1]) or "."
        counts[name] += sum(1 for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    return counts


def test_packages_stay_within_their_budgets() -> None:
    counts = count_lines(ROOT / "alphaapollo")
    core = sum(count for name, count in counts.items() if not name.startswith("plugins"))
    assert {name: count for name, count in counts.items() if count > BUDGETS.get(name, 50)} == {}
    assert core <= CORE and counts.keys() >= {name for name in BUDGETS if not name.startswith("plugins")}


def test_pages_stay_within_their_budget() -> None:
    texts = [GENERATED.sub("", page.read_text(encoding="utf-8")) for page in (ROOT / "docs").rglob("*.md")]
    assert sum(len(text.split()) for text in texts) <= WORDS


def test_lines_are_counted(tmp_path: Path) -> None:
    for name in ("a.py", "data/b/c.py", "plugins/__init__.py", "plugins/viewer/d/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n\n    \ny = 2\n")
    assert count_lines(tmp_path) == {".": 2, "data": 2, "plugins": 2, "plugins/viewer": 2}


def test_files_and_functions_are_short() -> None:
    assert not (found := too_long(ROOT)), "\n" + "\n".join(found)


def test_the_check_can_fail(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "long.py").write_text("def f():\n" + "    pass\n" * 60 + "x = 1\n" * 340)
    assert too_long(tmp_path) == ["scripts/long.py: 401 lines", "scripts/long.py:1 f: 61 lines"]
