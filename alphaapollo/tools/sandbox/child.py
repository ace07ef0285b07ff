"""Child process of the zygote. It applies the isolation layers in the only order that works, then runs snippets.

    new session -> descriptors -> resource limits -> unprivileged user -> die with the parent -> no new privileges
    -> Landlock -> seccomp

Each snippet arrives as a message on the control socket (descriptor 3), with the code in a memory file. The child sends
READY before the first snippet and, in a session, DONE with the exit code after each snippet. Without a session it exits
after the first snippet. The program must not trust the results: a snippet can fake any output and exit code."""

from __future__ import annotations

import ast
import atexit
import fcntl
import json
import linecache
import os
import random
import resource
import signal
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from types import ModuleType
from typing import NoReturn

from alphaapollo.tools.sandbox import linux

CONTROL, RULESET, FIRST_FREE = 3, 4, 5  # descriptors; those from FIRST_FREE on are closed
READY, DONE = b"R", b"D"
SETUP_FAILED = 70  # exit code if the setup fails, before READY
EXIT_ERROR, EXIT_MEMORY = 1, 41
FILE_NAME = "<snippet>"
MESSAGE_BYTES = 4096
SEED = 0
FILE_BYTES = 32 << 20  # limit of the size of a file
OPEN_FILES = 128


@dataclass(frozen=True)
class ChildSpec:
    """Settings of a child process. The program sends them to the zygote together with the child's descriptors."""

    layers: list[str]  # isolation layers, a subset of processes.LAYERS
    memory_mb: int
    cpu_seconds: int
    is_session: bool


@dataclass(frozen=True)
class ForkContext:
    """Values that the zygote computes once and every forked child uses."""

    zygote_pid: int
    address_space: int  # bytes that the zygote has mapped
    library_folder: str  # folder of Python's standard library
    landlock_version: int
    landlock_rules: list[tuple[int, int]]  # (O_PATH descriptor, Landlock rights)


def run_child(spec: ChildSpec, context: ForkContext, folder: str, descriptors: list[int]) -> NoReturn:
    """Isolate the forked process, run its snippets, and end it."""
    code = SETUP_FAILED
    try:
        _isolate_process(spec, context, folder, descriptors)
        code = _run_snippets(spec)
        threading._shutdown()  # type: ignore[attr-defined]  # as Python does before it exits
        atexit._run_exitfuncs()
        flush_output()
    except BaseException as error:  # noqa: BLE001  the frames above belong to the zygote
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = code or EXIT_ERROR
    finally:
        try:
            flush_output()
        finally:
            os._exit(code)


def _isolate_process(spec: ChildSpec, context: ForkContext, folder: str, descriptors: list[int]) -> None:
    """Apply the isolation layers of `spec` to this process, seed its random generators and change to `folder`."""
    os.setsid()
    signal.set_wakeup_fd(-1)  # the descriptor belongs to the zygote and is closed below
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.chdir(folder)
    os.environ.update(HOME=folder, TMPDIR=folder)
    folder_descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    rules = [*context.landlock_rules, (folder_descriptor, linux.READ_WRITE)]
    has_landlock = "landlock" in spec.layers
    # Without Landlock, the descriptor of the folder takes the place of the ruleset, and is closed below.
    ruleset = linux.build_ruleset(rules, context.landlock_version) if has_landlock else folder_descriptor
    _move_to_fixed_descriptors([*descriptors, ruleset])
    linux.set_rlimits(
        {
            resource.RLIMIT_AS: context.address_space + (spec.memory_mb << 20),
            resource.RLIMIT_CPU: spec.cpu_seconds,
            resource.RLIMIT_FSIZE: FILE_BYTES,
            resource.RLIMIT_NOFILE: OPEN_FILES,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
        }
    )
    if "setuid" in spec.layers:
        _drop_root_privileges(context.library_folder)
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which clears it
    if os.getppid() != context.zygote_pid:
        os._exit(SETUP_FAILED)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    random.seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    if has_landlock:
        linux.apply_ruleset(RULESET)
    else:
        os.close(RULESET)
    if "seccomp" in spec.layers:
        linux.apply_snippet_filter(has_landlock)


def _move_to_fixed_descriptors(descriptors: list[int]) -> None:
    """Move control, stdin, stdout, stderr and the ruleset to fixed descriptor numbers. Close all other descriptors."""
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 64) for descriptor in descriptors]
    for source, target in zip(copies, (CONTROL, 0, 1, 2, RULESET), strict=True):
        os.dup2(source, target)
    os.closerange(FIRST_FREE, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _drop_root_privileges(library_folder: str) -> None:
    """Change to an unprivileged user. `library_folder`: folder of Python's standard library.

    If only root may read this folder, the process keeps the capability to read all files. Landlock then decides which
    files are readable; without Landlock, no file can be opened."""
    linux.prctl(linux.PR_SET_KEEPCAPS, 1)
    linux.drop_privileges()
    linux.set_capabilities(0 if os.access(library_folder, os.R_OK) else 1 << linux.CAP_DAC_READ_SEARCH)


def _run_snippets(spec: ChildSpec) -> int:
    """Run snippets until the control socket closes. Return the exit code of the process."""
    with socket.socket(fileno=CONTROL) as control:
        control.send(READY)
        sys.modules["__main__"] = module = ModuleType("__main__")  # dataclasses, pickle and type hints need it
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 1)
            if not message:
                return 0
            with open(descriptors[0], "rb") as file:
                source = file.read()
            code = execute_snippet(source, module.__dict__, json.loads(message)["echo"])
            if not spec.is_session:
                return code
            flush_output()
            control.send(DONE + bytes([code]))


def execute_snippet(source: bytes, namespace: dict[str, object], echo: bool) -> int:
    """Run one snippet. Return the exit code that Python would return, and print tracebacks to stderr. `echo`: whether
    to print the value of the last expression unless it is None, as the interactive interpreter does."""
    try:
        text = source.decode()
        linecache.cache[FILE_NAME] = (len(text), None, text.splitlines(keepends=True), FILE_NAME)
        tree = ast.parse(text, FILE_NAME)
        echoed = [tree.body.pop()] if echo and tree.body and isinstance(tree.body[-1], ast.Expr) else []
        programs = [compile(tree, FILE_NAME, "exec", dont_inherit=True)]
        programs += [compile(ast.Interactive([line]), FILE_NAME, "single", dont_inherit=True) for line in echoed]
        for program in programs:
            exec(program, namespace)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        print(stop.code, file=sys.stderr)
        return EXIT_ERROR
    except BaseException as error:  # noqa: BLE001  a snippet may raise anything
        return _print_exception(error)
    return 0


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _print_exception(error: BaseException) -> int:
    """Print the traceback without frames outside the snippet. Returns the exit code."""
    has_started = any(frame.f_code.co_filename == FILE_NAME for frame, _ in traceback.walk_tb(error.__traceback__))
    is_source_error = isinstance(error, SyntaxError | UnicodeError) and not has_started
    trace = error.__traceback__.tb_next if error.__traceback__ and not is_source_error else None
    code = EXIT_MEMORY if isinstance(error, MemoryError) else EXIT_ERROR
    traceback.print_exception(type(error), error, trace)
    return code
