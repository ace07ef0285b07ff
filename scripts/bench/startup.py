"""Measure the seconds from the command to the first generated tokens, and memory and processor time of each process.

    .venv/bin/python scripts/bench/startup.py

Starts main_ppo on the 3M model and waits for the first rollouts. The last line is a JSON object; `ratio` is the target
of 15 s over the median: above 1 meets the target. `until` has the times in the last round at which the plan was made,
all workers were ready, and the first weights were published and verified. `processes` has the GiB and the seconds of
processor time of each process in that round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.bench._task import SIZES, machine, make_model, make_prompts, make_reward  # noqa: E402

FOLDER = ROOT / "outputs" / "bench"
TARGET = 15.0
MARK = "ALPHAAPOLLO_BENCH"


def usage_of_run() -> dict[str, tuple[float, float]]:
    """Resident GiB and seconds of processor time of each descendant process of this script."""
    figures: dict[str, tuple[float, float]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if f"{MARK}={os.getpid()}".encode() not in (entry / "environ").read_bytes():
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
            pages = int((entry / "statm").read_text().split()[1])
            ticks = (entry / "stat").read_text().rpartition(")")[2].split()[11:13]  # user and system time
        except (OSError, IndexError):
            continue
        name = next((word for word in command if "." in word or ":" in word), command[0] if command else entry.name)
        name = name.rsplit("/", 1)[-1]
        gib, seconds = figures.get(name, (0.0, 0.0))
        gib += pages * os.sysconf("SC_PAGE_SIZE") / 2**30
        seconds += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        figures[name] = (round(gib, 3), round(seconds, 2))
    return dict(sorted(figures.items(), key=lambda item: -item[1][1]))


def milestones(run: Path, began: float) -> dict[str, float]:
    """Seconds from `began` (epoch time) until the run wrote each of its files."""
    planned = (run / "config.yaml").stat().st_mtime - began
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    return {
        "plan": round(planned, 2),
        "workers": round(planned + first["timing/start"], 2),
        "published": round((run / "metrics.jsonl").stat().st_mtime - began, 2),
    }


def start_once(model: Path, prompts: Path) -> tuple[float, dict[str, float], dict[str, tuple[float, float]]]:
    """Return the seconds to the end of the first 16 short responses, the milestones, and the processes' usage then."""
    run = FOLDER / "startup"
    shutil.rmtree(run, ignore_errors=True)
    keys = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.rollout.kv_cache_gib": 0.1,
        "custom_reward_function.path": make_reward(FOLDER),
        "data.train_files": prompts,
        "data.train_batch_size": 4,
        "data.max_prompt_length": 64,
        "data.max_response_length": 4,
        "env.rollout.n": 4,
        "trainer.output_dir": ROOT / "outputs",
        "trainer.project_name": "bench",
        "trainer.experiment_name": "startup",
        "trainer.total_training_steps": 100000,
        "trainer.save_freq": -1,
    }
    command = [sys.executable, "-m", "alphaapollo.trainer.main_ppo", *(f"{key}={value}" for key, value in keys.items())]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", MARK: str(os.getpid())}
    start, began = time.perf_counter(), time.time()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while not (run / "rollouts/step_000001.jsonl").exists():
        if process.poll() is not None:
            assert process.stderr is not None
            sys.exit(f"main_ppo failed:\n{process.stderr.read().decode()[-3000:]}")
        time.sleep(0.02)
    seconds = time.perf_counter() - start
    until = milestones(run, began)
    usage = usage_of_run()
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    return seconds, until, usage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model, prompts = FOLDER / "3M", FOLDER / "prompts.parquet"
    make_model(model, SIZES["3M"])
    make_prompts(prompts, 64)
    rounds = [start_once(model, prompts) for _ in range(args.rounds + 1)][1:]  # the first round fills the file cache
    seconds = [one for one, _, _ in rounds]
    result = {
        "benchmark": "startup",
        "ratio": round(TARGET / statistics.median(seconds), 3),
        "seconds": [round(one, 2) for one in seconds],
        "until": rounds[-1][1],
        "processes": rounds[-1][2],
        **machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
