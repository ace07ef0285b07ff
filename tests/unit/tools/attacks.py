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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

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
    status: tuple[str, ...] = ("ok",)
    stopped: bool = True
    layer: str = ""
    timeout: float = TIMEOUT
    reason: str = ""  # part of the result's reason


def kernel(x86: int, arm: int, arguments: str = "0, 0, 0, 0") -> Attack:
    return Attack(f"attempt(lambda: raw({x86}, {arm}, {arguments}))")


KILLED_BY_FILTER = """
import mmap
memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
memory.write(bytes([%s]))
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
print("ESCAPED", ctypes.CFUNCTYPE(ctypes.c_int)(address)())
"""

SEARCH_MEMORY = """
import gc
def holds(value):
    return isinstance(value, (str, bytes)) and value[::-1] in ("terces-2retnuh", b"terces-2retnuh")
containers = [o for o in gc.get_objects() if isinstance(o, (dict, list, tuple, set))]
values = (v for o in containers for v in list(o.values() if isinstance(o, dict) else o))
found = [value for value in values if holds(value)]
frame = sys._getframe()
while frame:
    found += [value for value in frame.f_locals.values() if holds(value)]
    frame = frame.f_back
print("ESCAPED" if found else "stopped")
"""

ATTACKS: dict[str, Attack] = {
    # Reading
    "read_secret": Attack("attempt(lambda: open(CANARY).read())"),
    "read_passwd": Attack("attempt(lambda: open('/etc/passwd').read(), lambda: open('/etc/hostname').read())"),
    "list_root": Attack("attempt(lambda: os.listdir('/'), lambda: os.listdir('/tmp'), lambda: os.listdir('..'))"),
    "read_environment_of_parent": Attack("attempt(lambda: open(f'/proc/{PARENT}/environ').read())"),
    "read_memory_of_parent": Attack("attempt(lambda: open(f'/proc/{PARENT}/mem', 'rb').read(1))"),
    "read_through_root_link": Attack("attempt(lambda: open(f'/proc/self/root{CANARY}').read())"),
    "open_by_another_call": kernel(437, 437, "-100, b'/etc/passwd', bytes(24), 24"),
    "import_other_packages": Attack(
        "attempt(*(lambda n=n: __import__(n) for n in ('torch', 'alphaapollo.utils.registry')))"
    ),
    "stat_outside": Attack("attempt(lambda: os.stat(CANARY))", layer="bubblewrap"),
    "own_environment": Attack("print('ESCAPED' if 'SECRET' in str(os.environ) else 'stopped')"),
    "other_runs_in_memory": Attack(SEARCH_MEMORY),
    "inherited_descriptors": Attack(
        "def is_open(fd):\n    try: os.fstat(fd)\n    except OSError: return False\n    return True\n"
        "found = [fd for fd in range(1024) if is_open(fd)]\n"
        "print('stopped' if found == [0, 1, 2, 3] else f'ESCAPED {found}')"
    ),
    # Writing
    "write_outside": Attack("attempt(lambda: open(CANARY, 'a').write('x'), lambda: open('/tmp/escaped', 'w'))"),
    "write_shared_memory": Attack("attempt(lambda: open('/dev/shm/escaped', 'w'))"),
    "delete_outside": Attack("attempt(lambda: os.unlink(CANARY), lambda: os.rename(CANARY, CANARY + '2'))"),
    "change_mode_and_times": Attack("attempt(lambda: os.chmod(CANARY, 0o777), lambda: os.utime(CANARY, (0, 0)))"),
    "change_owner": Attack("attempt(lambda: os.chown(CANARY, os.getuid(), os.getgid()))"),
    "truncate_by_path": Attack("attempt(lambda: os.truncate(CANARY, 0))"),
    "links": Attack("attempt(lambda: os.link(CANARY, 'link'), lambda: os.symlink(CANARY, 'symlink'))"),
    "device_node": Attack("attempt(lambda: os.mknod('device', 0o666 | 0o20000, os.makedev(1, 1)))"),
    # Processes
    "fork": Attack("attempt(os.fork)"),
    "fork_bomb": Attack("for _ in range(1000):\n    try: os.fork()\n    except OSError: pass\nprint('stopped')"),
    "shell": Attack("code = os.system('exit 0')\nprint('ESCAPED' if code == 0 else 'stopped')"),
    "exec": Attack("attempt(lambda: os.execv('/bin/echo', ['echo', 'ESCAPED']))"),
    "exec_memory_file": Attack("attempt(lambda: os.memfd_create('program'))"),
    "clone_namespaces": kernel(56, 220, "0x10000000 | 17, 0, 0, 0, 0"),
    "clone3": kernel(435, 435, "bytes(88), 88"),
    "kill_parent": Attack("attempt(lambda: os.kill(PARENT, 9), lambda: os.kill(OUTSIDE, 9))"),
    "kill_all": Attack("attempt(lambda: os.kill(-1, 9), lambda: os.killpg(os.getpgid(PARENT), 9))"),
    "ptrace_parent": kernel(101, 117, "16, PARENT, 0, 0"),
    "slow_the_parent": Attack(
        "import resource\nattempt(lambda: os.setpriority(0, PARENT, 19), lambda: os.sched_setaffinity(PARENT, {0}),"
        "lambda: resource.prlimit(PARENT, resource.RLIMIT_CPU, (1, 1)))"
    ),
    "raise_own_limits": Attack("import resource\nattempt(lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)))"),
    "become_root": Attack("attempt(lambda: os.setuid(0), lambda: os.setgroups([0]))"),
    "identify_the_program": Attack(
        "import socket\nend = socket.socket(fileno=os.dup(3))\n"
        "attempt(*(lambda n=n: end.getsockopt(1, n, 12) for n in (17, 31, 59, 77)))"
    ),
    # Other system calls
    "tcp": Attack("import socket\nattempt(lambda: socket.create_connection(('127.0.0.1', PORT)))"),
    "udp": Attack("import socket\nattempt(lambda: socket.socket(2, 2).sendto(b'x', ('127.0.0.1', PORT)))"),
    "unix_socket": Attack("import socket\nattempt(lambda: socket.socket(1, 1).connect(UNIX))"),
    "abstract_socket": Attack("import socket\nattempt(lambda: socket.socket(1, 1).bind('\\0attack'))"),
    "datagram_pair": Attack("import socket\nattempt(lambda: socket.socketpair(1, 2)[0].sendto(b'x', UNIX))"),
    "pair_with_address": Attack("import socket\nattempt(lambda: socket.socketpair()[0].sendto(b'x', UNIX))"),
    "unshare": kernel(272, 97, "0x10000000"),
    "io_uring": kernel(425, 425, "1, bytes(200)"),
    "bpf": kernel(321, 280),
    "system_v_memory": kernel(29, 194, "0, 4096, 0o1600"),
    "process_settings": Attack("attempt(lambda: raw(157, 167, 4, 1, 0, 0, 0), lambda: raw(157, 167, 1, 0, 0, 0, 0))"),
    "type_into_terminal": Attack("import fcntl\nattempt(lambda: fcntl.ioctl(0, 0x5412, b'x'))"),
    "signal_owner": Attack("import fcntl\nattempt(lambda: fcntl.fcntl(0, 8, PARENT))"),
    "x32_call": Attack("raw(0x40000027, 0x40000027); print('ESCAPED')", status=("error",), stopped=False),
    "32_bit_call": Attack(  # mov eax, 20 (getpid); int 0x80; ret
        KILLED_BY_FILTER % "0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3", status=("error",), stopped=False
    ),
    # Resources
    "loop": Attack("while True: pass", status=("timeout",), stopped=False, timeout=1.0),
    "hold_the_interpreter": Attack("10 ** 10 ** 9", status=("timeout", "memory"), stopped=False, timeout=1.0),
    "ignore_signals": Attack(
        "import time\nfor number in range(1, 65):\n    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: time.sleep(1)",
        status=("timeout",),
        stopped=False,
        timeout=1.0,
    ),
    "memory": Attack("x = []\nwhile True: x.append(bytearray(1 << 24))", status=("memory",), stopped=False),
    "threads": Attack(
        "import threading, time\nthreading.stack_size(1 << 15)\ntry:\n    for n in range(20000):\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "except (RuntimeError, MemoryError): pass\ntime.sleep(60)",
        status=("error",),
        stopped=False,
        reason="more than 256 threads",
    ),
    "output": Attack("while True: print('x' * 1000000)", status=("output",), stopped=False),
    "error_output": Attack("while True: os.write(2, b'x' * 65536)", status=("output",), stopped=False),
    "large_file": Attack("attempt(lambda: open('large', 'wb').write(bytes(100 << 20)))"),
    "many_files": Attack(
        "def fill():\n    for n in range(12):\n        with open(f'f{n}', 'wb') as file: file.write(bytes(24 << 20))\n"
        "attempt(fill)",
        layer="bubblewrap",
    ),
    "open_files": Attack("attempt(lambda: [os.dup(0) for _ in range(1000)])"),
    "deep_folders": Attack(
        "try:\n    for _ in range(1500): os.mkdir('d'); os.chdir('d')\nexcept OSError: pass\nprint('stopped')"
    ),
    "overflow_the_stack": Attack(
        "sys.setrecursionlimit(10**9)\nclass A:\n    def __repr__(self): return repr(self)\nrepr(A())",
        status=("error", "memory", "timeout"),
        stopped=False,
    ),
    # Verdicts
    "flood_the_program": Attack(
        "while True: os.write(3, b'x')", status=("timeout",), stopped=False, timeout=1.0
    ),
    "forge_the_end": Attack(
        "os.write(3, b'D\\0'); print('mine'); os._exit(3)", status=("error",), stopped=False
    ),
    "bytes_that_are_no_text": Attack(
        "os.write(1, b'\\xff\\0\\x1b[2J'); print('\\ud800')", status=("error",), stopped=False
    ),
    "equal_hashes": Attack(
        "print(len({(2**61 - 1) * n for n in range(10**6)}))", status=("timeout",), stopped=False, timeout=1.0
    ),
    "poison_the_next": Attack("import builtins, numpy\nbuiltins.print = numpy.sum = None", stopped=False),
}  # fmt: skip

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
