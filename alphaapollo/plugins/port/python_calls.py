"""Read the configurations that a Python script of TRL creates, without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from alphaapollo.config.keys import format_value
from alphaapollo.plugins.port.shell import remove_shell_marks

OTHER_CONFIGS = ("ModelConfig", "DatasetConfig", "DatasetMixtureConfig")
LORA_OPTIONS = {"r": "lora_r", "target_modules": "lora_target_modules", "task_type": "lora_task_type"}


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
    names, imported = _list_constants(tree), {*_list_imports(tree)}
    calls = [(node, ast.unparse(node.func)) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    trainers = (one for node, name in calls for one in _read_trainer_arguments(node, name, names))
    extra = {key: (text, known) for key, text, known in trainers}
    found = []
    for node, name in calls:
        name = name.removeprefix("trl.")
        if name.endswith("Config") and name not in OTHER_CONFIGS and name in imported:
            arguments = {one.arg or "**": _read_value(one.value, names) for one in node.keywords} | extra
            values = {key: text for key, (text, is_known) in arguments.items() if is_known}
            notes = (
                f"{key}={text}: known only at run time; set it" for key, (text, known) in arguments.items() if not known
            )
            trainer = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.removesuffix("Config")).lower()
            found.append(ConfigCall(name, trainer, node.lineno, values, tuple(notes)))
    return found


def _list_imports(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a script imports from TRL; all names of `trl` after `import trl`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trl":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "trl":
            yield node.attr


def _read_trainer_arguments(node: ast.Call, name: str, names: Mapping[str, str]) -> Iterator[tuple[str, str, bool]]:
    """Yield (option, value, is_known) for the arguments of a trainer, e.g. reward_funcs, or of LoraConfig."""
    arguments = {one.arg or "**": _read_value(one.value, names) for one in node.keywords}
    if name.endswith("LoraConfig"):
        yield "use_peft", "true", True
        yield from ((LORA_OPTIONS.get(key, key), *pair) for key, pair in arguments.items())
    elif name.endswith("Trainer"):
        if node.args:
            arguments["model"] = _read_value(node.args[0], names)
        for key, (text, is_known) in arguments.items():  # functions and data sets are options whose value is a name
            if key not in ("args", "peft_config"):
                yield key, text, is_known or key not in ("model", "**")


def _list_constants(tree: ast.AST) -> dict[str, str]:
    """Return names with one literal value: variables, and defaults of `parser.add_argument("--name", default=...)`."""
    found, repeated = dict[str, str](), set[str]()
    for node in ast.walk(tree):
        value: ast.expr | None
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument") and node.args:
            option = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            name = f"args.{str(option).lstrip('-').replace('-', '_')}"
            value = next((one.value for one in node.keywords if one.arg == "default"), None)
        else:
            continue
        text, is_known = _read_value(value, found) if value else ("", False)
        if not is_known or found.get(name, text) != text:
            repeated.add(name)
        found[name] = text
    return {name: text for name, text in found.items() if name not in repeated}


def _read_value(value: ast.AST, names: Mapping[str, str]) -> tuple[str, bool]:
    """Return a value as on the command line, and whether it is known without running the script."""
    text = ast.unparse(value)
    if text in names:
        return names[text], True
    try:
        return remove_shell_marks(format_value(ast.literal_eval(value))), True
    except ValueError:
        pass
    if isinstance(value, ast.List) and all(isinstance(item, ast.Name) for item in value.elts):
        return f"[{','.join(ast.unparse(item) for item in value.elts)}]", False
    return text, False
