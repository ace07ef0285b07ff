"""Attacks of hostile snippets. As a program it runs all attacks in one mode and prints the outcomes:

    python tests/unit/tools/attacks.py '["bubblewrap"]'       # layers to leave out

Each snippet prints ESCAPED for each operation that succeeds and `stopped` for each that fails.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from alphaapollo.tools.sandbox import SandboxResult, SandboxStatus, SnippetSandbox

TIMEOUT = 15.0
SECRET = "hunter2-secret"
PRELUDE = """
import ctypes, os, platform, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(*actions):
    for action in actions:
        try:
            result = action()
        except (OSError, ImportError, ValueError) as error:
            print("stopped", type(error).__name__, error)
        else:
            print("ESCAPED", repr(result)[:200])
def raw(x86, arm, *arguments):
    number = x86 if platform.machine() == "x86_64" else arm
    result = libc.syscall(ctypes.c_long(number), *arguments)
    errno = ctypes.get_errno()
    if result < 0 and errno in (1, 38):  # EPERM, ENOSYS; the filter let other errors through
        raise OSError(errno, "raw system call")
    return result, errno
CANARY, UNIX, PORT, PARENT, OUTSIDE = %r, %r, %d, os.getppid(), %d
"""


@dataclass(frozen=True)
class Attack:
    """`status`: expected; `stopped`: whether it prints that; `layer`: the attack succeeds without this layer."""

    code: str
    status: Sequence[str] = ("ok",)
    stopped: bool = True
    layer: str = ""
    timeout: float = TIMEOUT
    reason: str = ""  # part of the result's reason


SNIPPETS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
ATTACKS = {name: Attack(**fields) for name, fields in SNIPPETS.items()}

NEEDS_ITS_LAYER = {"many_files"}  # 300 MB on a real disk


def attack_all(sandbox: SnippetSandbox) -> dict[str, SandboxResult]:
    """Run every attack, four at a time, with files and sockets outside as targets."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        os.chmod(folder, 0o755)
        canary = Path(folder, "canary")
        canary.write_text(SECRET)
        canary.chmod(0o666)
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        unix.bind(f"{folder}/socket")
        unix.listen()
        os.chmod(f"{folder}/socket", 0o777)
        prelude = PRELUDE % (str(canary), f"{folder}/socket", tcp.getsockname()[1], os.getpid())

        def run(name: str) -> SandboxResult:
            attack = ATTACKS[name]
            if name in NEEDS_ITS_LAYER and attack.layer not in sandbox.mode:
                return SandboxResult(SandboxStatus.OK, "ESCAPED (not tried)", "", 0.0, "")
            result = sandbox.run(prelude + attack.code, timeout=attack.timeout, memory_mb=512)
            return replace(result, stdout=result.stdout[-2000:], stderr=result.stderr[-2000:])

        sandbox.run(f"x = input()\nassert x == {SECRET!r}", stdin=SECRET)
        os.environ["SECRET_TOKEN"] = SECRET
        with ThreadPoolExecutor(4) as threads:
            outcomes = dict(zip(ATTACKS, threads.map(run, ATTACKS), strict=True))
        intact = canary.read_text() == SECRET and canary.stat().st_mode & 0o777 == 0o666 and canary.stat().st_mtime > 1
        status = SandboxStatus.OK if intact and not Path("/tmp/escaped").exists() else SandboxStatus.ERROR
        outcomes["outside"] = SandboxResult(status, "", "", 0.0, "")
        outcomes["afterwards"] = sandbox.run("import numpy\nprint(numpy.sum([20, 22]))")
        return outcomes


def main() -> None:
    with SnippetSandbox(without=json.loads(sys.argv[1]), max_concurrent=4) as sandbox:
        outcomes = {name: asdict(outcome) for name, outcome in attack_all(sandbox).items()}
        print(json.dumps({"mode": sandbox.mode, "missing": sandbox.missing, "uid": os.getuid(), "outcomes": outcomes}))


if __name__ == "__main__":
    main()
