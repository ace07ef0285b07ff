"""`make audit` distinguishes "no vulnerabilities" from "not checked"."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from scripts import audit

KNOWN = [{"id": "ID-1", "fix_versions": ["1.1"]}, {"id": "ID-2", "fix_versions": []}]
FOUND = {"name": "a", "version": "1.0", "vulns": KNOWN}
SOUND = {"name": "b", "version": "2", "vulns": []}
SKIPPED = {"name": "c", "skip_reason": "not found"}


def answer(monkeypatch: pytest.MonkeyPatch, stdout: str, stderr: str = "") -> None:
    def run(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(arguments, 1, stdout, stderr)

    monkeypatch.setattr(audit.subprocess, "run", run)


def test_what_is_known(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer(monkeypatch, json.dumps({"dependencies": [FOUND, SOUND, SKIPPED]}))
    assert audit.main() == 1
    said = capsys.readouterr().out
    for fact in ("1 with", "index: c\n", "a==1.0: ID-1 (", "1.1); ID-2 ("):
        assert fact in said
    answer(monkeypatch, json.dumps({"dependencies": [SOUND]}))
    assert audit.main() == 0


def test_unavailable_index_is_not_a_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer(monkeypatch, "", "Traceback ...\nConnectionError: no route\n")
    assert audit.main() == 2
    assert capsys.readouterr().out.count("Connection") == len(audit.LISTS)
    answer(monkeypatch, json.dumps({"dependencies": [SKIPPED, SKIPPED]}))  # a mirror without advisories
    assert audit.main() == 2
    assert "NOT checked" in capsys.readouterr().out
