"""What checks share that start main_ppo as a user does: the quickstart's task with its untrained model, and what a run
has measured."""

from __future__ import annotations

import json
from pathlib import Path


def make_task(folder: Path, reward: str) -> bool:
    """Model, data and a file with the reward function, unless they stand; true if they were made."""
    from examples.quickstart.make_task import make_data, make_model, make_tokenizer

    if folder.exists():
        return False
    make_tokenizer(folder / "model")
    make_model(folder / "model", seed=0)
    make_data(folder / "data", seed=0, num_sft=16, num_rl=64, num_val=8)
    (folder / "reward.py").write_text(reward)
    return True


def run_words(task: Path, runs: Path, name: str) -> list[str]:
    """main_ppo's: train on the task, into runs/alphaapollo/NAME."""
    return [
        f"actor_rollout_ref.model.path={task / 'model'}",
        f"data.train_files={task / 'data' / 'train.parquet'}",
        f"custom_reward_function.path={task / 'reward.py'}",
        f"trainer.output_dir={runs}",
        f"trainer.experiment_name={name}",
    ]


def run_metrics(runs: Path, name: str) -> list[dict[str, float]]:
    """One dictionary an iteration, so far; without step 0, which is what came before the first."""
    path = runs / "alphaapollo" / name / "metrics.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.is_file() else ()
    return [line for line in lines if line["step"]]
