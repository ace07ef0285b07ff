"""Measure how long training waits for a checkpoint: written in the foreground, or in the background from a copy.

    .venv/bin/python scripts/bench/checkpoint.py --size 100M

One policy worker in one process saves and updates, alternating both ways. In the background case it then waits for the
rest of the write, as the next save would. The last line is a JSON object with medians of the rounds: `ratio` is the
wait in the foreground over that in the background, `step_ratio` the same of a save and an update together.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from alphaapollo.batching.batch import Columns  # noqa: E402
from alphaapollo.models.checkpoint import CheckpointWriter  # noqa: E402
from alphaapollo.runs.checkpoint_folder import CheckpointFolder, write_progress  # noqa: E402
from alphaapollo.workers.policy import PolicyWorker  # noqa: E402
from scripts.bench._task import SIZES, machine, make_model  # noqa: E402
from scripts.bench.update import FOLDER, make_batch, make_worker  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="100M")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    model = FOLDER / args.size
    parameters = make_model(model, SIZES[args.size])
    args.max_tokens, args.micro_batch_tokens, args.plain = 64, 4096, False
    batch, columns = make_batch(args, SIZES[args.size].vocab_size)
    torch.set_num_threads(args.threads)
    worker = make_worker(model, args.threads)
    worker.load_batch(batch)
    worker.update(columns)
    writers = {"foreground": CheckpointWriter(in_background=False), "background": CheckpointWriter(in_background=True)}
    seconds: dict[str, list[float]] = defaultdict(list)
    for number in range(args.rounds + 1):
        for side, worker.writer in writers.items():
            for name, value in save_and_update(worker, columns, side).items():
                if number:  # the first round warms up
                    seconds[f"{side}_{name}"].append(value)
    worker.close()
    median = {name: statistics.median(values) for name, values in seconds.items()}
    result = {
        "benchmark": "checkpoint",
        "size": args.size,
        "parameters": parameters,
        "ratio": round(median["foreground_waited"] / median["background_waited"], 3),
        "step_ratio": round(median["foreground_step"] / median["background_step"], 3),
        "seconds": {name: round(value, 3) for name, value in median.items()},
        **machine(),
    }
    print(json.dumps(result))


def save_and_update(worker: PolicyWorker, columns: Columns, side: str) -> dict[str, float]:
    """Return seconds of the save, of the update, of the total wait for the checkpoint, and of the whole."""
    shutil.rmtree(FOLDER / "checkpoints", ignore_errors=True)
    checkpoints = CheckpointFolder(FOLDER / "checkpoints", keep=1)
    started = time.perf_counter()
    folder = checkpoints.begin_checkpoint(1)
    worker.save(str(folder / "policy"))
    if side == "foreground":
        write_progress(folder, {})
        checkpoints.complete_checkpoint(folder)
    saved = time.perf_counter()
    worker.update(columns)
    updated = time.perf_counter()
    writing = worker.get_save_future().result()
    if side == "background":
        write_progress(folder, {})
        checkpoints.complete_checkpoint(folder)
    ended = time.perf_counter()
    rest = ended - updated
    return {
        "save": saved - started,
        "update": updated - saved,
        "writing": writing,
        "waited": saved - started + rest,
        "step": ended - started,
    }


if __name__ == "__main__":
    main()
