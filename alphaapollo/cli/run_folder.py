"""Find the model of a run for `serve` and `chat`, exporting it if necessary, with its generation settings."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import format_override
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import GenerationConfig
from alphaapollo.launch.run_model import RunModel, find_newest, settings_to_play
from alphaapollo.rewards.grader_processes.protocol import worker_environment


def load_run_model(run: str, words: Sequence[str]) -> tuple[RunModel, GenerationConfig]:
    """Return the newest model of a run (exported if necessary) and its settings with the user's KEY=VALUE overrides.

    Raises ConfigError if there is no model, the export fails, or a key is invalid.
    """
    try:
        newest = find_newest(Path(run))
        values = settings_to_play(newest)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(values, file, allow_unicode=True)
        file.flush()
        config = load_config(GenerationConfig, "generation", ["--config", file.name, *words])
    export_newest(newest)
    return newest, config


def export_newest(newest: RunModel) -> None:
    """Export a checkpoint in a subprocess. Raises ConfigError if that fails."""
    if newest.checkpoint is None:
        return
    keys = [format_override("checkpoint", str(newest.checkpoint)), format_override("output", str(newest.folder))]
    command = [sys.executable, "-m", "alphaapollo.trainer.main_export", *keys]
    if subprocess.run(command, env=worker_environment(), check=False).returncode:
        raise ConfigError(f"{newest.checkpoint} could not be exported (see above).")
