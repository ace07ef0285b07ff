"""Complete runs, started like a user's: the quickstart's task and untrained model, a few small steps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from scripts.checks import ROOT, last_line
from scripts.gpu_check.kit import Kit, need
from scripts.small_run import make_task, run_metrics, run_words

REWARD = "def compute_score(prompt, completion):\n    return sum(map(str.isdigit, completion)) / 10\n"
REQUIRED = ("hydra", "omegaconf", "pydantic", "rich", "yaml", "psutil", "msgspec", "jsonschema", "aiohttp", "filelock")
SMALL = [
    "algorithm.adv_estimator=grpo",
    "env.rollout.n=4",
    "data.train_batch_size=8",
    "data.max_prompt_length=64",
    "data.max_response_length=32",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.optim.lr=1e-4",
    "actor_rollout_ref.rollout.max_num_seqs=32",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.2",
    "trainer.test_freq=-1",
    "trainer.export_hf=false",
]


def train(kit: Kit, name: str, *words: str, defaults: Sequence[str] = SMALL) -> list[dict[str, float]]:
    """Metrics, one dictionary per iteration. Raises RuntimeError with the last output of a failed run."""
    need(*REQUIRED)
    task, runs = kit.folder / "task", kit.folder / "runs"
    make_task(task, REWARD)
    command = [
        *(sys.executable, "-m", "scripts.gpu_check.older_torch", "alphaapollo.trainer.main_ppo", *defaults),
        *(*run_words(task, runs, name), *words),
        f"trainer.device={kit.device}",
    ]
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=kit.folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n")
        said = last_line(done.stdout + done.stderr) or "it said nothing"
        raise RuntimeError(f"{name} ended with {done.returncode}: {said}")
    return run_metrics(runs, name)
