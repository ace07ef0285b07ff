"""Terminal output of commands."""

from __future__ import annotations

import os
import sys
from threading import RLock
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from alphaapollo.utils.redaction import replace_control_characters


class Terminal(Console):
    """Variant of rich's Console that uses colors and live displays only if the output is a terminal.

    It ignores FORCE_COLOR, which CI services set and which would write escape codes into log files. If the reader of a
    pipe exits (`... | head`), further output is dropped, whereas rich's Console would exit the program.
    """

    def __init__(
        self, *, file: IO[str] | None = None, stderr: bool = False, force_terminal: bool | None = None, **options: Any
    ):
        stream: Any = file or (sys.stderr if stderr else sys.stdout)  # None if closed by `>&-`
        if force_terminal is None:
            force_terminal = stream is not None and stream.isatty()
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # shows characters that the encoding lacks as ?
        super().__init__(file=file, stderr=stderr, force_terminal=force_terminal, **options)
        self.num_prints, self._print_lock = 0, RLock()

    def print(self, *objects: object, **options: Any) -> None:
        """Print as rich does, without characters of models and servers that would control the terminal."""
        objects = tuple(map(_replace_control_characters, objects))
        with self._print_lock:  # rich lays out and writes separately, so output of two threads could mix
            super().print(*objects, **options)
            self.num_prints += 1

    def write(self, text: str) -> None:
        """Print plain text without markup and line wrapping."""
        self.print(text, markup=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        self.file = open(os.devnull, "w")  # noqa: SIM115


def _replace_control_characters(value: object) -> object:
    if isinstance(value, Text):
        value = value.copy()
        value.plain = replace_control_characters(value.plain)
    return replace_control_characters(value) if isinstance(value, str) else value
