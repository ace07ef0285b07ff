"""Files and functions stay small enough to be read."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 60


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


def test_files_and_functions_are_short() -> None:
    assert not (found := too_long(ROOT)), "\n" + "\n".join(found)


def test_the_check_can_fail(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "long.py").write_text("def f():\n" + "    pass\n" * 60 + "x = 1\n" * 340)
    assert too_long(tmp_path) == ["scripts/long.py: 401 lines", "scripts/long.py:1 f: 61 lines"]
