"""Values of options that need a conversion which the tables of a project cannot express."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

Options = Mapping[str, str]  # options of a command of another project, and their values
ConvertedKeys = tuple[dict[str, str], str]  # alphaapollo's keys with values, and a remark for the comment
Rule = Callable[[str, Options], ConvertedKeys]  # receives the value, and all options of the command

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION, TURNS, VALIDATION = "algorithm.rollout_correction", f"{ROLLOUT}.multi_turn", f"{ROLLOUT}.val_kwargs"
LEVELS = {
    "token": "token",
    "token_k1": "token",
    "sequence": "sequence",
    "seq_sum_k1": "sequence",
    "geometric": "geometric",
    "seq_mean_k1": "geometric",
}
"""{value of verl's rollout_rs: algorithm.rollout_correction.level}"""
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


def _convert_rollout_is(value: str, values: Options) -> ConvertedKeys:
    weights, mask = (values.get(f"{CORRECTION}.rollout_{name}", "null") for name in ("is", "rs"))
    threshold = values.get(f"{CORRECTION}.rollout_{'rs' if weights == 'null' else 'is'}_threshold", "null")
    cap = values.get(f"{ACTOR}.tis_imp_ratio_cap", "-1")
    if weights != "null":
        words = {"method": "tis", "level": weights, "high": threshold}
    elif mask in LEVELS:
        low, _, high = threshold.strip("'\"").rpartition("_")
        if mask.endswith("_k1"):  # verl's bounds are those of 1 / rho; one bound is both
            low, high = _invert(high), _invert(low) if low else high
        words = {"method": "mask", "level": LEVELS[mask], "low": low or "null", "high": high}
    elif cap not in ("-1", "null"):
        words = {"method": "tis", "level": "token", "high": cap}
    else:
        return {}, "" if value == "null" else f"not supported; {CORRECTION}.method=mask has other levels"
    remark = "only one correction is applied: rollout_is, else rollout_rs, else tis_imp_ratio_cap"
    if words["method"] == "mask":
        remark += f"; was {threshold}; kept tokens are also weighted by rho, which verl does not do"
    return {f"{CORRECTION}.{name}": text for name, text in words.items() if text != "null"}, remark


def _invert(bound: str) -> str:
    return f"{1 / float(bound):.6g}" if re.fullmatch(r"[\d.]*[1-9][\d.]*", bound) else bound


def _convert_multi_turn(value: str, values: Options) -> ConvertedKeys:
    if values.get(f"{TURNS}.enable", "").lower() != "true":
        return {}, "episodes have one turn"
    limits = (values.get(f"{TURNS}.max_{limit}turns", "null") for limit in ("assistant_", "user_", ""))
    words = {"env_name": "informal_math", "max_steps": next((limit for limit in limits if limit != "null"), "10")}
    words |= {"action_format": "chat_template", "tool_parser": values.get(f"{TURNS}.format", "hermes")}
    remark = f"was {TURNS}.enable: an environment with tools, which the chat template calls"
    return {f"env.{name}": text for name, text in words.items()}, remark


def _convert_aggregation(value: str, values: Options) -> ConvertedKeys:
    remark = "verl adds the sequences up, so its gradient is as many times larger as a mini-batch has sequences"
    return {f"{ACTOR}.loss_agg_mode": value}, remark if value == "seq-mean-token-sum-norm" else ""


VERL_RULES: dict[str, Rule] = {
    f"{ACTOR}.ppo_mini_batch_size": _convert_mini_batch_size,
    f"{ACTOR}.loss_agg_mode": _convert_aggregation,
    f"{ACTOR}.tis_imp_ratio_cap": _convert_rollout_is,
    f"{ROLLOUT}.tensor_model_parallel_size": _convert_tensor_parallel_size,
    **{f"{CORRECTION}.rollout_{name}": _convert_rollout_is for name in ("is", "is_threshold", "rs", "rs_threshold")},
    **{
        f"{TURNS}.{name}": _convert_multi_turn
        for name in ("enable", "format", "max_turns", "max_user_turns", "max_assistant_turns")
    },
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
    entries = [
        re.fullmatch(r"(?:(?:HF|MS|hf|ms)::)?(.*?)(?:#(\d+))?", one.strip()) for one in value.strip("[]").split(",")
    ]
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
    "openrlhf": {},
    "swift": {
        "report_to": _convert_logger,
        "reward_funcs": _convert_reward_names,
        "reward_weights": _convert_reward_weights,
        "dataset": _convert_dataset,
        "val_dataset": partial(_convert_dataset, key="data.val_files"),
    },
}
"""{project: {option: conversion of its value}}"""
