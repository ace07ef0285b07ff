"""Measure the start of a GRPO command until its first published weights, of this checkout and of another one in turn.

    .venv/bin/python scripts/bench/start.py --model DIR
    .venv/bin/python scripts/bench/start.py --model DIR --other ../older_checkout --rounds 3 trainer.controller=local

Seconds end at the line `step 0/1`. Seconds of processor time, which other jobs disturb less, are those of all processes
until then. The last line is a JSON object with the medians; `ratio` is the other checkout's seconds over ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from scripts.bench._task import machine, make_prompts, make_reward  # noqa: E402

FOLDER = ROOT / "outputs" / "bench"
READY = "step 0/1"
POLL_SECONDS = 0.1
DEADLINE = 600.0  # seconds


def measure_start(checkout: Path, words: list[str]) -> tuple[float, float]:
    """Start a run, wait for READY and stop it. Returns seconds, and seconds of processor time."""
    output = FOLDER / "start.txt"
    spent: dict[int, float] = {}
    with output.open("w") as file:
        start = time.monotonic()
        command = [str(checkout / ".venv/bin/python"), "-m", "alphaapollo.trainer.main_ppo", *words]
        run = psutil.Popen(command, cwd=checkout, stdout=file, stderr=subprocess.STDOUT)
    while READY not in output.read_text():
        if run.poll() is not None or time.monotonic() - start > DEADLINE:
            run.kill()
            raise SystemExit(f"the run ended or did not start:\n{output.read_text()[-4000:]}")
        for process in (run, *run.children(recursive=True)):
            with suppress(psutil.Error):
                times = process.cpu_times()
                spent[process.pid] = times.user + times.system
        time.sleep(POLL_SECONDS)
    seconds = time.monotonic() - start
    run.terminate()
    run.wait()
    return seconds, sum(spent.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--other", type=Path, help="another checkout, with its own .venv")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("keys", nargs="*", help="keys of the run, e.g. trainer.controller=local")
    arguments = parser.parse_args()
    questions = FOLDER / "start.parquet"
    make_prompts(questions, count=16)
    keys = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": Path(arguments.model).resolve(),
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.rollout.kv_cache_gib": 0.25,
        "custom_reward_function.path": make_reward(FOLDER),
        "data.train_files": questions,
        "data.train_batch_size": 2,
        "data.max_response_length": 8,
        "env.rollout.n": 4,
        "trainer.total_training_steps": 1,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.output_dir": FOLDER,
        "trainer.experiment_name": "start",
        "trainer.resume_mode": "disable",
    }
    words = [*(f"{key}={value}" for key, value in keys.items()), *arguments.keys]
    checkouts = {"ours": ROOT} | ({"other": arguments.other.resolve()} if arguments.other else {})
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in checkouts}
    for number in range(arguments.rounds):
        for name, checkout in checkouts.items():
            measured[name].append(measure_start(checkout, words))
            seconds, processor = measured[name][-1]
            print(f"round {number + 1}, {name}: {seconds:.1f} s, {processor:.1f} s of processor time", flush=True)
    medians = {
        name: [statistics.median(values) for values in zip(*rows, strict=True)] for name, rows in measured.items()
    }
    result = machine()
    for name, (seconds, processor) in medians.items():
        result |= {f"{name}_seconds": round(seconds, 2), f"{name}_processor_seconds": round(processor, 2)}
    if "other" in medians:
        (ours, our_processor), (other, other_processor) = medians["ours"], medians["other"]
        result |= {"ratio": round(other / ours, 3), "processor_ratio": round(other_processor / our_processor, 3)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
