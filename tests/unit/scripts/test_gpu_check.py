"""make gpu-check: its order, its deadlines, and that failed or missing checks are never reported as passed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.checks import ROOT, Outcome, Untested, table
from scripts.gpu_check.__main__ import CHECKS, run_check
from scripts.gpu_check.kit import Kit, need

FOLDER = ROOT / "scripts" / "gpu_check"


def test_every_check_has_its_file_and_all_fit_into_ten_minutes():
    assert {path.stem for path in FOLDER.glob("check_*.py")} == {f"check_{name}" for name in CHECKS}
    assert sum(deadline for deadline, _ in CHECKS.values()) <= 600


def test_it_writes_a_table_and_a_json(tmp_path: Path):
    command = [sys.executable, "-m", "scripts.gpu_check", "--device", "cpu", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--only", "versions", "memory"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    versions, memory = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (versions["status"], memory["status"]) == ("passed", "untested")
    assert memory["reason"] == "memory on the device needs a GPU"
    assert versions["figures"]["torch"] in (tmp_path / "out" / "table.md").read_text()


def test_a_check_that_fails_or_hangs_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    check = FOLDER / "check_versions.py"
    outcome = run_check("versions", "no_such_device", tmp_path, 120)
    assert outcome.status == "failed" and "no_such_device" in outcome.reason, check
    late = run_check("versions", "cpu", tmp_path, 0.2)
    assert late.status == "failed" and late.reason.startswith("took more than 0 s")


def test_what_is_missing_is_named():
    with pytest.raises(Untested, match="no_such_library not installed"):
        need("json", "no_such_library")
    with pytest.raises(Untested, match="CUDA IPC needs a GPU"):
        Kit("cpu", Path()).need_gpu("CUDA IPC")


def test_plan_table_gives_reasons():
    outcomes = [Outcome("ipc", "passed", 3.2, {"gb_per_s": 12.34567}), Outcome("ray", "untested", 0.1, reason="no ray")]
    assert table(outcomes, "t").splitlines()[4:] == [
        "| ipc | **passed** | 3 | gb_per_s 12.35 |",
        "| ray | **untested** | 0 | no ray |",
    ]
