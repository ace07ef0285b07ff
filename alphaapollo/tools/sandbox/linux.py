"""The few system calls that Python does not wrap, through libc. Nothing is done at import."""

from __future__ import annotations

import ctypes
import os
import platform

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 1, 4, 8, 38
SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}  # all others that are used here have one number everywhere
CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def machine() -> str:
    """`x86_64`, `aarch64`, or another name, for which there is no seccomp filter here."""
    return platform.machine() if platform.system() == "Linux" else ""


def syscall(number: int, *arguments: object) -> int:
    """One raw system call (OSError where the kernel refuses)."""
    result = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))
    return result


def prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    if _libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero) < 0:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))


def set_capabilities(mask: int) -> None:
    """Keep these capabilities (bits) and no other."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    if _libc.capset(header, (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)) < 0:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))
