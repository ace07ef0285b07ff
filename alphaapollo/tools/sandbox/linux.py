"""System calls that Python does not wrap, and resource limits."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 1, 4, 8, 38
SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}  # the other calls have the same number on all architectures
CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION_3 = 0x20080522
NOBODY_UID = 65534

_libc = ctypes.CDLL(None, use_errno=True)


def get_architecture() -> str:
    """Return the architecture, e.g. `x86_64` or `aarch64`; empty outside Linux."""
    return platform.machine() if platform.system() == "Linux" else ""


def _raise_if_failed(result: int) -> int:
    if result < 0:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))
    return result


def syscall(number: int, *arguments: object) -> int:
    """Make one raw system call. Raises OSError if it fails."""
    return _raise_if_failed(_libc.syscall(ctypes.c_long(number), *arguments))


def prctl(option: int, value: int) -> None:
    """Set an option of this process, e.g. PR_SET_DUMPABLE. Raises OSError if it fails."""
    zero = ctypes.c_ulong(0)
    _raise_if_failed(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero))


def set_capabilities(mask: int) -> None:
    """Set the capabilities of this process. `mask`: one bit per capability."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    _raise_if_failed(_libc.capset(header, (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)))


def count_address_space_bytes() -> int:
    """Return how many bytes of address space this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def drop_privileges() -> None:
    """Change from root to the unprivileged user with id NOBODY_UID."""
    os.setgroups([])
    os.setresgid(NOBODY_UID, NOBODY_UID, NOBODY_UID)
    os.setresuid(NOBODY_UID, NOBODY_UID, NOBODY_UID)


def set_rlimits(limits: dict[int, int]) -> None:
    """Set limits of this process ({resource.RLIMIT_*: value}), capped at the hard limits, and disable core dumps.
    RLIMIT_NPROC is not useful here: it does not apply to root, and it counts all processes of a user."""
    for kind, value in {**limits, resource.RLIMIT_CORE: 0}.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # SIGXCPU, which identifies the reason, comes one second before SIGKILL.
        resource.setrlimit(kind, (value, value + 1 if kind == resource.RLIMIT_CPU and hard != value else value))
