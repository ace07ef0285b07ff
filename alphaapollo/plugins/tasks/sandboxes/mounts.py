"""The mounts of a rootless sandbox, its namespaces, and the privileges that its processes drop.

The new root is in memory. Programs (/usr, or those of an unpacked image) are under an overlay, which takes the files
that the image adds to them and is then read only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import shutil
import signal
import socket
import struct
from collections.abc import Mapping
from typing import Any

ROOT = "/tmp"  # mount point of the memory file system that holds the new root
LINKED = ("bin", "sbin", "lib", "lib32", "lib64")  # folders that are links into /usr on today's systems
ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "protocols", "services")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
FOLDERS = (
    "dev/pts",
    "dev/shm",
    "etc",
    "home",
    "logs",
    "mnt",
    "opt",
    "proc",
    "root",
    "run",
    "srv",
    "tmp",
    "usr",
    "var/tmp",
)
SYSTEM = ("bin", "sbin", "lib", "src", "share", "local/bin", "local/sbin", "local/lib", "local/share")  # in /usr
HIDDEN = ("bus", "fs", "irq", "sys", "sysrq-trigger", "kcore", "keys", "kallsyms", "timer_list", "scsi")  # in /proc
NAMES = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
NOBODY_UID = 65534
READ_ONLY, NO_SETUID, NO_DEVICES, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 0x1000, 0x4000, 1 << 18
NAMESPACES = 0x10000000 | 0x20000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR, AT_RECURSIVE, DETACH = 442, 0x8000, 2
PDEATHSIG, DUMPABLE, SECCOMP, DROP_BOUNDING, SECUREBITS, NO_NEW_PRIVS = 1, 4, 22, 24, 28, 38
NEW_PIDS = 0x20000000

# Calls that reach past the namespaces: number on x86_64 and aarch64, and the first arguments that are allowed.
FILTERED: dict[str, tuple[tuple[int, int], tuple[int, ...]]] = {
    "socket": ((41, 198), (1, 2, 10, 16)),  # local, IPv4, IPv6, netlink; the others include those of virtual machines
    "add_key": ((248, 217), ()),  # keyrings belong to the user of this machine
    "request_key": ((249, 218), ()),
    "keyctl": ((250, 219), ()),
    "sched_setaffinity": ((203, 122), ()),  # would use more CPUs
    "io_uring_setup": ((425, 425), ()),  # makes calls that no filter sees
}
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000  # bit of the numbers of a second interface of x86_64

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, value: int, address: int = 0) -> int:
    result: int = libc.prctl(option, *map(ctypes.c_ulong, (value, address, 0, 0)))
    return result


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    words = [value.encode() if value else None for value in (source, target, kind)]
    check(libc.mount(*words, ctypes.c_ulong(flags), options.encode() if options else None), f"mount {kind or source}")


def mount_memory(path: str, size_mb: int) -> None:
    mount("tmpfs", path, "tmpfs", NO_SETUID | NO_DEVICES, f"size={size_mb}m,mode=755,nr_inodes=200k")


def set_read_only(path: str, wanted: bool = True) -> None:
    """Make the mounts at and below a path read only; wanted=False: the mount at the path writable."""
    attributes = struct.pack("4Q", *((READ_ONLY, 0) if wanted else (0, READ_ONLY)), 0, 0)
    flags = AT_RECURSIVE if wanted else 0
    check(
        libc.syscall(MOUNT_SETATTR, -100, path.encode(), flags, attributes, ctypes.c_size_t(32)),
        f"mount_setattr {path}",
    )


def write_file(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def enter_namespaces() -> None:
    """Move to new namespaces, as process 1 of the sandbox. Root becomes an unprivileged user of this machine first."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY_UID, NOBODY_UID, NOBODY_UID)
        os.setresuid(NOBODY_UID, NOBODY_UID, NOBODY_UID)
        prctl(DUMPABLE, 1)  # so that the files below /proc/self belong to this user
    user, group = os.getuid(), os.getgid()
    check(libc.unshare(NAMESPACES), "unshare")
    write_file("/proc/self/setgroups", "deny")
    write_file("/proc/self/uid_map", f"0 {user} 1")
    write_file("/proc/self/gid_map", f"0 {group} 1")
    if child := os.fork():
        os.closerange(0, 16)  # the end of the socket belongs to the child alone
        os.waitpid(child, 0)
        os._exit(0)
    prctl(PDEATHSIG, signal.SIGKILL)


def build_root(spec: Mapping[str, Any]) -> tuple[int, socket.socket]:
    """Build the root file system below ROOT, and change to it. Returns the reaper. spec["rootfs"]: the working folder
    is an unpacked image.

    Files of other users, as those of /usr, cannot be changed, and folders of theirs get no new files, except those
    that already exist in the upper layer of the overlay.
    """
    mount(None, "/", None, RECURSIVE | PRIVATE)
    lower = os.open("." if spec["rootfs"] else "/usr", os.O_PATH)
    mount_memory(ROOT, spec["storage_mb"])
    os.chdir(ROOT)
    above = "" if spec["rootfs"] else "usr/"  # place of the overlay in the root
    folders = [*FOLDERS, *(f"usr/{name}" for name in SYSTEM), *(path.strip("/") for path in spec["folders"])]
    for name in ("root", "work", *(f"upper/{name[len(above) :]}" for name in folders if name.startswith(above))):
        os.makedirs(name, exist_ok=True)
    if above:
        mount("root", "root", None, BIND)
        for name in FOLDERS:
            os.makedirs(f"root/{name}", exist_ok=True)
    layers = f"lowerdir=/proc/self/fd/{lower},upperdir={ROOT}/upper,workdir={ROOT}/work,userxattr"
    mount("overlay", f"root/{above}", "overlay", NO_SETUID | NO_DEVICES, layers)
    if above:
        copy_system_files()
    for name in ("tmp", "var/tmp", "dev/shm"):
        os.chmod(f"root/{name}", 0o1777)
    for name in DEVICES:
        write_file(f"root/dev/{name}", "")
        mount(f"/dev/{name}", f"root/dev/{name}", None, BIND)
    mount("devpts", "root/dev/pts", "devpts", NO_SETUID, "newinstance,ptmxmode=0666,mode=620")
    links = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
    for name, target in links.items():
        with contextlib.suppress(FileExistsError):
            os.symlink(target, f"root/dev/{name}")
    reaper = start_reaper("root/proc")
    os.chdir("root")
    check(libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    check(libc.umount2(b".", DETACH), "umount")
    os.chdir("/")
    return reaper


def start_reaper(proc: str) -> tuple[int, socket.socket]:
    """Start process 1 of a new process namespace, to which all further children of this process belong. Returns its id
    and a socket: it kills all other processes of the namespace for each byte, and answers it. proc: where it mounts
    /proc, which shows this namespace only."""
    check(libc.unshare(NEW_PIDS), "unshare")
    control, theirs = socket.socketpair()
    if child := os.fork():
        theirs.close()
        if error := control.recv(1 << 10)[1:]:
            raise OSError(error.decode())
        return child, control
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel lets no signal of commands reach it, except handled
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
        mount("proc", proc, "proc", NO_SETUID | NO_DEVICES | 8, "hidepid=2")
        os.chdir("/")
        theirs.sendall(b"k")
        while theirs.recv(1):
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            theirs.sendall(b"k")
    except OSError as error:
        theirs.sendall(f" {error}".encode())
    finally:
        os._exit(0)


def copy_system_files() -> None:
    """Copy the few files outside /usr that this machine's programs need."""
    for name in LINKED:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"root/{name}")
        elif os.path.isdir(f"/{name}"):
            os.mkdir(f"root/{name}")
            mount(f"/{name}", f"root/{name}", None, BIND | RECURSIVE)
    for name in filter(lambda name: os.path.lexists(f"/etc/{name}"), ETC):
        if os.path.isdir(f"/etc/{name}"):
            shutil.copytree(f"/etc/{name}", f"root/etc/{name}", symlinks=True)
        else:
            shutil.copyfile(f"/etc/{name}", f"root/etc/{name}", follow_symlinks=name != "localtime")
    for name, text in NAMES.items():
        write_file(f"root/etc/{name}", text)


def restrict(spec: Mapping[str, Any]) -> None:
    """Start the network, which has only 127.0.0.1, and hide what /proc shows of this machine."""
    with socket.socket() as probe:
        request = bytearray(struct.pack("16sH22x", b"lo", 0))
        fcntl.ioctl(probe, 0x8913, request)  # SIOCGIFFLAGS
        flags = struct.unpack_from("H", request, 16)[0] | 1
        fcntl.ioctl(probe, 0x8914, struct.pack("16sH22x", b"lo", flags))
    socket.sethostname("sandbox")
    with contextlib.suppress(OSError):  # a kernel without nested namespaces
        write_file("/proc/sys/user/max_user_namespaces", "0")
    for name in filter(lambda name: os.path.exists(f"/proc/{name}"), HIDDEN):
        if name == "sys" or os.path.isdir(f"/proc/{name}"):
            mount(f"/proc/{name}", f"/proc/{name}", None, BIND | RECURSIVE)
            set_read_only(f"/proc/{name}")
        else:
            mount("/dev/null", f"/proc/{name}", None, BIND)
    with contextlib.suppress(OSError):
        cpus = sorted(os.sched_getaffinity(0))
        first = spec["number"] % len(cpus)
        os.sched_setaffinity(0, (cpus[first:] + cpus[:first])[: max(1, round(spec["cpus"]))])
    filter_calls()


def filter_calls() -> None:
    """Deny the calls in FILTERED to this process and its children, with a seccomp filter (a BPF program)."""
    load, jump_equal, jump_at_least, end, architecture = 0x20, 0x15, 0x35, 0x06, os.uname().machine
    deny, allow = (end, 0, 0, 0x50000 | errno.EPERM), (end, 0, 0, 0x7FFF0000)
    program = [(load, 0, 0, 4), (jump_equal, 1, 0, AUDIT_ARCH[architecture]), deny]
    program += [(load, 0, 0, 0), (jump_at_least, 0, 1, X32), deny]
    for numbers, allowed in FILTERED.values():
        jumps = [(jump_equal, len(allowed) - index, 0, value) for index, value in enumerate(allowed)]
        block = [(load, 0, 0, 16), *jumps, deny, allow]
        program += [(jump_equal, 0, len(block), numbers[list(AUDIT_ARCH).index(architecture)]), *block]
    program.append(allow)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    check(prctl(NO_NEW_PRIVS, 1), "no_new_privs")
    check(prctl(SECCOMP, 2, ctypes.addressof(header)), "seccomp")


def protect(workdir: str) -> None:
    """Make /usr and /etc read only, so that an agent cannot replace programs that its tests use.

    /tests and /logs become mount points, so that they exist for the tests even if no file can be created any more.
    """
    for name in ("/tests", "/logs"):
        os.makedirs(name, exist_ok=True)
        mount(name, name, None, BIND)
    for name in (f"/{name}" for name in (*LINKED, "usr", "etc")):
        source = name
        if os.path.islink(name):  # a link could be replaced, a mount point cannot
            source = os.path.join("/", os.readlink(name))
            os.unlink(name)
            os.mkdir(name)
        if os.path.isdir(source):
            mount(source, name, None, BIND | RECURSIVE)
            set_read_only(name)
    if workdir.startswith(("/usr/", "/etc/")):
        mount(workdir, workdir, None, BIND)
        set_read_only(workdir, False)


def prepare_command(limits: dict[int, int]) -> None:
    """Drop all privileges of this process for good, before a command replaces it."""
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    for capability in range(64):
        if prctl(DROP_BOUNDING, capability) < 0:
            break
    check(prctl(SECUREBITS, 0x2F), "securebits")  # root has no capabilities, and this cannot be changed
    header, empty = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    check(libc.capset(header, empty), "capset")
