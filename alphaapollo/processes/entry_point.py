"""Decorate the `main` of a command, so that the shell and scripts can call it, with its own temporary folder.

from alphaapollo.trainer.main_ppo import main
main(["algorithm.adv_estimator=grpo", ...])  # in a script: no `if __name__ == "__main__":` is needed

<temp>/alphaapollo-tmp-x7k2q9lm/   ray/  vllm_dist_.../  alphaapollo-sandbox-.../  ...

A command removes its folder at its end. If it failed, it keeps a folder with Ray's logs, which may explain the error.
The next command removes the folders of failed and killed commands, which are not locked.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import getpass
import multiprocessing.forkserver
import multiprocessing.process
import os
import shlex
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol

from alphaapollo.processes.forked_module import stop_servers
from alphaapollo.processes.watchdog import remove_paths, treat_signals_as_ctrl_c
from alphaapollo.utils.plugins import load_plugin
from alphaapollo.utils.redaction import redact, replace_control_characters


class MainFunction(Protocol):
    """Protocol of a `main` function: takes command-line arguments (None: sys.argv) and returns an exit code."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...


def entry_point(main: MainFunction) -> MainFunction:
    """Decorate the `main` of a command. In a running event loop (a notebook), the command is refused with exit code 2.

    Processes spawned by multiprocessing import the file of `__main__` again. A script without an
    `if __name__ == "__main__"` would start its run in each of them, so `__file__` is hidden while `main` runs.
    SIGINT, SIGTERM and SIGHUP end the command with exit code 130.
    """

    @wraps(main)
    def run_command_main(argv: Sequence[str] | None = None) -> int:
        if _is_in_event_loop():
            words = shlex.join([sys.executable, "-m", main.__module__, *(argv or [])])
            print(
                "error: a run needs its own event loop, but one is already running in this process (a notebook?). "
                f"Run the command as a separate process: !{words}",
                file=sys.stderr,
            )
            return 2
        try:
            check_started_once()
            base = find_temp_base()
        except (ValueError, OSError) as error:
            hint = ". Set TMPDIR to a local folder" if isinstance(error, OSError) else ""
            print(f"error: {error}{hint}", file=sys.stderr)
            return 2
        # torch, which is not imported yet, reads this variable here and in workers. Threads that wait by spinning make
        # everything several times slower beside other processes.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ.setdefault("PYTHONSAFEPATH", "1")  # for processes that Ray and multiprocessing start
        try:
            if sys.excepthook is sys.__excepthook__:
                sys.excepthook = print_redacted_traceback
            with hide_main_script(), treat_signals_as_ctrl_c():
                return run_in_temp_folder(lambda: main(argv), base)
        except KeyboardInterrupt:  # commands with a run folder report more (launch/command.py)
            print("\ninterrupted", file=sys.stderr)
            return 130

    return run_command_main


def run_plugin_command(name: str, argv: Sequence[str] | None = None) -> int:
    """Run the subcommand `name` of a plug-in, for a module that saved commands name. Returns exit code 2 if it is
    missing."""
    try:
        command = load_plugin("commands", name)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    main: MainFunction = command.load() if hasattr(command, "load") else command
    return main(argv)


exits_at_once = False
"""Whether this process ends with os._exit, so that nothing needs to be freed before."""


def run_program(main: Callable[[], object]) -> NoReturn:
    """Call `main` as the program of this process, and exit with its code.

    The exit flushes the output and calls the functions registered with atexit, but does not free each object, which
    takes a second after torch was imported, and three seconds after vLLM.
    """
    global exits_at_once
    exits_at_once = True
    code: Any = 1  # exit code if `main` raises an exception

    def exit_at_once() -> None:
        with suppress(OSError):  # e.g. a closed pipe, which Python then reports
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else code is not None)  # as sys.exit does

    atexit.register(exit_at_once)  # called last, because `main` registers its functions later
    try:
        code = main()
    except SystemExit as stop:  # e.g. from argparse
        code = stop.code
        raise
    sys.exit(code)


@contextmanager
def hide_main_script() -> Iterator[None]:
    """Context manager in which processes spawned by multiprocessing do not import the file of `__main__` again."""
    script = sys.modules["__main__"].__dict__
    file = script.pop("__file__", None) if script.get("__spec__") is None else None  # `python -m` sets __spec__
    try:
        yield
    finally:
        if file is not None:
            script["__file__"] = file


def print_redacted_traceback(error_type: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
    """Print the traceback of an unexpected error with secrets redacted."""
    text = redact("".join(traceback.format_exception(error_type, error, tb)))
    print(replace_control_characters(text), end="", file=sys.stderr)


LAUNCHERS = {  # variable with the number of processes -> (launcher, variable with the number of this process)
    "ROLE_WORLD_SIZE": ("torchrun or accelerate", "RANK"),
    "LOCAL_SIZE": ("deepspeed", "RANK"),
    "OMPI_COMM_WORLD_SIZE": ("mpirun", "OMPI_COMM_WORLD_RANK"),
    "PMI_SIZE": ("mpirun", "PMI_RANK"),
    "SLURM_STEP_NUM_TASKS": ("srun", "SLURM_PROCID"),
}


def check_started_once() -> None:
    """Raise ValueError if a launcher started several processes of this command. All but the first exit silently.

    With RAY_ADDRESS, srun is accepted, because a Slurm step may have started Ray on each node."""
    for variable, (launcher, rank) in LAUNCHERS.items():
        count = os.environ.get(variable, "")
        if count.isdigit() and int(count) > 1 and not (launcher == "srun" and "RAY_ADDRESS" in os.environ):
            if os.environ.get(rank, "0") != "0":
                raise SystemExit(0)  # with another exit code, the launcher could kill the first process
            raise ValueError(
                f"started {count} times by {launcher} ({variable}={count}), but a run starts its own workers. Start "
                f"the command once, with trainer.n_gpus_per_node={count}. For several nodes, see docs/scaling.md."
            )


def set_user_variables() -> None:
    """Set USER if the user has no name, and HOME if the user has no home folder, e.g. in a container that runs with any
    user id, because libraries read these variables."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = str(os.getuid())
    if os.path.expanduser("~") == "~":
        os.environ["HOME"] = "/"  # as container runtimes do


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


PREFIX = "alphaapollo-tmp-"
MAX_PATH, MAX_RAY_PATH = 70, 38  # bytes of the folder's path, because the path of a socket in it has at most 107
CLEAN_EXITS = (0, 130)  # exit codes of a completed and an interrupted command


def run_in_temp_folder(command: Callable[[], int], base: Path | None = None) -> int:
    """Call the command with its own temporary folder in `base` (None: find_temp_base) and return its exit code."""
    set_user_variables()
    base = base or find_temp_base()
    if base != Path(tempfile.gettempdir()):
        print(f"note: temporary files are in {base}, because TMPDIR is too long for sockets", file=sys.stderr)
    remove_stale_folders(base)
    folder, lock = _make_locked_folder(base)
    code: int | None = None
    try:
        with _redirect_temporary_files(folder, base):
            code = command()
        return code
    finally:
        if code in CLEAN_EXITS or not (folder / "ray").exists():
            remove_paths([folder])
        os.close(lock)


def find_temp_base() -> Path:
    """Return the folder in which commands create their temporary folders: TMPDIR, or /tmp if its path is too long for
    sockets. Raises OSError if sockets cannot be created in it."""
    base = Path(tempfile.gettempdir())
    if len(os.fsencode(base)) > MAX_PATH - len(f"/{PREFIX}") - 8:  # tempfile appends 8 random characters
        base = Path("/tmp")
    with tempfile.TemporaryDirectory(dir=base) as folder, socket.socket(socket.AF_UNIX) as probe:
        probe.bind(f"{folder}/socket")
    return base


def remove_stale_folders(base: Path) -> None:
    """Remove folders in `base` that this user's earlier commands left behind."""
    for folder in base.glob(PREFIX + "[a-z0-9_]" * 8):
        with suppress(OSError):  # no folder, another user's, locked, or removed by another command
            lock = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    remove_paths([folder])
            finally:
                os.close(lock)


def _make_locked_folder(base: Path) -> tuple[Path, int]:
    """Create and lock a temporary folder in `base`. Returns the folder and the file descriptor that holds the lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        with suppress(FileNotFoundError):  # another command has removed the folder before it was locked
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            folder.chmod(0o711)  # sandboxed code may run as another user in a subfolder
            return folder, lock


@contextmanager
def _redirect_temporary_files(folder: Path, base: Path) -> Iterator[None]:
    """Context manager in which tempfile, multiprocessing, Ray and other users of TMPDIR write to the folder.

    torch's compilation cache stays in `base`, where later commands find it. Ray stays in `base`, or in /tmp, if its
    sockets' paths would be too long.
    """
    variables = {"TMPDIR": str(folder)}
    variables |= {"TORCHINDUCTOR_CACHE_DIR": str(base / f"torchinductor_{getpass.getuser()}")}
    if len(os.fsencode(folder)) > MAX_RAY_PATH:
        variables |= {"RAY_TMPDIR": str(base) if len(os.fsencode(base)) <= MAX_RAY_PATH else "/tmp"}
    variables = {name: value for name, value in variables.items() if name == "TMPDIR" or name not in os.environ}
    variables_before = {name: os.environ[name] for name in variables if name in os.environ}
    multiprocessing_config: Any = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    folders_before = tempfile.tempdir, multiprocessing_config.get("tempdir")
    os.environ.update(variables)
    tempfile.tempdir = multiprocessing_config["tempdir"] = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir, multiprocessing_config["tempdir"] = folders_before
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(variables_before)
        server: Any = multiprocessing.forkserver._forkserver
        server._stop()  # its environment has this command's TMPDIR
        stop_servers(str(folder))
