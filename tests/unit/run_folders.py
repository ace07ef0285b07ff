"""Run folders of training commands, as a start leaves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alphaapollo.config.keys import replace_value
from alphaapollo.config.schema import Config
from alphaapollo.runs.checkpoint_folder import CheckpointFolder, write_progress
from alphaapollo.runs.resume import find_start_point
from alphaapollo.runs.run_plan import RunPlan


def make_config(out: Path, schema: Any = Config, **sections: dict[str, Any]) -> Any:
    """Configuration of the run <out>/p/run. `sections` are those of the configuration."""
    trainer = {"output_dir": str(out), "project_name": "p", "experiment_name": "run"} | sections.pop("trainer", {})
    return schema(**sections, trainer=trainer)


def change_keys(config: Any, keys: dict[str, Any]) -> Any:
    """The configuration with other values of dotted keys."""
    for key, value in keys.items():
        config = replace_value(config, key, value)
    return config


def log_steps(run: Path, *steps: int) -> None:
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in steps))


def train(config: Any, step: int, **progress: Any) -> Path:
    """Make the folder of a run that reached iteration `step`: configuration, metrics, a checkpoint."""
    start, run = find_start_point(config), config.trainer.folder
    start.prepare_folder(config, RunPlan({}))
    log_steps(run, *range(step + 1))
    checkpoints = CheckpointFolder(run / "checkpoints", None, inputs=start.inputs)
    writing = checkpoints.begin_checkpoint(step)
    (writing / "weights").write_text(str(step))
    write_progress(writing, {"step": step} | progress)
    return checkpoints.complete_checkpoint(writing)
