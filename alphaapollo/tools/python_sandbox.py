"""Command that runs Python files in the sandbox, with the limits of the tool python_code.

    python -m alphaapollo.tools.python_sandbox FILE...          prints one JSON object per file
    echo 'print(6 * 7)' | python -m alphaapollo.tools.python_sandbox -

Each object has status (ok, error, timeout, memory, output, refused), stdout, stderr, seconds, mode (the isolation
layers in use), reason and file. The exit code is 2 if a file could not be run, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

from alphaapollo.tools.sandbox import (
    OPTIONAL_LAYERS,
    UNSAFE_VARIABLE,
    Sandbox,
    SandboxError,
    SandboxResult,
    SandboxStatus,
    SandboxUnavailableError,
)

FIELDS = ("status", "stdout", "stderr", "seconds", "mode", "reason")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE", help="Python files; - reads stdin")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds per file (default 10)")
    parser.add_argument("--memory-mb", type=int, default=1024, help="MiB per file (default 1024)")
    parser.add_argument("--without", action="append", default=[], choices=OPTIONAL_LAYERS, help="layer to disable")
    parser.add_argument("--unsafe", action="store_true", help="run even without a seccomp filter")
    options = parser.parse_args()
    all_run = True
    with contextlib.closing(Sandbox(options.without, options.unsafe or os.environ.get(UNSAFE_VARIABLE) == "1")) as box:
        for name in options.files:
            try:
                code = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8-sig")
                result = box.run(code, timeout=options.timeout, memory_mb=options.memory_mb, echo=True)
            except (OSError, UnicodeError, SandboxError, SandboxUnavailableError) as error:
                result = SandboxResult(SandboxStatus.REFUSED, "", str(error), 0.0, "none", f"not run: {error}")
            shown = {field: getattr(result, field) for field in FIELDS}
            print(json.dumps({**shown, "seconds": round(result.seconds, 4), "file": name}), flush=True)
            all_run &= result.status is not SandboxStatus.REFUSED
    return 0 if all_run else 2


if __name__ == "__main__":
    sys.exit(main())
