"""The console that commands print to."""

from __future__ import annotations

import os
import sys
from typing import IO, Any

from rich.console import Console


class Terminal(Console):
    """rich's console, with colours and live displays only where the output is a terminal.

    FORCE_COLOR, which CI services set, would have rich write them into log files, too. Where the reader goes away
    (`... | head`), rich would end the program; this console drops what follows.
    """

    def __init__(
        self, *, file: IO[str] | None = None, stderr: bool = False, force_terminal: bool | None = None, **options: Any
    ):
        if force_terminal is None:
            stream = file or (sys.stderr if stderr else sys.stdout)
            force_terminal = stream is not None and stream.isatty()  # None: closed by `>&-`
        super().__init__(file=file, stderr=stderr, force_terminal=force_terminal, **options)

    def on_broken_pipe(self) -> None:
        self.file = open(os.devnull, "w")  # noqa: SIM115
