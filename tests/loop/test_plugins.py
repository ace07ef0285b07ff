"""A package adds a command, an engine, an environment, a reward function and sections of the configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from alphaapollo.viewer.run_folders import read_config
from tests.loop.conftest import DEADLINE, ROOT, Task
from tests.maze_lab.install import install_maze_lab

KEYS = ("env.plugins.maze.size", "reward.plugins.short_path.base", "actor_rollout_ref.rollout.plugins.walk.stride")


def alphaapollo(site: Path | None, *words: object, code: int = 0) -> str:
    """Return the output of a command, started like a user's."""
    path = os.pathsep.join(map(str, [site, ROOT] if site else [ROOT]))
    command = [sys.executable, "-m", "alphaapollo", *map(str, words)]
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    output = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == code, output[-6000:]
    return output


def test_all_parts_of_a_package(task: Task, tmp_path: Path) -> None:
    site, data = install_maze_lab(tmp_path / "site"), tmp_path / "maze.jsonl"
    rows = [{"prompt": [{"role": "user", "content": "?"}], "data_source": "short_path", "ground_truth": "9"}] * 4
    data.write_text("\n".join(map(json.dumps, rows)))
    words = [
        *(f"{key}={value}" for key, value in zip(KEYS, (7, 0.25, 3), strict=True)),
        *(f"data.train_files={data}", "data.train_batch_size=2", "data.max_prompt_length=32"),
        *("data.max_response_length=64", f"actor_rollout_ref.model.path={task.model}", "env.rollout.n=2"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=4", "algorithm=grpo", "trainer.controller=local"),
        *(f"trainer.output_dir={tmp_path / 'out'}", "trainer.total_training_steps=1", "trainer.save_freq=1"),
        *("trainer.export_hf=False", "reward.components={short_path:1}", "reward.required=[]"),
    ]
    assert "maze-baseline" in alphaapollo(site, "--help")
    explained = alphaapollo(site, "explain", *KEYS, "env.plugins.maze.sise")
    assert "default 5, Cells of the corridor" in explained and "default 1, Difference" in explained
    refused = alphaapollo(site, "maze-baseline", *words, "env.plugins.maze.sise=2", "trainer.dry_run=True", code=2)
    assert "env.plugins.maze.sise (got 2): unknown key" in refused
    alphaapollo(site, "maze-baseline", *words)

    run = tmp_path / "out/alphaapollo/default"
    metrics = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["critic/score/mean"] == 0.5  # the base, as the reward of the data source and as a component
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["env"]["plugins"] == {"maze": {"size": 7, "turns": 2, "doors": "open", "doors_seed": 0}}
    assert saved["actor_rollout_ref"]["rollout"]["plugins"] == {"walk": {"stride": 3}}
    assert read_config(run) == saved  # in this process, which cannot import the package
    changed = [*words, "env.plugins.maze.size=8", "trainer.total_training_steps=2", "trainer.dry_run=True"]
    assert "env.plugins.maze.size=7 (now 8)" in alphaapollo(site, "maze-baseline", *changed, code=2)
    missing = alphaapollo(None, "rl", *words, "env.env_name=maze", "trainer.dry_run=True", code=2)
    assert "env.plugins.maze: no installed package has the section env.maze" in missing
