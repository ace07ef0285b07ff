"""Console that commands print to."""

from __future__ import annotations

import os
import sys
from typing import IO, Any

from rich.console import Console


class Terminal(Console):
    """rich console with colors and live displays only if the output is a terminal.

    FORCE_COLOR, set by CI services, would write them into log files as well. If the reader of a pipe exits (`... |
    head`), rich would exit the program; this console drops further output.
    """

    def __init__(
        self, *, file: IO[str] | None = None, stderr: bool = False, force_terminal: bool | None = None, **options: Any
    ):
        if force_terminal is None:
            stream = file or (sys.stderr if stderr else sys.stdout)
            force_terminal = stream is not None and stream.isatty()  # None if closed by `>&-`
        super().__init__(file=file, stderr=stderr, force_terminal=force_terminal, **options)

    def write(self, text: str) -> None:
        """Print plain text: no markup, and lines are not wrapped."""
        self.print(text, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        self.write(f"note: {text}")

    def on_broken_pipe(self) -> None:
        self.file = open(os.devnull, "w")  # noqa: SIM115
