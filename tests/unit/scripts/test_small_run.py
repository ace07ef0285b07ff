"""examples/small_run.sh with a Python that only makes a folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

PYTHON = """#!/usr/bin/env bash
mkdir -p work/out
echo "$*" >>work/out/calls
"""


def test_what_lies_in_out_is_kept(tmp_path: Path) -> None:
    for file, text in (
        ("examples/small_run.sh", (ROOT / "examples/small_run.sh").read_text()),
        (".venv/bin/python", PYTHON),
        ("work/out/precious", "1"),
        ("work/out.1/older", "2"),
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
        (tmp_path / file).chmod(0o755)
    command = ["bash", "examples/small_run.sh", "quickstart", "grpo", "3", "work/out/"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True)
    assert "work/out.2" in done.stdout
    assert sorted(str(file.relative_to(tmp_path)) for file in (tmp_path / "work").rglob("*") if file.is_file()) == [
        "work/out.1/older",
        "work/out.2/precious",
        "work/out/calls",
    ]
    assert "model.path=work/out/model" in (tmp_path / "work/out/calls").read_text()
