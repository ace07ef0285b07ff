"""Attacks on the sandbox, in each combination of layers and as root and an unprivileged user."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from alphaapollo.tools.sandbox import SandboxResult, SnippetSandbox
from tests.unit.tools.attacks import ATTACKS, PRELUDE

HERE = Path(__file__).parent
PROGRAM = str(HERE / "attacks.py")
DEADLINE = 100  # seconds for all attacks in one mode
WITHOUT = {"all layers": [], "no bubblewrap": ["bubblewrap"], "compute only": ["bubblewrap", "landlock"]}
if not shutil.which("bwrap"):
    del WITHOUT["no bubblewrap"]  # the same as all layers
USERS = ["root", "nobody"] if os.geteuid() == 0 else ["user"]
MODES = [(user, name) for user in USERS for name in WITHOUT]


def closed_above(path: str) -> str:
    """Topmost folder above `path` that other users may not enter; empty if there is none."""
    for folder in reversed(Path(path).parents):
        if not folder.stat().st_mode & 0o001:
            return str(folder)
    return ""


@cache
def report(user: str, name: str) -> dict[str, object]:
    """Outcomes of all attacks in one mode, run in a separate process."""
    command = [sys.executable, PROGRAM, json.dumps(WITHOUT[name])]
    if user == "nobody":
        copy = subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip()
        script = ["unshare", "--mount", "sh", str(HERE / "as_nobody.sh"), sys.base_prefix]
        command = [*script, closed_above(sys.base_prefix), copy, *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    if user == "nobody":
        os.rmdir(copy)
        if done.returncode != 0 and "alphaapollo" not in done.stderr:
            pytest.skip(f"cannot become an unprivileged user here: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def outcome(user: str, name: str, attack: str) -> SandboxResult:
    return SandboxResult(**report(user, name)["outcomes"][attack])  # type: ignore[index]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(("user", "name"), MODES)
def test_attack(user: str, name: str, attack: str) -> None:
    found, expected = outcome(user, name, attack), ATTACKS[attack]
    if expected.layer and expected.layer not in str(report(user, name)["mode"]):  # the mode shows the missing layer
        assert "ESCAPED" in found.stdout
        assert expected.layer in report(user, name)["missing"]  # type: ignore[operator]
        return
    assert found.status in expected.status and expected.reason in found.reason, found
    assert "ESCAPED" not in found.stdout and (not expected.stopped or "stopped" in found.stdout), found
    assert found.seconds < expected.timeout + 10


@pytest.mark.parametrize(("user", "name"), MODES)
def test_mode_lists_the_layers_and_nothing_outside_has_changed(user: str, name: str) -> None:
    assert outcome(user, name, "outside").status == "ok"
    after = outcome(user, name, "afterwards")
    assert (after.status, after.stdout) == ("ok", "42\n")
    answer = report(user, name)
    expected = ["prefork", "setuid", "rlimits", "landlock", "seccomp", "bubblewrap"]
    missing = {*WITHOUT[name], *answer["missing"]}  # type: ignore[misc]
    if user != "root" or "bubblewrap" not in missing:
        missing.add("setuid")  # not root, or bubblewrap changes the user
    assert answer["mode"] == "+".join(layer for layer in expected if layer not in missing)
    assert (answer["uid"] == 0) == (user == "root")


def test_attacks_succeed_without_layers() -> None:
    """Without seccomp the attacks succeed, so the tests above can fail."""
    with SnippetSandbox(without=["seccomp", "bubblewrap", "landlock"], allow_unsafe=True) as sandbox:
        assert "seccomp" not in sandbox.mode
        prelude = PRELUDE % ("/etc/hostname", "/nowhere", 1, os.getpid())
        for name in ("read_secret", "exec_memory_file", "clone3", "udp", "signal_owner", "system_v_memory", "bpf"):
            result = sandbox.run(prelude + ATTACKS[name].code.replace("0, 4096, 0o1600", "0, 4096, 0o600"))
            assert "ESCAPED" in result.stdout, (name, result)


@pytest.mark.skipif(not shutil.which("bwrap"), reason="no bubblewrap")
def test_unusable_bubblewrap_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container without permission for user namespaces."""
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with SnippetSandbox() as sandbox:
        assert "bubblewrap" not in sandbox.mode
        assert "No permissions to create new namespace" in sandbox.missing["bubblewrap"]
        assert sandbox.run("print(1)").stdout == "1\n"
