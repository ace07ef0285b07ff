"""Measure the viewer with many trajectories: time to read them, and to answer its pages.

    python -m scripts.bench.viewer                         # 1,000 iterations of 1,000 trajectories, temporary
    python -m scripts.bench.viewer --iterations 100 --folder /data/many

Pages are measured through the application, without a network: medians and the longest of 5 calls.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from statistics import median

from starlette.testclient import TestClient

from alphaapollo.plugins.viewer.app import make_app
from alphaapollo.plugins.viewer.index import RunIndex
from alphaapollo.runs.metrics_file import JsonlTracker

SAMPLES, NUM_CALLS = 8, 5
RARE = "zanzibar"  # in the answer of one trajectory
PAGES = {
    "list of runs": "/",
    "overview": "/runs/1",
    "groups of an iteration": "/runs/1/step/{step}",
    "samples of an iteration": "/runs/1/step/{step}?view=samples",
    "a sample": "/runs/1/step/{step}/5",
    "conversation of a row": "/runs/1/step/{step}/5/conversation",
    "configuration": "/runs/1/config",
    "health": "/runs/1/health",
    "samples of all iterations": "/runs/1/samples",
    "curve with intervals": "/curves?run=1&metric=critic/score/mean",
    "histogram": "/curves?run=1&histogram=tokens&kind=step",
    "search: a word in every answer": "/runs/1/samples?text=answer",
    "search: a word in one answer": f"/runs/1/samples?text={RARE}",
    "search: no such word": "/runs/1/samples?text=nowhere+to+be+found",
    "search: reward above 0.995": "/runs/1/samples?where=reward&is=at+least&number=0.995",
    "search: a word, sorted by reward": "/runs/1/samples?text=sum&sort=reward&down=1",
}


def write_run(folder: Path, iterations: int, trajectories: int) -> None:
    """Write a run with short chats: prompts of 40 words, answers of 60, 120 tokens."""
    chosen = random.Random(0)
    words = [f"word{number}" for number in range(3000)] + ["sum", "of", "the"] * 50
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text("actor_rollout_ref: {model: {path: model}}\n")
    tracker = JsonlTracker(folder / "metrics.jsonl", 0)
    bodies = [make_line(chosen, words) for _ in range(500)]

    def make_lines(step: int) -> Iterator[str]:
        for line in range(trajectories):
            record = f'{{"prompt_id": {line // SAMPLES}, "sample": {line % SAMPLES}, "reward": {chosen.random():.4f}, '
            word = f"{RARE} " if (step, line) == (iterations // 3, 7) else ""
            yield record + chosen.choice(bodies).replace("Answer", f"Answer {step} {word}", 1)

    for step in range(1, iterations + 1):
        (folder / f"rollouts/step_{step:06d}.jsonl").write_text("\n".join(make_lines(step)) + "\n")
        tracker.log(step, {"critic/score/mean": chosen.random(), "timing/step": 30.0, "actor/entropy": chosen.random()})
    tracker.close()


def make_line(chosen: random.Random, words: list[str]) -> str:
    """The fields of a trajectory that follow its reward."""
    text = f"<think>{' '.join(chosen.choices(words, k=50))}</think> Answer {' '.join(chosen.choices(words, k=10))}"
    ids = [chosen.randrange(50_000) for _ in range(120)]
    turn = {"text": text, "observation": None, "num_tokens": chosen.randrange(20, 120), "stop_reason": "stop"}
    turn |= {"weight_version": 1, "reward": 0.0, "valid": True, "info": {}}
    row = {"ids": ids, "mask": [0] * 60 + [1] * 60, "logprobs": [-0.12345] * 120, "first_turn": 0}
    record = {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": " ".join(chosen.choices(words, k=40))}],
        "ground_truth": "14",
        "text": text,
        "components": {"accuracy": 1.0},
        "outcome": "scored",
        "reason": "",
        "end": "done",
        "stop_reason": "stop",
        "weight_version": 1,
        "seconds": 1.0,
        "turns": [turn],
        "rows": [row | {"weight_versions": [[1, 60]]}],
    }
    return json.dumps(record)[1:]


def measure(folder: Path, step: int) -> None:
    """Read the runs of a folder, and print the times of all pages as rows of a table."""
    with tempfile.TemporaryDirectory() as temporary:
        index, start = RunIndex(folder, Path(temporary, "index.sqlite")), time.process_time()
        with closing(index.connect()) as database:
            index.update(database)
            (count,) = database.execute("SELECT count(*) FROM trajectories").fetchone()
        sizes = ", ".join(f"{one.name} {one.stat().st_size / 1e6:,.0f} MB" for one in Path(temporary).iterdir())
        print(f"{count:,} trajectories: read in {time.process_time() - start:.1f} CPU seconds ({sizes})\n")
        print("| page | CPU, ms | wall, ms | longest, ms | KB |\n|---|---|---|---|---|", flush=True)
        client = TestClient(make_app(index, ["testserver"]))  # without its thread
        for name, address in PAGES.items():
            times, cpu = [], []
            for _ in range(NUM_CALLS):
                start, cpu_start = time.perf_counter(), time.process_time()
                response = client.get(address.format(step=step))
                times.append(1000 * (time.perf_counter() - start))
                cpu.append(1000 * (time.process_time() - cpu_start))
                assert response.status_code == 200, response.text
            size = len(response.content) / 1000
            print(f"| {name} | {median(cpu):.0f} | {median(times):.0f} | {max(times):.0f} | {size:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--trajectories", type=int, default=1000, help="per iteration")
    parser.add_argument("--folder", type=Path, help="keep the run in this folder, or use the one that is in it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "run").exists():
            write_run(folder / "run", options.iterations, options.trajectories)
        measure(folder, options.iterations // 2)


if __name__ == "__main__":
    main()
