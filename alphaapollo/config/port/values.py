"""Values that verl and we write differently: for one of its keys, our words and what to say about them.

Each converter takes the value and all of the command's keys. No words: the key is left out, and the remark says why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Values = Mapping[str, str]

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
MULTI_TURN = f"{ROLLOUT}.multi_turn"
LOSSES = {"vanilla": "ppo", "geo_mean": "gmpo"}
ESTIMATORS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
METRICS = {"acc": "accuracy", "score": "reward", "seq_reward": "reward", "seq_final_reward": "reward"}
REJECTIONS = {"token": "token", "token_k1": "token", "sequence": "sequence", "seq_sum_k1": "sequence"}
REJECTIONS |= {"geometric": "geometric", "seq_mean_k1": "geometric"}
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
TRACKERS = ("console", "tensorboard", "wandb")


@dataclass(frozen=True)
class Converted:
    """E.g. `Converted({"data.truncation": "drop"}, "long prompts are left out")`; no remark: nothing was changed."""

    words: dict[str, str]
    remark: str = ""


def is_true(values: Values, key: str) -> bool:
    return values.get(key, "").lower() in ("true", "1", "yes")


def number(values: Values, key: str, default: int) -> int:
    """A whole number of the command, verl's default where it says none or none that is known."""
    text = values.get(key, "")
    return int(text) if re.fullmatch(r"\d+", text) else default


def gpus(values: Values) -> int:
    return number(values, "trainer.n_gpus_per_node", 8) * number(values, "trainer.nnodes", 1)


def in_turns(values: Values) -> bool:
    return is_true(values, f"{MULTI_TURN}.enable")


def _mini_batch(value: str, values: Values) -> Converted:
    key, n = f"{ACTOR}.ppo_mini_batch_size", number(values, f"{ROLLOUT}.n", 1)
    if not value.isdigit():
        return Converted({key: value}, f"counts trajectories here, prompts there: multiply it by rollout.n={n}")
    remark = f"{value} prompts x rollout.n={n}: here it counts trajectories" if n > 1 else ""
    return Converted({key: str(int(value) * n)}, remark)


def _truncation(value: str, values: Values) -> Converted:
    if is_true(values, "data.filter_overlong_prompts"):
        return Converted({"data.truncation": "drop"}, "data.filter_overlong_prompts=True")
    if value == "middle":
        return Converted({"data.truncation": "left"}, "a prompt is cut at an end; was middle")
    return Converted({"data.truncation": value})


def _filter_overlong(value: str, values: Values) -> Converted:
    if not is_true(values, "data.filter_overlong_prompts"):
        return Converted({}, "data.truncation says what happens to long prompts")
    if "data.truncation" in values:
        return Converted({}, "data.truncation=drop says it")
    return Converted({"data.truncation": "drop"}, f"was data.filter_overlong_prompts={value}")


def _do_sample(value: str, values: Values) -> Converted:
    key = f"{ROLLOUT}.val_kwargs.temperature"
    if is_true(values, f"{ROLLOUT}.val_kwargs.do_sample"):
        return Converted({}, "val_kwargs.temperature says it")
    return Converted({key: "0"}, f"was {ROLLOUT}.val_kwargs.do_sample={value}: greedy")


def _val_temperature(value: str, values: Values) -> Converted:
    key = f"{ROLLOUT}.val_kwargs.temperature"
    if values.get(f"{ROLLOUT}.val_kwargs.do_sample", "").lower() == "false":
        return Converted({key: "0"}, f"was {value} with do_sample=False: greedy")
    return Converted({key: value})


def _tensor_parallel(value: str, values: Values) -> Converted:
    key, there = f"{ROLLOUT}.tensor_model_parallel_size", gpus(values)
    if value.isdigit() and int(value) > there:
        return Converted({key: str(there)}, f"was {value}, but there are {there} GPUs")
    return Converted({key: value})


def _one_of(key: str, names: Mapping[str, str], remark: str) -> Callable[[str, Values], Converted]:
    def convert(value: str, values: Values) -> Converted:
        return Converted({key: names[value]}, f"{remark}; was {value}") if value in names else Converted({key: value})

    return convert


def _logger(value: str, values: Values) -> Converted:
    names = re.findall(r"\w+", value)
    kept = [name for name in names if name in TRACKERS]
    left_out = [name for name in names if name not in TRACKERS]
    text = f"[{','.join(kept or ['console'])}]"
    return Converted({"trainer.logger": text}, f"there is no {', '.join(left_out)}" if left_out else "")


def _target_kl(value: str, values: Values) -> Converted:
    key, longest = "algorithm.kl_ctrl.target_kl", number(values, "data.max_response_length", 512)
    if not re.fullmatch(r"[\d.]+", value):
        return Converted({key: value}, "nats a sequence here, a token there: multiply it by the mean response length")
    remark = f"nats a sequence here, a token there ({value}): times data.max_response_length, better the mean length"
    return Converted({key: f"{float(value) * longest:g}"}, remark)


def _generation_rounds(value: str, values: Values) -> Converted:
    key = "algorithm.filter_groups.max_num_gen_batches"
    remark = "was 0, no limit; when it is reached, a run trains on the groups it has"
    return Converted({key: "1000"}, remark) if value == "0" else Converted({key: value})


def _folder(value: str, values: Values) -> Converted:
    own = "/".join(values.get(f"trainer.{name}", "") for name in ("project_name", "experiment_name"))
    remark = "was trainer.default_local_dir; the run lies in output_dir/project_name/experiment_name"
    return Converted({"trainer.output_dir": value.removesuffix(f"/{own}")}, remark)


def _importance(value: str, values: Values) -> Converted:
    if value == "null":
        return Converted({}, "")
    words = {f"{CORRECTION}.method": "tis", f"{CORRECTION}.level": value}
    return Converted(words, f"was {CORRECTION}.rollout_is={value}")


def _rejection(value: str, values: Values) -> Converted:
    if value == "null":
        return Converted({}, "")
    if values.get(f"{CORRECTION}.rollout_is", "null") != "null":
        return Converted({}, "one correction at a time; rollout_is is taken")
    if value not in REJECTIONS:
        return Converted({}, f"not supported; {CORRECTION}.method=mask has the levels token, sequence and geometric")
    words = {f"{CORRECTION}.method": "mask", f"{CORRECTION}.level": REJECTIONS[value]}
    return Converted(words, f"was {CORRECTION}.rollout_rs={value}")


def _bounds(value: str, values: Values) -> Converted:
    alone = values.get(f"{CORRECTION}.rollout_is", "null") == "null"
    if value == "null":
        return Converted({}, "")
    if not alone or values.get(f"{CORRECTION}.rollout_rs", "null") not in REJECTIONS:
        return Converted({}, "rollout_rs is not taken over")
    low, _, high = value.strip("'\"").rpartition("_")
    words = {f"{CORRECTION}.low": low, f"{CORRECTION}.high": high} if low else {f"{CORRECTION}.high": high}
    return Converted(words, f"was {CORRECTION}.rollout_rs_threshold={value}")


def _importance_bound(value: str, values: Values) -> Converted:
    if values.get(f"{CORRECTION}.rollout_is", "null") == "null":
        return Converted({}, "rollout_is is not set")
    return Converted({f"{CORRECTION}.high": value}, f"was {CORRECTION}.rollout_is_threshold")


def _importance_cap(value: str, values: Values) -> Converted:
    words = {f"{CORRECTION}.method": "tis", f"{CORRECTION}.level": "token", f"{CORRECTION}.high": value}
    return Converted({} if value in ("null", "-1") else words, f"was {ACTOR}.tis_imp_ratio_cap={value}")


def _device(value: str, values: Values) -> Converted:
    return Converted({}, "auto finds the GPUs")


def _turns(value: str, values: Values) -> Converted:
    if not in_turns(values):
        return Converted({}, "there is one turn")
    limits = (f"{MULTI_TURN}.max_assistant_turns", f"{MULTI_TURN}.max_user_turns", f"{MULTI_TURN}.max_turns")
    turns = next((values[key] for key in limits if values.get(key, "null") != "null"), "10")
    words = {
        "env.env_name": "informal_math",
        "env.max_steps": turns,
        "env.action_format": "chat_template",
        "env.tool_parser": values.get(f"{MULTI_TURN}.format", "hermes"),
    }
    return Converted(words, f"was {MULTI_TURN}.enable={value}: an environment with tools, called by the chat template")


def _with_turns(why: str) -> Callable[[str, Values], Converted]:
    def convert(value: str, values: Values) -> Converted:
        return Converted({}, why if in_turns(values) else "there is one turn")

    return convert


def _tools(value: str, values: Values) -> Converted:
    if value == "null" or not in_turns(values):
        return Converted({}, "there is one turn" if value != "null" else "")
    why = "its tools are verl's classes: write functions marked @tool in a file (docs/tools.md), set env.custom_module"
    return Converted({}, f"{why} to it and env.tools to their names. Until then the model has python_code")


CONVERTERS: dict[str, Callable[[str, Values], Converted]] = {
    f"{ACTOR}.ppo_mini_batch_size": _mini_batch,
    f"{ACTOR}.policy_loss.loss_mode": _one_of(f"{ACTOR}.policy_loss.loss_mode", LOSSES, "the loss has this name"),
    f"{ROLLOUT}.tensor_model_parallel_size": _tensor_parallel,
    f"{ROLLOUT}.name": _one_of(f"{ROLLOUT}.name", {"sglang": "vllm", "trtllm": "vllm"}, "vLLM is the engine"),
    f"{ROLLOUT}.val_kwargs.do_sample": _do_sample,
    f"{ROLLOUT}.val_kwargs.temperature": _val_temperature,
    f"{MULTI_TURN}.enable": _turns,
    f"{MULTI_TURN}.max_assistant_turns": _with_turns("env.max_steps says it"),
    f"{MULTI_TURN}.max_user_turns": _with_turns("env.max_steps says it"),
    f"{MULTI_TURN}.max_turns": _with_turns("env.max_steps says it"),
    f"{MULTI_TURN}.format": _with_turns("env.tool_parser says it"),
    f"{MULTI_TURN}.tool_config_path": _tools,
    f"{MULTI_TURN}.function_tool_path": _tools,
    f"{ACTOR}.tis_imp_ratio_cap": _importance_cap,
    f"{CORRECTION}.rollout_is": _importance,
    f"{CORRECTION}.rollout_is_threshold": _importance_bound,
    f"{CORRECTION}.rollout_rs": _rejection,
    f"{CORRECTION}.rollout_rs_threshold": _bounds,
    "algorithm.adv_estimator": _one_of("algorithm.adv_estimator", ESTIMATORS, "it has this name"),
    "algorithm.filter_groups.metric": _one_of("algorithm.filter_groups.metric", METRICS, "a component of the reward"),
    "algorithm.filter_groups.max_num_gen_batches": _generation_rounds,
    "algorithm.kl_ctrl.target_kl": _target_kl,
    "data.truncation": _truncation,
    "data.filter_overlong_prompts": _filter_overlong,
    "trainer.logger": _logger,
    "trainer.default_local_dir": _folder,
    "trainer.device": _device,
}
OF_EVERY_PROGRAM = ("trainer.logger", "trainer.default_local_dir", "trainer.device")
