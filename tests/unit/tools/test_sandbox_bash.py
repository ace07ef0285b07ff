"""Hostile scripts in the bash sandbox. Each prints HARM where it got through."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import wait_until

# A user of its own for each test process: the kernel counts the processes of a user, also those of other tests.
UNPRIVILEGED_USER = 20_000 + os.getpid() % 40_000
SETPRIV = ["setpriv", f"--reuid={UNPRIVILEGED_USER}", "--regid=65534", "--clear-groups"]
USERS = {"same": [], "unprivileged": SETPRIV} if os.getuid() == 0 and shutil.which("setpriv") else {"same": []}
by_user = pytest.mark.parametrize("user", USERS)


SHORT = (
    "from alphaapollo.tools.sandbox import bash; bash.TIME_LIMIT = {seconds}; raise SystemExit(bash.main({arguments}))"
)


def run_bash(script: str, user: str = "same", seconds: float = 3.0) -> subprocess.CompletedProcess[str]:
    code = SHORT.format(arguments=["-c", script, "name"], seconds=seconds)
    command = [*USERS[user], sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, errors="replace")


def is_empty(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_bash_computes():
    done = run_bash('a=(1 2); x=$(echo "${a[1]}" | { read n; echo $((n * 21)); }); echo "$0 $x"; exit 3')
    assert (done.stdout, done.stderr, done.returncode) == ("name 42\n", "", 3)


@by_user
@pytest.mark.parametrize(
    "script",
    [
        "/bin/echo HARM",
        "exec /bin/echo HARM",
        "PATH=/usr/bin:/bin; env echo HARM",
        "command -p env echo HARM",
        "/bin/rm -rf FOLDER && echo HARM",
        "echo text > FOLDER/kept && echo HARM",
        ": >> FOLDER/new && echo HARM",
        "exec 5<> FOLDER/kept && echo HARM",
        "read line < FOLDER/kept && echo HARM",
        "read line < /etc/passwd && echo HARM",
        "source FOLDER/kept && echo HARM",
        "[ -e FOLDER/kept ] && echo HARM",
        "cd FOLDER && echo HARM",
        "echo FOLDER/k* | { read x; [ $x = FOLDER/kept ] && echo HARM; }",
        "exec 5<>/dev/tcp/127.0.0.1/PORT && echo HARM",
        "exec 5</dev/tcp/127.0.0.1/PORT && echo HARM",
        "echo text > /dev/udp/127.0.0.1/PORT && echo HARM",
        "kill -0 PID && echo HARM",
        "kill -9 $PPID && echo HARM",
        "kill -9 -1 && echo HARM",
        "ulimit -f unlimited && echo HARM",
        "for f in /usr/lib/bash/rm /usr/local/lib/bash/rm; do enable -f $f rm; done; rm -f FOLDER/kept && echo HARM",
    ],
)
def test_no_effect_outside(script: str, user: str, tmp_path: Path):
    tmp_path.chmod(0o777)
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    kept.chmod(0o666)
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {"FOLDER": tmp_path, "PORT": server.getsockname()[1], "PID": os.getpid()}
        for name, value in names.items():
            script = script.replace(name, str(value))
        done = run_bash(script, user)
    assert "HARM" not in done.stdout and done.returncode != 125
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and kept.read_text() == "as it was"


@by_user
@pytest.mark.parametrize(
    "script",
    [
        "f() { f | f & }; f; while :; do :; done",
        "while :; do ( while :; do :; done ) & done",
        "set -m; f() { f | f & disown -a; }; f; while :; do :; done",
        "trap '' TERM INT HUP XCPU; while :; do :; done",
    ],
)
def test_bombs_and_loops_are_stopped(script: str, user: str):
    done = run_bash("echo $$; " + script, user, seconds=1.0)
    assert done.returncode == 124
    assert all(fact in done.stderr.splitlines()[-1] for fact in ("stopped", "1 seconds", "64 processes"))
    group = int(done.stdout.split()[0])
    assert wait_until(lambda: is_empty(group), 30)


SLOW_WATCHER = """
import os, time
from alphaapollo.tools.sandbox import bash

sleep, kill = time.sleep, os.killpg

def count_and_kill(group, signal):
    groups = [os.getpgid(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    print(groups.count(group))
    kill(group, signal)

bash.time.sleep = lambda _: sleep(1.0)
bash.os.killpg = count_and_kill
bash.main(["-c", "f() { f | f & }; f; while :; do :; done"])
"""


@by_user
def test_the_kernel_limits_processes_if_the_watcher_is_slow(user: str):
    command = [*USERS[user], sys.executable, "-c", SLOW_WATCHER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert 1 < int(done.stdout) < 100


def test_background_processes_end_with_the_script():
    done = run_bash("( while :; do :; done ) & disown; echo $$")
    assert done.returncode == 0
    assert wait_until(lambda: is_empty(int(done.stdout)), 30)


@pytest.mark.parametrize("script", ["x=aaaa; while :; do x=$x$x; done", "while :; do echo $PPID$PPID$PPID$PPID; done"])
def test_memory_and_output_are_limited(script: str):
    done = run_bash(script, seconds=30.0)
    assert done.returncode not in (0, 124)
    assert len(done.stdout) <= 4 << 20
