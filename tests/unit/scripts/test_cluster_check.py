"""make cluster-check: its list of checks, and that checks which cannot run are never reported as passed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from scripts.checks import ROOT
from scripts.cluster_check.__main__ import CHECKS


def test_every_check_has_its_file():
    files = {path.stem for path in (ROOT / "scripts" / "cluster_check").glob("check_*.py")}
    assert files == {f"check_{name}" for name in CHECKS}


def test_without_namespaces_all_is_untested(tmp_path: Path):
    words = ["-m", "scripts.cluster_check", "--out", str(tmp_path / "out"), "--only", "two_nodes", "lost"]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env={"PATH": "/nowhere"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads((tmp_path / "out" / "report.json").read_text())["checks"]
    assert [(one["name"], one["status"]) for one in outcomes] == [("two_nodes", "untested"), ("lost", "untested")]
    assert all("setpriv, unshare, nsenter, ip, mount" in one["reason"] for one in outcomes)
