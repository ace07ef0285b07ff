"""Import the user's Python files with estimators, losses, environments, tools or reward functions."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import os
import sys
import traceback
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from alphaapollo.utils.registry import suggest_similar
from alphaapollo.utils.seeds import derive_seed

UserObject = Any  # object of a user, a plug-in or an installed package, whose type only its caller knows
_import_lock = RLock()  # a second thread waits until the import is complete
_modules_by_folder: dict[str, dict[str, ModuleType]] = {}  # user modules whose names sys.modules has for other folders


def load_user_module(path: str, path_key: str) -> ModuleType:
    """Import the user's Python file or module `path`, e.g. `mylab.losses`, the value of configuration key `path_key`. A
    second call returns the same module.

    Decorators in the file register their functions in this process only, so each process that looks up a registered
    name must call this function. The file may import other files of its folder, also if the folder of another user file
    has files of the same name. Raises ValueError if the file does not exist, is not a Python file, or cannot be
    imported. The message has the failing line.
    """
    if module_file := find_module_file(path):
        try:
            return importlib.import_module(path)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise ValueError(
                f"{path_key}: {path} cannot be imported: {format_error(error, module_file)}. Fix the module."
            ) from error
    file = Path(path).expanduser().resolve()
    if not path or not file.is_file():
        raise ValueError(
            f"{path_key}={path}: no such file in {Path.cwd()}, and no such installed module. Set the path of a Python "
            "file, or the name of a module."
        )
    if file.suffix != ".py":
        raise ValueError(f"{path_key}={path} is not a Python file. Set a file whose name ends in .py.")
    name = f"alphaapollo_user_{file.stem}_{derive_seed(str(file)):x}"
    with _import_lock:
        if name not in sys.modules:
            _import_file(file, name, path_key, path)
        return sys.modules[name]


def find_module_file(name: str) -> Path | None:
    """Return the file of an installed module, e.g. `mylab.losses`; None for a path, and for a module without a file."""
    if name.endswith(".py") or not all(map(str.isidentifier, name.split("."))):
        return None
    try:
        spec = importlib.util.find_spec(name)  # imports the packages that contain it
    except Exception:  # noqa: BLE001  a package of another name may raise anything
        return None
    return Path(spec.origin) if spec and spec.has_location and spec.origin else None


def load_user_object(path: str, name: str, path_key: str, name_key: str) -> UserObject:
    """Return the object `name` of a user file (see load_user_module). path_key and name_key: configuration keys of the
    arguments. Raises ValueError if the file has no such object."""
    module = load_user_module(path, path_key)
    if not hasattr(module, name):
        defined = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        hint = suggest_similar(name, defined) or f" It defines {', '.join(defined) or 'nothing'}."
        raise ValueError(f"{name_key}={name}: {path} has no such object.{hint}")
    return getattr(module, name)


def format_error(error: BaseException, path: Path | None = None) -> str:
    """Format an error in one line, with the source line of the innermost traceback frame. With the user's file `path`,
    only frames in this file are considered. An unknown attribute of a dataclass lists the fields that exist."""
    kind = type(error).__name__
    if isinstance(error, SyntaxError):
        line = f": {error.text.strip()}" if error.text else ""
        return f"{kind}: {error.msg} ({error.filename}, line {error.lineno}{line})"
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if path is None or frame.filename == str(path)]
    where = f" ({own_frames[-1].filename}, line {own_frames[-1].lineno}: {own_frames[-1].line})" if own_frames else ""
    target = error.obj if isinstance(error, AttributeError) else None
    known = f". Its fields: {', '.join(field.name for field in fields(target))}" if is_dataclass(target) else ""
    return f"{kind}: {error}{where}{known}"


def _import_from_folder(folder: str, *arguments: Any, **options: Any) -> ModuleType:
    """Import like `__import__`, but prefer the modules of this user folder to equal names in other user folders."""
    if len(_modules_by_folder) == 1:
        return builtins.__import__(*arguments, **options)
    own_modules = _modules_by_folder[folder]
    with _import_lock:
        other_modules = {
            name: module
            for name, module in [*sys.modules.items()]
            if _find_user_folder(getattr(module, "__file__", None)) not in ("", folder)
            if any(Path(folder, name.partition(".")[0] + suffix).exists() for suffix in (".py", ""))
        }
        for name in other_modules:
            del sys.modules[name]
        sys.modules.update(own_modules)
        sys.path.insert(next(index for index, path in enumerate(sys.path) if path in _modules_by_folder), folder)
        try:
            return builtins.__import__(*arguments, **options)
        finally:
            sys.path.remove(folder)
            own_modules.update({name: module for name, module in sys.modules.items() if name in other_modules})
            sys.modules.update(other_modules)


def _find_user_folder(path: str | None) -> str:
    """Return the folder of a user file that contains a module's file; empty if there is none."""
    folders = [folder for folder in _modules_by_folder if path and path.startswith(folder + os.sep)]
    return max(folders, key=len, default="")


def _import_file(file: Path, module_name: str, path_key: str, path: str) -> None:
    folders = str(file.parent), str(Path.cwd())
    sys.path += [folder for folder in folders if folder not in sys.path]  # at the end: they shadow no installed module
    _modules_by_folder.setdefault(str(file.parent), {})
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import_module = partial(_import_from_folder, str(file.parent))
    vars(module)["__builtins__"] = {**vars(builtins), "__import__": import_module}
    sys.modules[module_name] = module
    # Cached bytecode of a file that is edited twice within a second is not recognized as outdated.
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        del sys.modules[module_name]
        fix = "Install the missing package" if isinstance(error, ModuleNotFoundError) else "Fix the file"
        raise ValueError(f"{path_key}: {path} cannot be imported: {format_error(error, file)}. {fix}.") from error
    finally:
        sys.dont_write_bytecode = before
