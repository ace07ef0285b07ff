"""Landlock: restrict irrevocably which files this process may open. Needs kernel 5.13 or later, but no privileges.

The ruleset denies all rights that the kernel's version of Landlock supports. Its rules allow single folders and files.
Landlock does not restrict descriptors that are already open, or the metadata of files (stat).
"""

from __future__ import annotations

import ctypes
import os
import struct

from alphaapollo.tools.sandbox.linux import syscall

_CREATE, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1

WRITE_FILE, READ_FILE, READ_DIR = 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_FILE = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_KNOWN_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # version -> number of rights; 16 since version 5

READ = READ_FILE | READ_DIR
READ_WRITE = READ | WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_FILE | _REFER | _TRUNCATE
DEVICE = READ_FILE | WRITE_FILE


def get_abi_version() -> int:
    """Return the version of Landlock that the kernel supports, or 0 without Landlock."""
    try:
        return syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    except OSError:
        return 0


def build_ruleset(rules: list[tuple[int, int]], version: int) -> int:
    """Create a ruleset that allows only `rules`, pairs of (O_PATH descriptor, rights). Return its descriptor.

    `version`: version of Landlock. From version 4, the ruleset also denies TCP. From version 6, it also denies
    sending signals to outside processes and connecting to their abstract sockets.
    """
    files = (1 << _KNOWN_FILE_RIGHTS.get(version, 16)) - 1
    attributes = struct.pack("=QQQ", files, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0)
    attributes = attributes[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    for descriptor, rights in rules:
        rule = struct.pack("=Qi", rights & files, descriptor)
        syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
    return ruleset


def apply_ruleset(ruleset: int) -> None:
    """Apply the ruleset to this process and close its descriptor. Requires PR_SET_NO_NEW_PRIVS."""
    syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)
