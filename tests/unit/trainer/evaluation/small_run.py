"""Small runs of main_generation and of an evolution, in the test's process."""

from __future__ import annotations

import asyncio
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

from alphaapollo.config.load import NO_USER_SETTINGS, load_config
from alphaapollo.observability.console import Console
from alphaapollo.observability.terminal import Terminal
from tests.unit import tiny


class SmallRun:
    """Command line of a run. `defaults`: its keys, which may be overridden."""

    def __init__(self, module: ModuleType, schema: type[Any], program: str, folder: Path, defaults: dict[str, Any]):
        self._module, self._schema, self._program = module, schema, program
        trainer = {"output_dir": folder / "out", "project_name": "test", "experiment_name": "run"}
        self.defaults = defaults | {f"trainer.{key}": value for key, value in trainer.items()}
        self.folder = folder / "out/test/run"

    def words(self, *overrides: str) -> list[str]:
        given = {override.split("=")[0] for override in overrides}
        return [*(f"{key}={value}" for key, value in self.defaults.items() if key not in given), *overrides]

    def run(self, *overrides: str) -> str:
        """Run to the end and return the output."""
        out = StringIO()
        console = Console(Terminal(file=out, width=200, highlight=False))
        config = load_config(self._schema, self._program, self.words(*overrides))
        asyncio.run(self._module.run(self._module.prepare_run(config, NO_USER_SETTINGS, console)))
        return out.getvalue()


def save_chat_model(folder: Path, split_at_spaces: bool = False) -> Path:
    """Save tiny's model with a chat template."""
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoTokenizer

    tiny.save_model("qwen3", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if split_at_spaces:
        tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {{ eos_token }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder
