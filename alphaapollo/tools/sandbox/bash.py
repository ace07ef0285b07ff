"""Run bash in a sandbox: `python -m alphaapollo.tools.sandbox.bash -c SCRIPT [NAME ARGUMENT...]`.

seccomp keeps the script from starting programs, opening connections, writing files and signaling outside processes. If
the kernel has Landlock, the script reads only system libraries. Limits: 10 seconds, 64 processes, 4 MiB of output,
128 MiB of memory. stdin is /dev/null. Exit code 124 means that the limit of time or processes stopped the script; 125,
that this machine has no bash or no seccomp (Linux on x86_64 or aarch64). Otherwise, also at the limits of output and
memory, the exit code is that of bash.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from typing import NoReturn

from alphaapollo.tools.sandbox import linux

TIME_LIMIT = 10.0  # seconds
MAX_PROCESSES = 64
SPARE_PROCESSES = 16  # that the kernel allows above MAX_PROCESSES, so that they are noticed
FIRST_USER = 1 << 30  # as root, each script runs as a user of its own, whose processes the kernel counts
LIMITS = {
    resource.RLIMIT_AS: 128 << 20,
    resource.RLIMIT_CPU: 10,
    resource.RLIMIT_FSIZE: 4 << 20,
    resource.RLIMIT_NOFILE: 64,
}
LIBRARIES = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/dev/null"]
_EXECUTE = 1  # Landlock right to execute a file


def main(arguments: list[str]) -> int:
    bash = shutil.which("bash")
    if bash is None or not linux.is_seccomp_supported():
        print("Bash cannot run in a sandbox on this machine. Use Linux on x86_64 or aarch64.", file=sys.stderr)
        return 125
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as messages:
        child = os.fork()
        if child == 0:
            _replace_process_by_bash(bash, arguments, output.fileno(), messages.fileno())
        code = _wait_for_bash(child)
        for file, stream in ((output, sys.stdout), (messages, sys.stderr)):
            file.seek(0)
            stream.buffer.write(file.read())
    if code == 124:
        print(
            f"stopped: the script used more than {TIME_LIMIT:g} seconds or {MAX_PROCESSES} processes", file=sys.stderr
        )
    return code


def _wait_for_bash(pid: int) -> int:
    """Wait for bash, kill its remaining processes, and return its exit code, or 124 if a limit stopped it."""
    deadline, num_processes = time.monotonic() + TIME_LIMIT, 0
    try:
        while time.monotonic() < deadline and num_processes <= MAX_PROCESSES:
            ended_pid, status = os.waitpid(pid, os.WNOHANG)
            if ended_pid:
                return os.waitstatus_to_exitcode(status) & 0xFF  # signal n is 256 - n
            time.sleep(0.005)
            num_processes = 0
            for name in filter(str.isdigit, os.listdir("/proc")):
                with contextlib.suppress(ProcessLookupError):
                    num_processes += os.getpgid(int(name)) == pid
        return 124
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _replace_process_by_bash(bash: str, arguments: list[str], stdout: int, stderr: int) -> NoReturn:
    """Apply the isolation layers and replace this process by bash. `stdout`, `stderr`: descriptors of files for
    its output. Bash cannot leave its process group, because the seccomp filter blocks setpgid and setsid."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for target, source in enumerate((null, stdout, stderr)):
            os.dup2(source, target)
        program = os.open(bash, os.O_RDONLY)
        os.closerange(program + 1, 1 << 16)
        os.chdir("/")
        os.nice(19)
        if os.getuid() == 0:
            linux.drop_privileges(FIRST_USER + os.getpid())
        most = linux.count_user_threads() + MAX_PROCESSES + SPARE_PROCESSES
        linux.set_rlimits(LIMITS | {resource.RLIMIT_NPROC: most})
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # signals that Python ignores
            signal.signal(ignored, signal.SIG_DFL)
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        if version := linux.get_landlock_version():
            paths = filter(os.path.exists, [*LIBRARIES, os.path.realpath(bash)])
            rights = {path: linux.READ if os.path.isdir(path) else linux.READ_FILE for path in paths}
            rules = [(os.open(path, os.O_PATH | os.O_CLOEXEC), right | _EXECUTE) for path, right in rights.items()]
            linux.apply_ruleset(linux.build_ruleset(rules, version))
        linux.apply_shell_filter()
        os.execve(program, ["bash", "--norc", *arguments], {"PATH": "/nonexistent", "LC_ALL": "C.UTF-8"})
    except BaseException as error:  # noqa: BLE001  the frames above belong to the caller
        print(f"Bash cannot run in a sandbox on this machine: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(125)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
