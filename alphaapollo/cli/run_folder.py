"""What serve and chat share: RUN to a model's folder, exported first where need be, and how it plays."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from alphaapollo.config.errors import ConfigError
from alphaapollo.config.load import load_config
from alphaapollo.config.overrides import format_override
from alphaapollo.config.schema import GenerationConfig
from alphaapollo.launch.run_model import NewestModel, find_newest, settings_to_play
from alphaapollo.rewards.grader_processes.protocol import worker_environment


def model_to_play(run: str, words: Sequence[str]) -> tuple[NewestModel, GenerationConfig]:
    """The newest model of RUN, which lies in its folder now, and its run's settings under the user's KEY=VALUE.

    ConfigError: no model, a checkpoint that cannot be exported, or keys that cannot be.
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


def export_newest(newest: NewestModel) -> None:
    """Where it is a checkpoint still: in a process of its own, which tells what it does. ConfigError: that failed."""
    if newest.checkpoint is None:
        return
    keys = [format_override("checkpoint", str(newest.checkpoint)), format_override("output", str(newest.folder))]
    command = [sys.executable, "-m", "alphaapollo.trainer.main_export", *keys]
    if subprocess.run(command, env=worker_environment(), check=False).returncode:
        raise ConfigError(f"{newest.checkpoint} could not be exported (see above), so there is no model.")
