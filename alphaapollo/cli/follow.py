"""Start a run as a process of this program, show what it prints, and tell of each iteration as it is written.

A process of its own, so that a notebook's event loop, its memory and its signals stay its own, and so that nothing is
left of a run in the program that asked for it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from alphaapollo.rewards.grader_processes.protocol import worker_environment

OnIteration = Callable[[int, dict[str, float]], None]
"""(iteration, its line of metrics.jsonl)"""

POLL_SECONDS = 0.2
END_SECONDS = 60.0  # for a run that is told to end; it may have a checkpoint to write
KEPT_LINES = 200  # of what it prints, for the error
REFUSED, INTERRUPTED = 2, 130


class RunFailed(RuntimeError):
    """The run began and failed; its own last words."""


def run_to_end(module: str, words: Sequence[str], folder: Path, on_iteration: OnIteration | None, show: bool) -> None:
    """Run `python -m module words` to its end.

    Raises:
        ValueError: it was refused before the start, with its own words.
        RunFailed: it failed.
        KeyboardInterrupt: Ctrl-C here or there; the run and all that it had started are told to end first, as they are
            for whatever `on_iteration` raises.
    """
    command = [sys.executable, "-m", "alphaapollo.cli.child", str(os.getpid()), module, *words]
    lines = NewLines(folder / "metrics.jsonl")
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=worker_environment() | {"PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # Ctrl-C is ours, and we hand it on
    )
    assert process.stdout is not None
    printed: deque[str] = deque(maxlen=KEPT_LINES)
    reader = threading.Thread(target=_read, args=(process.stdout, printed, show), daemon=True)
    reader.start()
    try:
        _follow(process, lines, on_iteration)
    except BaseException:
        _end(process)
        raise
    reader.join()
    if process.returncode == REFUSED:
        raise ValueError(_last_words(printed))
    if process.returncode in (INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    if process.returncode:
        raise RunFailed(_last_words(printed))


def _follow(process: subprocess.Popen[str], lines: NewLines, on_iteration: OnIteration | None) -> None:
    while True:
        try:
            ended = process.wait(POLL_SECONDS) is not None
        except subprocess.TimeoutExpired:
            ended = False
        for line in lines.read() if on_iteration else ():
            record = json.loads(line)
            on_iteration(int(record.pop("step")), record)  # type: ignore[misc]
        if ended:
            return


def _end(process: subprocess.Popen[str]) -> None:
    """As Ctrl-C would; a second one, or a run that does not listen, is killed. What it had started ends with it."""
    try:
        process.send_signal(signal.SIGINT)
        process.wait(END_SECONDS)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        process.kill()
        process.wait()


def _read(pipe: IO[str], printed: deque[str], show: bool) -> None:
    for line in pipe:
        printed.append(line.rstrip("\n"))
        if show:
            print(line, end="", flush=True)


def _last_words(printed: Sequence[str]) -> str:
    """From the last line that begins an error on."""
    texts = list(printed)
    starts = [
        index for index, text in enumerate(texts) if text.lstrip("0123456789 ").startswith(("error", "errors in"))
    ]
    return "\n".join(texts[starts[-1] :] if starts else texts[-20:]).removeprefix("error: ")


class NewLines:
    """The lines that come to a metrics.jsonl from now on; a resume may write it anew, with the lines that it keeps."""

    def __init__(self, path: Path):
        self._path, self._place = path, (0, 0)  # the file's number, and how far it is read
        self._known = set(self._fresh())

    def read(self) -> list[str]:
        return [line for line in self._fresh() if line not in self._known]

    def _fresh(self) -> list[str]:
        """Whole lines behind the place where the last call ended."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            number, start = self._place
            own = os.fstat(file.fileno())
            start = start if own.st_ino == number and own.st_size >= start else 0
            file.seek(start)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._place = own.st_ino, start + len(whole)
        return whole.decode().splitlines()
