"""Measure the throughput and latency of the warm sandbox.

    .venv/bin/python scripts/bench/sandbox.py [--without bubblewrap] [--runs 400]

The last line is a JSON object: runs/s with 1, 2 and 8 concurrent runs, median milliseconds of a single run, the mode.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from alphaapollo.tools.sandbox import Sandbox, SandboxStatus
from alphaapollo.tools.sandbox.sandbox import OPTIONAL_LAYERS

SNIPPETS = {
    "print": "print(6 * 7)",
    "integrate": "from sympy import *\nx = Symbol('x')\nprint(integrate(exp(-x) * sin(x) * x, x))",
}


def seconds_of(sandbox: Sandbox, code: str) -> float:
    start = time.perf_counter()
    result = sandbox.run(code)
    assert result.status is SandboxStatus.OK, result
    return time.perf_counter() - start


def runs_per_second(sandbox: Sandbox, code: str, at_a_time: int, runs: int) -> float:
    with ThreadPoolExecutor(at_a_time) as threads:
        start = time.perf_counter()
        list(threads.map(lambda _: seconds_of(sandbox, code), range(runs)))
        return runs / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without", action="append", default=[], choices=OPTIONAL_LAYERS)
    parser.add_argument("--runs", type=int, default=400)
    options = parser.parse_args()
    start = time.perf_counter()
    with Sandbox(options.without, max_concurrent=8) as sandbox:
        figures: dict[str, object] = {"mode": sandbox.mode, "start_s": round(time.perf_counter() - start, 2)}
        for name, code in SNIPPETS.items():
            runs = options.runs if name == "print" else options.runs // 10
            figures[f"{name}_p50_ms"] = round(
                1000 * statistics.median(seconds_of(sandbox, code) for _ in range(runs)), 1
            )
            for at_a_time in (1, 2, 8):
                figures[f"{name}_per_s_at_{at_a_time}"] = round(runs_per_second(sandbox, code, at_a_time, runs), 1)
            print(name, figures, flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
