"""A package adds a command, an engine, an environment, a reward function and sections of the configuration.

tests/unit/config/test_plugins.py shows what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import yaml

from alphaapollo.runs.resume import read_saved_config
from tests.loop.conftest import ROOT, Task
from tests.maze_lab.install import install_maze_lab
from tests.processes import run_python


def test_all_parts_of_a_package(task: Task, tmp_path: Path) -> None:
    site, data = install_maze_lab(tmp_path / "site"), tmp_path / "maze.jsonl"
    rows = [{"prompt": [{"role": "user", "content": "?"}], "data_source": "short_path", "ground_truth": "9"}] * 4
    data.write_text("\n".join(map(json.dumps, rows)))
    words = [
        *("env.plugins.maze.size=7", "reward.plugins.short_path.base=0.25"),
        *("actor_rollout_ref.rollout.plugins.walk.stride=3", f"actor_rollout_ref.model.path={task.model}"),
        *(f"data.train_files={data}", "data.train_batch_size=2", "data.max_prompt_length=32"),
        *("data.max_response_length=64", "env.rollout.n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
        *("algorithm=grpo", "trainer.controller=local", f"trainer.output_dir={tmp_path / 'out'}"),
        *(
            "trainer.total_training_steps=1",
            "trainer.save_freq=1",
            "trainer.export_hf=False",
            "trainer.logger=[maze-scores]",
        ),
        *("reward.components={short_path:1}", "reward.required=[]"),
    ]
    path = os.pathsep.join([str(site), str(ROOT)])
    done = run_python("-m", "alphaapollo", "maze-baseline", *words, PYTHONPATH=path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]

    run = tmp_path / "out/alphaapollo/default"
    assert (run / "maze.csv").read_text() == "0,None\n1,0.5\n"  # a validation, then the iteration
    metrics = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["critic/score/mean"] == 0.5  # the base, as the reward of the data source and as a component
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["env"]["plugins"] == {"maze": {"size": 7, "turns": 2, "doors": "open", "doors_seed": 0}}
    assert saved["actor_rollout_ref"]["rollout"]["plugins"] == {"walk": {"stride": 3}}
    assert read_saved_config(run) == saved  # in this process, which cannot import the package
