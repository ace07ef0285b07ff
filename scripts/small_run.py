"""Utilities of checks that start main_ppo like a user: the quickstart's task with its untrained model, and the metrics
of a run."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

NUM_PROMPTS = 64


def make_task(folder: Path, reward: str) -> bool:
    """Make the model, the data and a file with the reward function, unless the folder exists. Returns whether they were
    made. The data is a jsonl file, which is read without pandas and pyarrow."""
    from examples.quickstart.make_task import make_model, make_prompts, make_tokenizer
    from examples.quickstart.task import pairs

    if folder.exists():
        return False
    make_tokenizer(folder / "model")
    make_model(folder / "model", seed=0)
    rows = make_prompts(itertools.islice(pairs(random.Random(0), want_held_out=False), NUM_PROMPTS), "train")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(reward)
    return True


def run_words(task: Path, runs: Path, name: str) -> list[str]:
    """Arguments of main_ppo: train on the task, into runs/alphaapollo/NAME."""
    return [
        f"actor_rollout_ref.model.path={task / 'model'}",
        f"data.train_files={task / 'train.jsonl'}",
        f"custom_reward_function.path={task / 'reward.py'}",
        f"trainer.output_dir={runs}",
        f"trainer.experiment_name={name}",
    ]


def run_metrics(runs: Path, name: str) -> list[dict[str, float]]:
    """Metrics of the iterations so far, one dictionary per iteration, without step 0."""
    path = runs / "alphaapollo" / name / "metrics.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.is_file() else ()
    return [line for line in lines if line["step"]]
