"""Write the model card (README.md) of an exported model: changed keys, metrics and versions.

The model card has no secrets and only the last two parts of local paths, so it can be published.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import yaml

from alphaapollo.config.changes import identify_command
from alphaapollo.config.keys import COMMANDS, flatten_maps, format_value, list_keys
from alphaapollo.runs.metrics_file import read_metrics
from alphaapollo.utils.hub import is_local_path
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.redaction import find_secret_keys_and_reasons, redact
from alphaapollo.utils.versions import list_versions

PACKAGES = ("alphaapollo", "torch", "transformers", "vllm", "peft", "ray")
METRIC_PREFIXES = ("val/", "critic/score/", "reward/", "train/loss", "response_length/mean")
MACHINE_KEYS = ("trainer.output_dir", "trainer.project_name", "trainer.experiment_name", "trainer.logger")
KINDS = {
    "main_ppo": "reinforcement learning",
    "main_sft": "supervised fine-tuning",
    "main_dpo": "preference training",
    "main_rm": "reward modelling",
}


def format_card_head(base_model: str, is_adapter: bool, tags: Sequence[str] = ()) -> str:
    """Return the YAML header of a model card, from which the hub shows library and base model."""
    head: JsonObject = {"library_name": "peft" if is_adapter else "transformers", "tags": ["alphaapollo", *tags]}
    head |= {} if is_local_path(base_model) else {"base_model": base_model}
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---"


def format_model_card(
    saved: JsonObject, run: Path, step: int, role: str, base_model: str, comparison: str, is_adapter: bool = False
) -> str:
    """Return the model card of an exported checkpoint as Markdown.

    role: policy, critic or reward model. comparison: result of the comparison with plain transformers, as a sentence.
    """
    command = identify_command(saved) or "main_ppo"
    kind = KINDS.get(command, command.removeprefix("main_"))
    parts = [
        format_card_head(base_model, is_adapter, [kind.replace(" ", "-")]),
        f"# {run.name}",
        f"The {'LoRA adapter of the ' if is_adapter else ''}{role} of a run of alphaapollo's {command} ({kind}), after "
        f"iteration {step}. It was trained from {shorten_path(base_model)}.",
        "## Keys that differ from the defaults\n\n"
        + _format_table(("key", "value"), [(f"`{k}`", f"`{v}`") for k, v in list_non_default_keys(saved, command)]),
        "## Metrics\n\n" + _format_table(("metric", "value"), read_last_metrics(run / "metrics.jsonl", step)),
        "## Versions\n\n"
        + _format_table(("package", "version"), [*list_versions(PACKAGES), ("python", platform.python_version())]),
        f"## Proof\n\n{comparison}",
    ]
    return redact("\n\n".join(parts) + "\n")


def shorten_path(path: str) -> str:
    """Return the last two parts of a local path, because the others may be private. Returns hub ids unchanged."""
    return "/".join(Path(path).parts[-2:]).lstrip("/") if is_local_path(path) else path


def list_non_default_keys(saved: JsonObject, command: str) -> Iterator[tuple[str, str]]:
    """Yield (key, value) of each configuration key with a non-default value, except secrets and output paths."""
    values, secret = flatten_maps(saved), {key for key, _ in find_secret_keys_and_reasons(saved)}
    for name, key in list_keys(COMMANDS[command]).items():
        value = values.get(name, key.default)
        if format_value(value) == format_value(key.default) or name in secret or name in MACHINE_KEYS:
            continue
        yield name, _shorten_value(value)


def _shorten_value(value: object) -> str:
    if isinstance(value, str) and "/" in value:
        return shorten_path(value)
    if isinstance(value, list):
        return format_value([_shorten_value(item) if isinstance(item, str) else item for item in value])
    return format_value(value)


def read_last_metrics(file: Path, step: int) -> list[tuple[str, str]]:
    """Return (name, last value up to iteration `step`) of rewards, losses and validation metrics in metrics.jsonl."""
    last: dict[str, tuple[int, float]] = {}
    records = read_metrics(file) if file.is_file() else []
    for record in records:
        for name, value in record.items():
            if record["step"] <= step and name.startswith(METRIC_PREFIXES) and value is not None:
                last[name] = (record["step"], value)
    return [(f"`{name}` (iteration {when})", f"{value:.4g}") for name, (when, value) in sorted(last.items())]


def _format_table(header: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {left} | {right.replace('|', chr(92) + '|')} |" for left, right in rows]
    return "\n".join([f"| {header[0]} | {header[1]} |", "|---|---|", *lines]) if lines else "none"
