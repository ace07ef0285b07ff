"""A user's own estimators and losses (`algorithm.custom_module=path.py`), and environments (`env.custom_module`)."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from alphaapollo.seeds import derive_seed


def load_custom_module(path: str, key: str = "algorithm.custom_module") -> ModuleType:
    """Import a Python file, so that its decorators register what it defines. The second call for a file is free.

    Call it in every process that looks a name up. Raises ValueError where the file is missing, is not Python, or
    fails while it is imported.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file() or file.suffix != ".py":
        raise ValueError(f"{key}={path!r} is not a Python file; give the path of a .py file.")
    name = f"alphaapollo_custom_{file.stem}_{derive_seed(str(file)):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything
        del sys.modules[name]
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{key}={path!r} fails while imported: {what}{_line(error, str(file))}") from error
    return module


def _line(error: Exception, file: str) -> str:
    """The line of the file in which it happened; a SyntaxError says it itself."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({file}, line {lines[-1].lineno}: {lines[-1].line})" if lines else ""
