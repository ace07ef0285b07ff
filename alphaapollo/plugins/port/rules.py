"""Values of options that need a conversion which the tables of a project cannot express."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

Options = Mapping[str, str]  # options of a command of another project, and their values
ConvertedKeys = tuple[dict[str, str], str]  # alphaapollo's keys with values, and a remark for the comment
Rule = Callable[[str, Options], ConvertedKeys]  # receives the value, and all options of the command

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VALIDATION = f"{ROLLOUT}.val_kwargs"
BUILT_IN = ("accuracy", "math", "format", "react_format", "cosine", "repetition", "soft_overlong", "toolbench")
"""Reward functions of ms-swift that need no file."""


def _read_number(values: Options, key: str, default: int) -> int:
    return int(values[key]) if values.get(key, "").isdigit() else default


def _convert_mini_batch_size(value: str, values: Options) -> ConvertedKeys:
    key, n = f"{ACTOR}.ppo_mini_batch_size", _read_number(values, f"{ROLLOUT}.n", 1)
    if not value.isdigit():
        return {key: value}, f"counts trajectories here, prompts in verl: multiply it by rollout.n={n}"
    return {key: str(int(value) * n)}, f"{value} prompts x rollout.n={n}: here it counts trajectories" if n > 1 else ""


def _convert_truncation(value: str, values: Options) -> ConvertedKeys:
    if values.get("data.filter_overlong_prompts", "").lower() == "true":
        return {"data.truncation": "drop"}, "was data.filter_overlong_prompts=True"
    return {"data.truncation": values.get("data.truncation", "error").replace("middle", "left")}, ""


def _convert_validation_temperature(value: str, values: Options) -> ConvertedKeys:
    is_greedy = values.get(f"{VALIDATION}.do_sample", "").lower() == "false"
    temperature = "0" if is_greedy else values.get(f"{VALIDATION}.temperature", "1.0")
    return {f"{VALIDATION}.temperature": temperature}, "was val_kwargs.do_sample=False: greedy" if is_greedy else ""


def _convert_tensor_parallel_size(value: str, values: Options) -> ConvertedKeys:
    gpus = _read_number(values, "trainer.n_gpus_per_node", 8) * _read_number(values, "trainer.nnodes", 1)
    size = str(min(int(value), gpus)) if value.isdigit() else value
    remark = f"was {value}, but there are {gpus} GPUs" if size != value else ""
    return {f"{ROLLOUT}.tensor_model_parallel_size": size}, remark


def _convert_logger(value: str, values: Options) -> ConvertedKeys:
    names = [name for name in re.findall(r"\w+", value) if name not in ("none", "null")]
    kept = [name for name in names if name in ("console", "tensorboard", "wandb", "mlflow", "trackio", "swanlab")]
    others = ", ".join(name for name in names if name not in kept)
    return {"trainer.logger": f"[{','.join(kept or ['console'])}]"}, f"not supported: {others}" if others else ""


def _convert_target_kl(value: str, values: Options) -> ConvertedKeys:
    length, is_number = _read_number(values, "data.max_response_length", 512), re.fullmatch(r"[\d.]+", value)
    remark = f"per sequence here, {value} per token in verl: multiplied by {length}; better use the mean length"
    return {"algorithm.kl_ctrl.target_kl": f"{float(value) * length:g}" if is_number else value}, remark


def _convert_output_dir(value: str, values: Options) -> ConvertedKeys:
    run = "/".join(values.get(f"trainer.{name}", "") for name in ("project_name", "experiment_name"))
    return {"trainer.output_dir": value.removesuffix(f"/{run}")}, "without project_name/experiment_name"


VERL_RULES: dict[str, Rule] = {
    f"{ACTOR}.ppo_mini_batch_size": _convert_mini_batch_size,
    f"{ROLLOUT}.tensor_model_parallel_size": _convert_tensor_parallel_size,
    **{f"{VALIDATION}.{name}": _convert_validation_temperature for name in ("do_sample", "temperature")},
    "algorithm.kl_ctrl.target_kl": _convert_target_kl,
    "data.truncation": _convert_truncation,
    "data.filter_overlong_prompts": _convert_truncation,
    "trainer.logger": _convert_logger,
    "trainer.default_local_dir": _convert_output_dir,
}


def _convert_reward_names(value: str, values: Options) -> ConvertedKeys:
    names = re.findall(r"[\w.-]+", value)
    own, built_in = ([name for name in names if (name in BUILT_IN) is known] for known in (False, True))
    remark = f"left out: {', '.join(built_in)}; docs/swift.md names what they are here" if built_in else ""
    return ({"custom_reward_function.name": f"[{','.join(own)}]"} if own else {}), remark


def _convert_reward_weights(value: str, values: Options) -> ConvertedKeys:
    names = re.findall(r"[\w.-]+", values.get("reward_funcs", ""))
    weights = [one for name, one in zip(names, value.strip("[]").split(","), strict=False) if name not in BUILT_IN]
    if not weights:
        return {}, "the weights of functions and models that are not converted"
    return {"custom_reward_function.weights": f"[{','.join(weights)}]"}, f"was {value}, for {', '.join(names)}"


def _convert_dataset(value: str, values: Options, key: str = "data.train_files") -> ConvertedKeys:
    """Convert entries such as HF::owner/name:subset#500, where 500 is a number of sampled rows."""
    entry = re.compile(r"(?:(?:HF|MS|hf|ms)::)?(.*?)(?:#(\d+))?", re.DOTALL)
    entries = [entry.fullmatch(one.strip()) for one in value.strip("[]").split(",")]
    names, counts = zip(*((one[1], one[2]) for one in entries if one), strict=True)
    words, remark = {key: names[0] if len(names) == 1 else f"[{','.join(names)}]"}, ""
    if len(names) == 1 and counts[0] and key == "data.train_files":
        words["data.train_max_samples"] = counts[0]
    elif any(counts):
        remark = f"was {value}; a part of an entry is NAME#SPLIT[:ROWS]"
    return words, remark


RULES: dict[str, dict[str, Rule]] = {
    "verl": VERL_RULES,
    "trl": {"report_to": _convert_logger},
    "openrlhf": {
        "data.dataset": _convert_dataset,
        "data.prompt_dataset": _convert_dataset,
        "eval.dataset": partial(_convert_dataset, key="data.val_files"),
    },
    "swift": {
        "report_to": _convert_logger,
        "reward_funcs": _convert_reward_names,
        "reward_weights": _convert_reward_weights,
        "dataset": _convert_dataset,
        "val_dataset": partial(_convert_dataset, key="data.val_files"),
    },
}
"""{project: {option: conversion of its value}}"""
