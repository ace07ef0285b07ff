"""Run a command for the Python API as a child process, which does not interfere with a notebook.

    rl(reward=f, tools=[g])  ->  .<experiment>.objects: reward.py and objects.py, each with a pickle
                             ->  overrides that set custom_reward_function.path, env.custom_module, ... to these files

Grader processes, Ray workers and a resumed run load the files like any user module. Code of the user is pickled by
value, so functions from a notebook, a script or a neighboring module need not be importable in these processes.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import pkgutil
import signal
import subprocess
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

from alphaapollo.config.keys import format_override
from alphaapollo.processes.entry_point import run_program
from alphaapollo.processes.python_command import make_module_command, make_subprocess_environ
from alphaapollo.processes.watchdog import exit_when_process_ends, treat_signals_as_ctrl_c

if TYPE_CHECKING:
    from alphaapollo.algorithms.advantages import Estimator
    from alphaapollo.evolving.roles import Role

Registration = tuple[str, str, Mapping[str, Any], object]
"""Function in alphaapollo that makes a decorator, its arguments, and the object that the decorator registers."""
OnIteration = Callable[[int, dict[str, float]], None]
"""Callback that receives the step and the metrics of an iteration."""

POLL_SECONDS = 0.2
END_SECONDS = 60.0  # timeout of an interrupted run, which may write a checkpoint
KEPT_LINES = 200  # number of newest output lines to keep for the error message
REFUSED, INTERRUPTED = 2, 130
LOADER = '''"""Written by the Python API: objects of the call."""

from alphaapollo.cli.run_process import load_objects

compute_score = run = load_objects(__file__)
'''


class RunFailed(RuntimeError):
    """A run failed after its start. The message is the end of the run's output."""


def run_in_child_process(
    module: str, arguments: Sequence[str], run_folder: Path, on_iteration: OnIteration | None, show: bool
) -> None:
    """Run `python -m module arguments` in a child process and wait for its end; `show` prints its output.

    Raises:
        ValueError: The configuration or the data is invalid; the run did not start. The message is the run's error.
        RunFailed: The run failed.
        KeyboardInterrupt: Ctrl-C in this process or in the run. The run is stopped first, as after an exception in
            `on_iteration`.
    """
    read_new_metrics = make_metrics_reader(run_folder / "metrics.jsonl")
    process = subprocess.Popen(
        make_module_command("alphaapollo.cli.run_process", os.getpid(), module, *arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=make_subprocess_environ() | {"PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # this process receives Ctrl-C and forwards it
    )
    output: deque[str] = deque(maxlen=KEPT_LINES)
    reader = threading.Thread(target=_read_output, args=(process.stdout, output, show), daemon=True)
    reader.start()
    try:
        has_ended = False
        while not has_ended:
            with suppress(subprocess.TimeoutExpired):
                has_ended = process.wait(POLL_SECONDS) is not None
            for metrics in read_new_metrics() if on_iteration else ():
                on_iteration(int(metrics.pop("step")), metrics)  # type: ignore[misc]
    except BaseException:
        with suppress(KeyboardInterrupt, subprocess.TimeoutExpired):  # a second Ctrl-C kills the run
            process.send_signal(signal.SIGINT)
            process.wait(END_SECONDS)
        process.kill()  # its child processes end with it
        process.wait()
        raise
    reader.join()
    if process.returncode in (INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    if process.returncode:
        starts = [i for i, line in enumerate(output) if line.lstrip("0123456789 ").startswith("error")]
        error = "\n".join([*output][starts[-1] if starts else -20 :]).removeprefix("error: ")
        raise ValueError(error) if process.returncode == REFUSED else RunFailed(error)


def _read_output(pipe: IO[str], kept_lines: deque[str], show: bool) -> None:
    for line in pipe:
        kept_lines.append(line.rstrip("\n"))
        if show:
            print(line, end="", flush=True)


def make_metrics_reader(path: Path) -> Callable[[], list[dict[str, float]]]:
    """Return a function that reads the records that were added to a metrics.jsonl since its last call. A resume may
    replace the file by one with fewer lines."""
    known, inode, position = set[bytes](), 0, 0

    def read_new_metrics() -> list[dict[str, float]]:
        nonlocal inode, position
        if not path.is_file():
            return []
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != inode or status.st_size < position:
                inode, position = status.st_ino, 0
            file.seek(position)
            lines = [line for line in file if line.endswith(b"\n")]
        position += sum(map(len, lines))
        new = [line for line in lines if line not in known]
        known.update(new)
        return [json.loads(line) for line in new]

    read_new_metrics()
    return read_new_metrics


def write_objects(
    folder: Path,
    reward: Callable[..., object] | None = None,
    environment: type | None = None,
    tools: Sequence[Callable[..., object]] = (),
    estimator: Callable[..., object] | Estimator | None = None,
    roles: Mapping[str, type[Role]] | None = None,
    agent: Callable[..., object] | None = None,
) -> list[str]:
    """Pickle the objects of an API call (`rl`, `evolve`) into files. Returns overrides that load them, e.g.
    `env.custom_module=.../objects.py`. Raises ValueError if an object cannot be pickled."""
    values, registrations, path = dict[str, object](), list[Registration](), str(folder / "objects.py")
    if reward:  # graders load only this file
        values["custom_reward_function.path"] = _write_pickle(folder / "reward.py", reward, [reward])
        values["custom_reward_function.name"] = "compute_score"
    if agent:
        values |= {"env.env_name": "agent", "env.agent.path": _write_pickle(folder / "agent.py", agent, [agent])}
        values |= {"env.agent.grade": True} if reward else {}
    if environment:
        graded = {"graded": bool(reward)}
        registrations.append(("environments.base:register_environment", environment.__name__, graded, environment))
        values |= {"env.custom_module": path, "env.env_name": environment.__name__}
    if tools:
        registrations += [
            ("cli.run_process:find_tool_decorator", function.__name__, {}, function) for function in tools
        ]
        values |= {"env.custom_module": path, "env.tools": [function.__name__ for function in tools]}
    if estimator:
        plain = {"name": getattr(estimator, "__name__", ""), "fn": estimator}
        fields: dict[str, Any] = dict(vars(estimator)) if hasattr(estimator, "fn") else plain
        name, function = fields.pop("name"), fields.pop("fn")
        registrations.append(("algorithms.advantages:register_estimator", name, fields, function))
        values |= {"algorithm.custom_module": path, "algorithm.adv_estimator": name}
    if roles:
        classes = dict.fromkeys(roles.values())
        registrations += [("evolving.roles:register_role", role.__name__, {}, role) for role in classes]
        values |= {f"roles.{slot}.plugin": role.__name__ for slot, role in roles.items()}
        values["evolving.custom_module"] = path
    if registrations:
        _write_pickle(Path(path), registrations, [value for *_, value in registrations])
    return [format_override(key, value) for key, value in values.items()]


def _write_pickle(loader_file: Path, content: object, objects: Sequence[object]) -> str:
    """Write `loader_file`, which loads the pickled content; return its path. User modules of `objects` are included."""
    pickled = pickle_by_value(loader_file.stem, content, objects)
    loader_file.parent.mkdir(parents=True, exist_ok=True)
    loader_file.with_suffix(".pkl").write_bytes(pickled)
    loader_file.write_text(LOADER, encoding="utf-8")
    return str(loader_file)


def pickle_by_value(name: str, content: object, objects: Sequence[object]) -> bytes:
    """Pickle objects with the user's code that they need, so that other processes need not import it. name: of the
    objects in the ValueError for those that cannot be pickled."""
    import cloudpickle  # type: ignore[import-untyped]

    modules = {sys.modules.get(getattr(one, "__module__", "")) for one in objects}
    user_modules = [module for module in modules if module and is_user_module(module)]
    for module in user_modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled: bytes = cloudpickle.dumps(content)
        return pickled
    except (TypeError, pickle.PicklingError, RecursionError, AttributeError) as error:
        raise ValueError(
            f"the {name} passed to the Python API must be picklable, because the run's other processes use "
            f"it ({error}). Create locks, connections and file objects inside the function."
        ) from error
    finally:
        for module in user_modules:
            cloudpickle.unregister_pickle_by_value(module)


def is_user_module(module: ModuleType) -> bool:
    """Return whether a module is code of the user, neither of the standard library nor of an installed package."""
    file = getattr(module, "__file__", None) or ""
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return (
        bool(file) and not file.startswith(installed) and not module.__name__.startswith(("alphaapollo.", "__main__"))
    )


def load_objects(loader_file: str) -> Any:
    """Load the objects of an API call in a process of the run: return the reward function or agent, register others."""
    content = pickle.loads(Path(loader_file).with_suffix(".pkl").read_bytes())
    for register, name, options, value in content if isinstance(content, list) else ():
        pkgutil.resolve_name(f"alphaapollo.{register}")(name, **options)(value)
    return content


def find_tool_decorator(name: str) -> Callable[..., object]:
    """Return the decorator that registers a tool; one without effect if the tool's module has registered it."""
    from alphaapollo.tools.base import tools
    from alphaapollo.tools.function_tool import tool

    return repr if name in tools else tool


if __name__ == "__main__":  # the run's process: PARENT_PID MODULE WORD...
    exit_when_process_ends(int(sys.argv[1]))  # ends the run if the parent, e.g. a notebook kernel, is killed
    with treat_signals_as_ctrl_c():
        run_program(lambda: importlib.import_module(sys.argv[2]).main(sys.argv[3:]))
