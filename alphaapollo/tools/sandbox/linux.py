"""Isolation by the Linux kernel: system calls that Python does not wrap, resource limits, Landlock and seccomp.

Landlock restricts irrevocably which files this process may open. It needs kernel 5.13 or later, but no privileges. A
ruleset denies all rights that the kernel's version of Landlock supports; its rules allow single folders and files.
Landlock does not restrict descriptors that are already open, or the metadata of files (stat).

seccomp restricts the system calls of this process irrevocably. The filter is an allow-list; other calls fail with
EPERM. It denies, among others: exec, new processes (but not threads), sockets except connected pairs, signals and other
access to other processes, namespaces, mounts, permissions and times of files (Landlock does not cover these), links,
memory files, keys, BPF and io_uring."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import struct
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 1, 4, 8, 38
SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}
CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION_3 = 0x20080522
NOBODY_UID = 65534

_LANDLOCK_CREATE, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446  # on all architectures
_VERSION, _PATH_BENEATH = 1, 1  # flag of a query, type of a rule
WRITE_FILE, READ_FILE, READ_DIR = 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_FILE = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_KNOWN_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # version -> number of rights; 16 since version 5

READ = READ_FILE | READ_DIR
READ_WRITE = READ | WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_FILE | _REFER | _TRUNCATE
DEVICE = READ_FILE | WRITE_FILE

# call name -> number on (x86_64, aarch64); None: the call does not exist on this architecture
_Table = dict[str, tuple[int | None, int | None]]

# fmt: off
PLAIN: _Table = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216), "madvise": (28, 233),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132), "dup": (32, 23),
    "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59), "poll": (7, None),
    "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22), "eventfd2": (290, 19),
    "recvfrom": (45, 207), "recvmsg": (47, 212), "shutdown": (48, 210),
    "getsockname": (51, 204), "futex": (202, 98), "set_robust_list": (273, 99), "get_robust_list": (274, 100),
    "rseq": (334, 293), "gettid": (186, 178), "getpid": (39, 172), "getppid": (110, 173), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getpgrp": (111, None),
    "getpgid": (121, 155), "getgroups": (115, 158), "getresuid": (118, 148), "getresgid": (120, 150),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101), "gettimeofday": (96, 169),
    "time": (201, None), "times": (100, 153), "getrusage": (98, 165), "getrlimit": (97, 163), "sysinfo": (99, 179),
    "uname": (63, 160), "getrandom": (318, 278), "exit": (60, 93), "exit_group": (231, 94),
    "restart_syscall": (219, 128), "membarrier": (324, 283), "getitimer": (36, 102), "setitimer": (38, 103),
    "alarm": (37, None), "pause": (34, None), "wait4": (61, 260), "umask": (95, 166), "getcwd": (79, 17),
    "fsync": (74, 82), "fdatasync": (75, 83), "flock": (73, 32), "ftruncate": (77, 46), "sendfile": (40, 71),
    "copy_file_range": (326, 285), "fadvise64": (221, 223), "arch_prctl": (158, None),
    # Metadata of files
    "stat": (4, None), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291), "access": (21, None),
    "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78),
    "statfs": (137, 43), "fstatfs": (138, 44),
}
FILES: _Table = {  # allowed with Landlock. Without truncate by path, which Landlock restricts only since version 3
    "open": (2, None), "openat": (257, 56), "creat": (85, None), "getdents64": (217, 61), "chdir": (80, 49),
    "fchdir": (81, 50), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None),
    "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
}
CHECKED: _Table = {  # allowed for some arguments, see _make_argument_rules
    "clone": (56, 220), "socketpair": (53, 199), "sendto": (44, 206), "kill": (62, 129), "tgkill": (234, 131),
    "prlimit64": (302, 261), "ioctl": (16, 29), "fcntl": (72, 25), "prctl": (157, 167),
    "getsockopt": (55, 209),
}
_CLONE3 = 435  # fails with ENOSYS, so glibc uses clone, whose flags the filter can check

_THREAD, _NEW_NAMESPACES = 0x10000, 0x7E020000  # flags of clone
_FCNTL = [0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030]  # duplicate, flags, locks; not owner, lease or notification
_IOCTL = [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451]  # terminal attributes, size; bytes ready, blocking, cloexec
_GETSOCKOPT = [3, 4, 7, 8, 30, 38, 39]  # type, error, buffers, listening, protocol, domain; not peer credentials
_PRCTL = [3, 15, 16, 0x53564D41]  # read DUMPABLE; names of threads and memory areas
# fmt: on

_LOAD, _AND, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, range(16, 64, 8)  # offsets in struct seccomp_data
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000  # bit of the numbers of system calls in the x32 ABI
_FULL = 0xFFFFFFFF  # mask that compares all bits

_Instruction = tuple[int, int, int, int]  # (opcode, jump if true, jump if false, value)
_Condition = tuple[int, int, list[int]]  # (offset of a 32-bit word, mask, allowed values of the masked word)

_libc = ctypes.CDLL(None, use_errno=True)


def is_seccomp_supported() -> bool:
    return platform.system() == "Linux" and platform.machine() in SYS_SECCOMP


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
    """Change from root to an unprivileged user."""
    os.setgroups([])
    os.setresgid(NOBODY_UID, NOBODY_UID, NOBODY_UID)
    os.setresuid(NOBODY_UID, NOBODY_UID, NOBODY_UID)


def set_rlimits(limits: dict[int, int]) -> None:
    """Set limits of this process ({resource.RLIMIT_*: value}), capped at the hard limits, and disable core dumps.
    RLIMIT_NPROC does not apply to root, and counts the threads of all processes of a user."""
    for kind, value in {**limits, resource.RLIMIT_CORE: 0}.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # SIGXCPU, which identifies the reason, comes one second before SIGKILL.
        new_hard = value + 1 if kind == resource.RLIMIT_CPU and hard != value else value
        resource.setrlimit(kind, (value, new_hard))


def get_landlock_version() -> int:
    """Return the version of Landlock that the kernel supports, or 0 without Landlock."""
    with contextlib.suppress(OSError):
        return syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    return 0


def build_ruleset(rules: list[tuple[int, int]], version: int) -> int:
    """Create a Landlock ruleset that allows only `rules`, pairs of (O_PATH descriptor, rights). Return its descriptor.

    `version`: version of Landlock. From version 4, the ruleset also denies TCP. From version 6, it also denies
    sending signals to outside processes and connecting to their abstract sockets."""
    file_rights = (1 << _KNOWN_FILE_RIGHTS.get(version, 16)) - 1  # one bit per right
    tcp, scopes = struct.pack("=Q", 0b11), struct.pack("=Q", 0b11)
    attributes = struct.pack("=Q", file_rights) + (tcp if version >= 4 else b"") + (scopes if version >= 6 else b"")
    ruleset = syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    for descriptor, rights in rules:
        rule = struct.pack("=Qi", rights & file_rights, descriptor)
        syscall(_LANDLOCK_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
    return ruleset


def apply_ruleset(ruleset: int) -> None:
    """Apply the ruleset to this process and close its descriptor. Requires PR_SET_NO_NEW_PRIVS."""
    syscall(_LANDLOCK_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


def apply_snippet_filter(allow_files: bool) -> None:
    """Apply the seccomp filter for Python snippets to this process, which must have one thread. Requires
    PR_SET_NO_NEW_PRIVS. `allow_files`: whether snippets may open files; Landlock then decides which files."""
    _apply_filter([*PLAIN, *(FILES if allow_files else ())], _make_argument_rules())


def _make_argument_rules() -> dict[str, list[_Condition]]:
    """Return {system call: conditions on its arguments under which it is allowed}."""

    def require_null(argument: int) -> list[_Condition]:
        return [(_ARGUMENT[argument], _FULL, [0]), (_ARGUMENT[argument] + 4, _FULL, [0])]

    own_pid = [(_ARGUMENT[0], _FULL, [os.getpid()])]
    return {
        "clone": [(_ARGUMENT[0], _THREAD | _NEW_NAMESPACES, [_THREAD])],
        "socketpair": [(_ARGUMENT[0], _FULL, [1]), (_ARGUMENT[1], 0xF, [1])],  # AF_UNIX, SOCK_STREAM
        "sendto": require_null(4),  # without an address
        "kill": own_pid,
        "tgkill": own_pid,
        "prlimit64": [(_ARGUMENT[0], _FULL, [0]), *require_null(2)],  # only read the limits of this process
        "ioctl": [(_ARGUMENT[1], _FULL, _IOCTL)],
        "fcntl": [(_ARGUMENT[1], _FULL, _FCNTL)],
        "prctl": [(_ARGUMENT[0], _FULL, _PRCTL)],
        "getsockopt": [(_ARGUMENT[1], _FULL, [1]), (_ARGUMENT[2], _FULL, _GETSOCKOPT)],  # SOL_SOCKET
    }


def _apply_filter(allowed: list[str], rules: dict[str, list[_Condition]]) -> None:
    """Apply a BPF program that allows the system calls in `allowed`, and those in `rules` under their conditions."""
    architecture, table = platform.machine(), PLAIN | FILES | CHECKED
    column = list(_AUDIT_ARCH).index(architecture)
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[architecture]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for name in {*allowed, *rules}:
        if (number := table[name][column]) is not None:
            block: list[_Instruction] = []
            for offset, mask, values in rules.get(name, ()):  # continues if the masked word is one of the values
                block += [(_LOAD, 0, 0, offset), (_AND, 0, 0, mask)]
                block += [(_JUMP_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
                block.append((_RETURN, 0, 0, _ERRNO | _EPERM))
            program += [(_JUMP_EQUAL, 0, len(block) + 1, number), *block, (_RETURN, 0, 0, _ALLOW)]
    program += [(_JUMP_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | _ENOSYS), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    syscall(SYS_SECCOMP[architecture], ctypes.c_uint(1), ctypes.c_uint(0), header)
