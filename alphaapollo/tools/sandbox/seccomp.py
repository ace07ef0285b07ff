"""seccomp: restrict the system calls of this process irrevocably.

The filter is an allow-list; other calls fail with EPERM. It denies, among others: exec, new processes (but not
threads), sockets except connected pairs, signals and other access to other processes, namespaces, mounts, permissions
and times of files (Landlock does not cover these), links, memory files, keys, BPF and io_uring.
"""

from __future__ import annotations

import ctypes
import os
import struct

from alphaapollo.tools.sandbox.linux import SYS_SECCOMP, get_architecture, syscall

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
SHELL: _Table = {  # execveat starts bash, which does not use this call itself
    "execveat": (322, 281), "fork": (57, None), "vfork": (58, None), "set_tid_address": (218, 96),
}
METADATA = {"stat", "lstat", "statx", "access", "faccessat", "faccessat2", "readlink", "readlinkat", "statfs"}
_CLONE3 = 435  # fails with ENOSYS, so glibc uses clone, whose flags the filter can check

_THREAD, _NEW_NAMESPACES = 0x10000, 0x7E020000
_FCNTL = [0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030]  # duplicate, flags, locks; not owner, lease or notification
_IOCTL = [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451]  # terminal attributes, size; bytes ready, blocking, cloexec
_GETSOCKOPT = [3, 4, 7, 8, 30, 38, 39]  # type, error, buffers, listening, protocol, domain; not peer credentials
_WRITE_FLAGS = 0x400643  # flags to write, create, truncate, append, and for temporary files
_AT_EMPTY_PATH = 0x1000  # flag to read the metadata of a descriptor
_PRCTL = [3, 15, 16, 0x53564D41]  # read DUMPABLE; names of threads and memory areas
# fmt: on

_LOAD, _AND, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data; the arguments follow at 16, 8 bytes each
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
_FULL = 0xFFFFFFFF

_Instruction = tuple[int, int, int, int]  # (opcode, jump if true, jump if false, value)
_Condition = tuple[int, int, list[int]]  # (offset of a 32-bit word, mask, allowed values of the masked word)


def is_supported() -> bool:
    return get_architecture() in SYS_SECCOMP


def apply_snippet_filter(allow_files: bool) -> None:
    """Apply the filter for Python snippets to this process, which must have one thread. Requires PR_SET_NO_NEW_PRIVS.
    `allow_files`: whether snippets may open files; Landlock then decides which files."""
    _install_filter(_build_bpf_program(PLAIN | FILES if allow_files else PLAIN, _make_argument_rules()))


def apply_shell_filter() -> None:
    """Apply the filter for bash to this process. Compared with apply_snippet_filter(False), it also allows forking and
    opening files for reading, but no metadata of files by path. Start bash with `execveat`, its only exec call."""
    rules = _make_argument_rules() | {
        "clone": [(_argument_offset(0), _NEW_NAMESPACES, [0])],
        "open": [(_argument_offset(1), _WRITE_FLAGS, [0])],
        "openat": [(_argument_offset(2), _WRITE_FLAGS, [0])],
        "newfstatat": [(_argument_offset(3), _AT_EMPTY_PATH, [_AT_EMPTY_PATH])],
    }
    _install_filter(_build_bpf_program({name: PLAIN[name] for name in PLAIN.keys() - METADATA} | SHELL, rules))


def _argument_offset(argument: int) -> int:
    """Return the offset of a system call's argument (0 to 5) in struct seccomp_data."""
    return 16 + 8 * argument


def _make_argument_rules() -> dict[str, list[_Condition]]:
    """Return {system call: conditions on its arguments under which it is allowed}."""

    def require_null(argument: int) -> list[_Condition]:
        return [(_argument_offset(argument), _FULL, [0]), (_argument_offset(argument) + 4, _FULL, [0])]

    own_pid = [(_argument_offset(0), _FULL, [os.getpid()])]
    return {
        "clone": [(_argument_offset(0), _THREAD | _NEW_NAMESPACES, [_THREAD])],
        "socketpair": [(_argument_offset(0), _FULL, [1]), (_argument_offset(1), 0xF, [1])],  # AF_UNIX, SOCK_STREAM
        "sendto": require_null(4),  # without an address
        "kill": own_pid,
        "tgkill": own_pid,
        "prlimit64": [(_argument_offset(0), _FULL, [0]), *require_null(2)],  # only read the limits of this process
        "ioctl": [(_argument_offset(1), _FULL, _IOCTL)],
        "fcntl": [(_argument_offset(1), _FULL, _FCNTL)],
        "prctl": [(_argument_offset(0), _FULL, _PRCTL)],
        "getsockopt": [(_argument_offset(1), _FULL, [1]), (_argument_offset(2), _FULL, _GETSOCKOPT)],  # SOL_SOCKET
    }


def _build_bpf_program(allowed: _Table, rules: dict[str, list[_Condition]]) -> list[_Instruction]:
    """Build a BPF program that allows the system calls in `allowed`, and those in `rules` under their conditions."""
    architecture = get_architecture()
    column = list(_AUDIT_ARCH).index(architecture)
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[architecture]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for name, numbers in allowed.items():
        if name not in rules and (number := numbers[column]) is not None:
            program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    numbers_of = PLAIN | FILES | CHECKED
    for name, conditions in rules.items():
        if (number := numbers_of[name][column]) is not None:
            block = _build_argument_checks(conditions)
            program += [(_JUMP_EQUAL, 0, len(block), number), *block]
    program += [(_JUMP_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    return [*program, (_RETURN, 0, 0, _ERRNO | _EPERM)]


def _build_argument_checks(conditions: list[_Condition]) -> list[_Instruction]:
    """Build BPF instructions that allow a system call if all conditions are true, and else make it fail with EPERM."""
    block: list[_Instruction] = []
    for offset, mask, values in conditions:
        block += [(_LOAD, 0, 0, offset), (_AND, 0, 0, mask)]
        for position, value in enumerate(values):
            block.append((_JUMP_EQUAL, len(values) - position, 0, value))  # skips the other values and EPERM
        block.append((_RETURN, 0, 0, _ERRNO | _EPERM))
    return [*block, (_RETURN, 0, 0, _ALLOW)]


def _install_filter(program: list[_Instruction]) -> None:
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    syscall(SYS_SECCOMP[get_architecture()], ctypes.c_uint(1), ctypes.c_uint(0), header)
