"""Read the configurations that a Python script of TRL creates, without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from alphaapollo.config.keys import format_value

CONFIG_TRAINERS = {
    "RewardConfig": "reward",
    "AsyncGRPOConfig": "async_grpo",
    "OnlineDPOConfig": "online_dpo",
    "NashMDConfig": "nash_md",
}
OTHER_CONFIGS = (
    "ModelConfig",
    "LoraConfig",
    "GenerationConfig",
    "BitsAndBytesConfig",
    "Mxfp4Config",
    "OpenCodeConfig",
    "PretrainedConfig",
)
LORA_OPTIONS = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "target_modules": "lora_target_modules",
    "lora_dropout": "lora_dropout",
}


@dataclass(frozen=True)
class ConfigCall:
    """Call such as `GRPOConfig(num_generations=8)`, joined with the arguments of its trainer."""

    name: str
    trainer: str  # e.g. grpo
    line: int
    values: Mapping[str, str]
    notes: tuple[str, ...]  # options whose value is known only at run time


def list_config_calls(source: str, path: str) -> list[ConfigCall]:
    """Return the configurations of trainers that a script creates. Raises ValueError for a script that Python cannot
    parse."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"{path}: line {error.lineno}: {error.msg}. Correct the script.") from None
    names = _list_constants(tree)
    calls = [(node, _get_called_name(node)) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    extra: dict[str, str] = {}
    for node, name in calls:
        if name == "LoraConfig":
            lora = dict(_read_arguments(node, names))
            extra |= {
                "use_peft": "true",
                **{
                    LORA_OPTIONS[key]: text
                    for key, (text, is_known) in lora.items()
                    if key in LORA_OPTIONS and is_known
                },
            }
        elif name.endswith("Trainer"):
            given = dict(_read_arguments(node, names))
            extra |= {key: given[key][0] for key in ("model", "reward_funcs") if key in given}
            if node.args and "model" not in given:
                extra["model"] = _read_value(node.args[0], names)[0]
    found = []
    for node, name in calls:
        if name.endswith("Config") and name not in OTHER_CONFIGS and name[:1].isupper():
            arguments = dict(_read_arguments(node, names))
            values = {key: text for key, (text, is_known) in arguments.items() if is_known}
            notes = [
                f"{key}={text}: known only at run time; set it" for key, (text, known) in arguments.items() if not known
            ]
            trainer = CONFIG_TRAINERS.get(name, name.removesuffix("Config").lower())
            found.append(ConfigCall(name, trainer, node.lineno, values | extra, tuple(notes)))
    return found


def _get_called_name(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _list_constants(tree: ast.AST) -> dict[str, str]:
    """Return names with one literal value: variables, and defaults of `parser.add_argument("--name", default=...)`."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, node.value
        elif isinstance(node, ast.Call) and _get_called_name(node) == "add_argument" and node.args:
            option = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            name = f"args.{str(option).lstrip('-').replace('-', '_')}"
            value = next((one.value for one in node.keywords if one.arg == "default"), None)
        else:
            continue
        text, is_known = _read_value(value, found) if value else ("", False)
        if is_known and found.get(name, text) == text:
            found[name] = text
        else:
            found.pop(name, None)
    return found


def _read_arguments(node: ast.Call, names: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Yield (name, (value, whether it is known)) for the named arguments of a call."""
    for one in node.keywords:
        if one.arg:
            yield one.arg, _read_value(one.value, names)


def _read_value(value: ast.AST, names: Mapping[str, str]) -> tuple[str, bool]:
    """Return a value as on the command line, and whether it is known without running the script."""
    text = ast.unparse(value)
    if text in names:
        return names[text], True
    try:
        return format_value(ast.literal_eval(value)), True
    except ValueError:
        pass
    if isinstance(value, ast.List) and all(isinstance(item, ast.Name) for item in value.elts):
        return f"[{','.join(ast.unparse(item) for item in value.elts)}]", False
    return text, False
