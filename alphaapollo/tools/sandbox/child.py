"""The sandboxed process, from its fork to its first snippet: the layers in the order in which they must come.

    session of its own -> descriptors -> limits -> unprivileged user -> die with the parent -> no new privileges
    -> Landlock -> seccomp

Then it takes snippets from its control socket (descriptor 3), one message each with the code in a memory file, and
answers each with READY or DONE. It ends after the first one, unless it serves a session.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import resource
import signal
import socket
import sys
from dataclasses import dataclass

from alphaapollo.tools.sandbox import landlock, rlimits, seccomp
from alphaapollo.tools.sandbox.execute import EXIT_ERROR, execute, finish, flush, new_namespace
from alphaapollo.tools.sandbox.linux import (
    CAP_DAC_READ_SEARCH,
    PR_SET_DUMPABLE,
    PR_SET_KEEPCAPS,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    prctl,
    set_capabilities,
)

CONTROL, RULESET, FIRST_FREE = 3, 4, 5
NOBODY = 65534
READY, DONE = b"R", b"D"
SETUP_FAILED = 70  # exit code, before READY
MESSAGE_BYTES = 4096
SEED = 0


@dataclass(frozen=True)
class Launch:
    """What a child is to be, sent by the supervisor with its descriptors (control, stdin, stdout, stderr)."""

    id: int
    setuid: bool
    landlock: bool
    seccomp: bool
    memory_mb: int
    cpu_seconds: int
    session: bool


@dataclass(frozen=True)
class Ground:
    """What the zygote has ready for all children: rights on open folders, how much address space it has itself."""

    landlock_version: int
    rules: list[tuple[int, int]]  # (O_PATH descriptor, rights)
    library: str  # folder of the standard library
    address_space: int
    pid: int


def run(launch: Launch, ground: Ground, folder: str, descriptors: list[int]) -> None:
    """Never returns. Called in the freshly forked process."""
    code = SETUP_FAILED
    try:
        _restrict(launch, ground, folder, descriptors)
        code = _serve(launch)
        finish()
    except BaseException as error:  # noqa: BLE001  the frames above belong to the zygote
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = code or EXIT_ERROR
    finally:
        try:
            flush()
        finally:
            os._exit(code)


def _restrict(launch: Launch, ground: Ground, folder: str, descriptors: list[int]) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)  # the zygote's, which is closed here
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.chdir(folder)
    os.environ.update(HOME=folder, TMPDIR=folder)
    own = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    rules = [*ground.rules, (own, landlock.READ_WRITE)]
    ruleset = landlock.build(rules, ground.landlock_version) if launch.landlock else own
    _place([*descriptors, ruleset])
    rlimits.apply(ground.address_space, launch.memory_mb, launch.cpu_seconds)
    if launch.setuid:
        _become_nobody(ground.library)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which clears it
    if os.getppid() != ground.pid:
        os._exit(SETUP_FAILED)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_DUMPABLE, 0)
    _reseed()
    if launch.landlock:
        landlock.restrict(RULESET)
    else:
        os.close(RULESET)
    if launch.seccomp:
        seccomp.restrict(launch.landlock, os.getpid())


def _place(descriptors: list[int]) -> None:
    """Control, stdin, stdout, stderr and the ruleset where they belong; everything else closed."""
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 64) for descriptor in descriptors]
    for source, target in zip(aside, (CONTROL, 0, 1, 2, RULESET), strict=True):
        os.dup2(source, target)
    os.closerange(FIRST_FREE, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _become_nobody(library: str) -> None:
    """Drop root. Where the standard library lies in a folder that only root may enter, keep the one capability that
    reads everywhere: what may be read is Landlock's business (without it, nothing may be opened at all)."""
    prctl(PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    set_capabilities(0 if os.access(library, os.R_OK) else 1 << CAP_DAC_READ_SEARCH)


def _reseed() -> None:
    """The same draws in each run, so that a rollout can be repeated."""
    random.seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)


def _serve(launch: Launch) -> int:
    with socket.socket(fileno=CONTROL) as control:
        control.send(READY)
        namespace = new_namespace()
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 1)
            if not message:
                return 0
            with open(descriptors[0], "rb") as file:
                source = file.read()
            code = execute(source, namespace, json.loads(message)["echo"])
            if not launch.session:
                return code
            flush()
            control.send(DONE + bytes([code]))
