"""Measure the viewer with 10,000 iterations and 1,000,000 trajectories: indexing, first page, every page, memory.

    python scripts/bench/viewer.py [--iterations 10000] [--samples 100] [--folder FOLDER]

Prints one line of JSON. Targets: 20,000 trajectories/s, first page 1 s, other pages 0.3 s (median of five, without
drawing), 500 MB. The run's files are made from one trajectory of 100 tokens; FOLDER keeps them for the next time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil

from alphaapollo.runs.rollout_log import format_trajectory_lines
from alphaapollo.runs.training_log import TrainedRow, write_trained_rows
from alphaapollo.types import (
    Completion,
    EpisodeEnd,
    Outcome,
    Prompt,
    Row,
    Score,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from alphaapollo.viewer.index import RunIndex

METRICS = 120  # per iteration
TOKENS = 100
GROUP = 10  # samples of a prompt
ITERATION, SAMPLES = "/runs/1/step/{last}?sort=variance", "/runs/1/step/{last}?view=samples&sort=advantage"
PAGES = ("/", "/runs/1", "/runs/1/health", ITERATION, SAMPLES, "/runs/1/step/{last}/1", "/compare?run=1")
SEARCH = "/runs/1/step/{last}?view=samples&sort=reward&text=answer+77"
CURVES = ("/curves?metric=timing/phase_7&run=1&smooth=0.6", "/curves?run=1&prompt=500&source=sums")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = args.folder or Path(scratch) / "outputs"
        if not (root / "run").exists():
            write_run(root / "run", args.iterations, args.samples)
        print(json.dumps(measure(root, Path(scratch), args.iterations, args.samples)))
    return 0


def write_run(folder: Path, iterations: int, samples: int) -> None:
    """Write the files of a run with this many iterations and samples per iteration."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text("actor_rollout_ref: {model: {path: m}}\n")
    line = make_line()
    row = TrainedRow(3, 0, 0, np.zeros(TOKENS, np.float32), np.ones(TOKENS, np.float32))
    with (folder / "metrics.jsonl").open("w") as metrics:
        for step in range(1, iterations + 1):
            values = {f"timing/phase_{number}": number + step / iterations for number in range(METRICS - 1)}
            metrics.write(json.dumps({"step": step, "critic/score/mean": step / iterations} | values) + "\n")
            lines = (fill_line(line, step, at) for at in range(samples))
            (folder / f"rollouts/step_{step:06d}.jsonl").write_text("".join(lines))
        write_trained_rows(folder / f"rollouts/trained_{iterations:06d}.npz", [row] * samples)


def fill_line(line: str, step: int, at: int) -> str:
    """Return the line with the identity of sample `at` of an iteration."""
    identity = f'"step": {step}, "prompt_id": {at // GROUP + step % 1000}, "sample": {at % GROUP}'
    return line.replace('"step": 0, "prompt_id": 3, "sample": 0', identity).replace("answer", f"answer {at}")


def make_line() -> str:
    completion = Completion(list(range(TOKENS)), [-0.25] * TOKENS, StopReason.STOP, 3)
    turn = Turn([1, 2], completion, "answer " + "word " * 50)
    ids, mask = list(range(TOKENS + 2)), [0, 0] + [1] * TOKENS
    row = Row(ids, mask, [-0.25 * on for on in mask], [TOKENS + 1], 0, [(3, TOKENS)])
    trajectory = Trajectory(3, 0, [turn], [row], Score(1.0, {}, Outcome.SCORED, ""), EpisodeEnd.DONE)
    chat = [{"role": "user", "content": "What is 7 + 7?"}]
    (line,) = format_trajectory_lines(0, [TrajectoryGroup(Prompt(3, "sums", chat, "14"), [trajectory])])  # type: ignore[arg-type]
    return line


def measure(root: Path, scratch: Path, iterations: int, samples: int) -> dict[str, object]:
    """Index the run, then request each page from a viewer in a process of its own."""
    index = RunIndex(root, scratch / "index.sqlite")
    started = time.perf_counter()
    with closing(index.connect()) as database:
        index.update(database)
    seconds = time.perf_counter() - started
    program = (
        "import sys; from pathlib import Path; from alphaapollo.viewer.app import make_app, make_server; "
        "from alphaapollo.viewer.index import RunIndex; "
        "make_server(make_app(RunIndex(Path(sys.argv[1]), Path(sys.argv[2])), ['*']), port=6099).run()"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(root), str(index.path)])
    try:
        pages = {page: time_page(page.format(last=iterations)) for page in (*PAGES, SEARCH, *CURVES)}
        memory = psutil.Process(process.pid).memory_info().rss / 1e6
    finally:
        process.terminate()
        process.wait(10)
    return {
        "trajectories_per_second": round(iterations * samples / seconds),
        "indexing_s": round(seconds, 1),
        "index_mb": round(index.path.stat().st_size / 1e6),
        "first_page_s": round(pages["/"][0], 3),
        "pages_ms": {page: round(median * 1000) for page, (_, median) in pages.items()},
        "memory_mb": round(memory),
        "trajectories": iterations * samples,
    }


def time_page(page: str) -> tuple[float, float]:
    """Return the seconds of the first request, and the median of five more. Waits until the viewer answers."""
    times = []
    deadline = time.monotonic() + 60
    while len(times) < 6:
        started = time.perf_counter()
        try:
            urllib.request.urlopen(f"http://127.0.0.1:6099{page}", timeout=30).read()
        except ConnectionError:
            pass
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionError) or time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            times.append(time.perf_counter() - started)
    return times[0], statistics.median(times[1:])


if __name__ == "__main__":
    raise SystemExit(main())
