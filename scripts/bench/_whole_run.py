"""Complete runs of main_ppo with Ray, FSDP2 and vLLM, measured by the metrics of the run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def train(keys: Mapping[str, object], environment: Mapping[str, str], *overrides: str) -> list[dict[str, float]]:
    """Run main_ppo with these keys and return its lines of metrics. Exits if the run fails."""
    folder = Path(*(str(keys[f"trainer.{part}"]) for part in ("output_dir", "project_name", "experiment_name")))
    words = [*(f"{key}={value}" for key, value in keys.items()), *overrides]
    done = subprocess.run(
        [sys.executable, "-m", "alphaapollo.trainer.main_ppo", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{folder.name} exited with status {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
