"""Measure how long a command prints nothing: the longest gaps between its writes, from its start to its end.

    python -m scripts.measure_silence -- python -m alphaapollo.trainer.main_sft --config first.yaml
    python -m scripts.measure_silence --terminal 80x24 --log live.bin -- alphaapollo rl --config first.yaml

Without --terminal, stdout and stderr are one pipe. With it, they are a pseudo-terminal of this size; --log then has the
raw bytes, which `cat` shows. The output of the command is not shown, except around its longest gaps.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from alphaapollo.observability.terminal import shorten_text

SHOWN_GAPS = 3
SHOWN_CHARS = 70


@dataclass(frozen=True)
class Write:
    """Bytes that the command wrote at once, and when, in seconds since its start."""

    seconds: float
    data: bytes


def record_writes(command: Sequence[str], terminal_size: str) -> tuple[list[Write], float, int]:
    """Run a command. Returns its writes, its duration in seconds and its exit code. terminal_size: COLUMNSxLINES; empty
    for a pipe."""
    if terminal_size:
        reader, writer = pty.openpty()
        columns, lines = map(int, terminal_size.split("x"))
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    else:
        reader, writer = os.pipe()
    start, writes = time.monotonic(), list[Write]()
    environment = os.environ | ({"TERM": "xterm-256color"} if terminal_size else {})
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, env=environment) as process:
        os.close(writer)
        while data := _read(reader):
            writes.append(Write(time.monotonic() - start, data))
        code = process.wait()
    return writes, time.monotonic() - start, code


def _read(reader: int) -> bytes:
    try:
        return os.read(reader, 65536)
    except OSError:  # the last process has closed the pseudo-terminal
        return b""


def find_gaps(writes: Sequence[Write], duration: float) -> list[tuple[float, Write, Write]]:
    """Return (seconds, write before, write after) of each gap, the longest first."""
    framed = [Write(0.0, b"(start)"), *writes, Write(duration, b"(end)")]
    gaps = [(after.seconds - before.seconds, before, after) for before, after in pairwise(framed)]
    return sorted(gaps, key=lambda gap: -gap[0])


def format_write(write: Write) -> str:
    """Return the time and the last line of a write."""
    lines = write.data.decode(errors="replace").strip().splitlines()
    return f"{write.seconds:8.2f} s  {shorten_text(lines[-1] if lines else '', SHOWN_CHARS)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and print its longest gaps. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.measure_silence", description=__doc__.splitlines()[0])
    parser.add_argument("--terminal", default="", metavar="COLUMNSxLINES", help="run in a pseudo-terminal of this size")
    parser.add_argument("--log", type=Path, help="write the command's output to this file")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    writes, duration, code = record_writes(options.command, options.terminal)
    if options.log:
        options.log.write_bytes(b"".join(write.data for write in writes))
    print(f"exit code {code} after {duration:.1f} s, {len(writes)} writes; longest gaps:")
    for seconds, before, after in find_gaps(writes, duration)[:SHOWN_GAPS]:
        print(f"{seconds:6.2f} s\n    {format_write(before)}\n    {format_write(after)}")
    if writes:
        print(f"first write:\n    {format_write(Write(writes[0].seconds, writes[0].data.splitlines()[0]))}")
    return code


if __name__ == "__main__":
    sys.exit(main())
