"""Import user files: estimators and losses, environments, tools, reward functions, components."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from alphaapollo.utils.registry import suggest_similar
from alphaapollo.utils.seeds import derive_seed

_importing = RLock()  # a second thread waits until the module is complete


def load_user_module(path: str, key: str) -> ModuleType:
    """Import the Python file that the configuration names under `key`. A second call returns the same module.

    Decorators of the file register their functions in this process only, so call this in each process that looks up a
    name. The file may import other files of its folder. No bytecode is cached.

    Raises:
        ValueError: the file does not exist, is not a Python file, or its import failed (with the line).
    """
    file = Path(path).expanduser().resolve()
    if not path or not file.is_file():
        raise ValueError(f"{key}: no such file: {path} (looked in {Path.cwd()}). Give the path of a Python file.")
    if file.suffix != ".py":
        raise ValueError(f"{key}: {path} is not a Python file. Its name must end in .py.")
    name = f"alphaapollo_user_{file.stem}_{derive_seed(str(file)):x}"
    with _importing:
        if name not in sys.modules:
            _import_file(file, name, key, path)
        return sys.modules[name]


def load_user_object(path: str, name: str, key: str, name_key: str) -> Any:
    """Return the object `name` (the value of `name_key`) of the file that `key` names.

    Raises:
        ValueError: as load_user_module, or the object does not exist (lists the functions and classes that do).
    """
    module = load_user_module(path, key)
    if not hasattr(module, name):
        defined = [
            one
            for one, value in vars(module).items()
            if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__
        ]
        hint = suggest_similar(name, defined)
        raise ValueError(
            f"{name_key}: {path} has no {name!r}.{hint} It defines {', '.join(defined) or 'nothing'}. Set {name_key}."
        )
    return getattr(module, name)


def format_error(error: BaseException, path: Path | None = None) -> str:
    """Format an error in one line, with its last position in the file `path`, or else in any file."""
    kind = type(error).__name__
    if isinstance(error, SyntaxError):
        line = f": {error.text.strip()}" if error.text else ""
        return f"{kind}: {error.msg} ({error.filename}, line {error.lineno}{line})"
    frames = traceback.extract_tb(error.__traceback__)
    frame = ([frame for frame in frames if frame.filename == str(path)] or frames)[-1]
    return f"{kind}: {error} ({frame.filename}, line {frame.lineno}: {frame.line})"


def _import_file(file: Path, name: str, key: str, path: str) -> None:
    sys.path += [
        folder for folder in (str(file.parent), str(Path.cwd())) if folder not in sys.path
    ]  # appended: shadows nothing
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # Cached bytecode of a file that is edited twice within a second is not recognized as outdated.
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        del sys.modules[name]
        fix = "Install what it imports" if isinstance(error, ImportError) else "Fix the file"
        raise ValueError(f"{key}: {path} does not import: {format_error(error, file)}. {fix}.") from error
    finally:
        sys.dont_write_bytecode = before
