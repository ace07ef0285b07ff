"""What models do not support: one table for all commands that train or serve a model.

A command describes how it uses its models (ModelUse). `check_models` walks REQUIREMENTS, whose rows are the functions
below. The column of vLLM in docs/models.md is generated from the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from alphaapollo.config.resolve import get_attention_kernel
from alphaapollo.config.schema import Fsdp, Model, Rollout
from alphaapollo.config.schema.data import PromptData
from alphaapollo.data.images import reads_images
from alphaapollo.engines.vllm.settings import WITHOUT_MIXED_WINDOWS, check_engine_kwargs
from alphaapollo.models.load import (
    LIGER_ARCHITECTURES,
    check_layers,
    check_quantization,
    describe_image_input,
    find_reward_model_class,
    has_reward_model,
    is_causal_lm,
    load_config,
    load_without_weights,
)
from alphaapollo.models.lora import resolve_target_modules
from alphaapollo.models.micro_batch import describe_stateful_layers
from alphaapollo.models.moe_routing import ExpertSizes, RouterHooks
from alphaapollo.models.sharding import find_experts


@dataclass(frozen=True)
class ModelUse:
    """Model of a command, and the settings that the model must support."""

    key: str  # config key of its path, e.g. model.path
    model: Model
    writes_text: bool = True  # False: a critic, a reward model or a teacher
    engine: Rollout | None = None  # settings of the engine that serves the model
    engine_section: str = "rollout"
    lengths: PromptData | None = None  # limits of the sequences of the engine
    fsdp: Fsdp | None = None  # sharding of a model that is trained
    fsdp_section: str = "fsdp_config"
    num_ranks: int = 1
    ulysses_size: int = 1  # ranks that share every sequence
    ulysses_section: str = ""  # e.g. actor_rollout_ref.actor.
    policy: Model | None = None  # policy whose prepared images the model reads
    trains_scores: bool = False  # main_rm


class Problem(NamedTuple):
    """Why a model does not support a setting: `{setting}: {model} {reason}. {fix}.`"""

    setting: str  # e.g. rollout.name=hf
    reason: str  # e.g. "is a vision-language model"
    fix: str  # e.g. "Set rollout.name=vllm"


def check_models(uses: Iterable[ModelUse]) -> None:
    """Raise ValueError if a model does not support the settings of its command, or its weights are quantized."""
    for use in uses:
        for _, message in find_unsupported_features(use):
            raise ValueError(message)
        if use.engine:
            check_engine_kwargs(use.engine, use.engine_section)
        check_quantization(use.model, use.key, use.engine.name if use.engine and not use.fsdp else "")


def find_unsupported_features(use: ModelUse) -> Iterator[tuple[str, str]]:
    """Yield (feature, error message) for each row of REQUIREMENTS that a model does not meet."""
    config = load_config(use.model)
    for feature, find_problem in REQUIREMENTS.items():
        if problem := find_problem(use, config):
            model = f"{use.key}={use.model.path} ({config.model_type})"
            yield feature, f"{problem.setting}: {model} {problem.reason}. {problem.fix}."


def _needs_causal_lm(use: ModelUse, config: Any) -> Problem | None:
    if not use.writes_text or is_causal_lm(config):
        return None
    reason = f"is a {config.architectures[0]}, not a causal language model"
    return Problem("text generation", reason, "Choose the model that it was trained from")


def _needs_classifier(use: ModelUse, config: Any) -> Problem | None:
    if use.trains_scores and not is_causal_lm(config):
        find_reward_model_class(config, use.model.path)  # raises for other classifiers
    elif use.trains_scores and not has_reward_model(config):
        return Problem("main_rm", "has no reward model in transformers", "Choose another family, e.g. Qwen3 or Llama")
    return None


def _needs_images_of_policy(use: ModelUse, config: Any) -> Problem | None:
    policy = use.policy or use.model
    if policy.path == use.model.path or describe_image_input(use.model) == describe_image_input(policy):
        return None
    reason = f"reads other images or placeholder tokens than {policy.path}"
    return Problem("images", reason, "Use a model of the policy's family")


def _needs_engine_with_vision(use: ModelUse, config: Any) -> Problem | None:
    if use.engine is None or use.engine.name != "hf" or not reads_images(config):
        return None
    key = f"{use.engine_section}.name"
    return Problem(f"{key}=hf", "is a vision-language model", f"Set {key}=vllm")


def _needs_context_length(use: ModelUse, config: Any) -> Problem | None:
    if use.lengths is None or use.engine is None or use.engine.name != "vllm":
        return None
    text, prompt, response = config.get_text_config(), use.lengths.max_prompt_length, use.lengths.max_response_length
    scaled = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default") not in ("default", "dynamic")
    limits = {"a context length of {} tokens": None if scaled else getattr(text, "max_position_embeddings", None)}
    if text.model_type in WITHOUT_MIXED_WINDOWS and "full_attention" in text.layer_types:
        limits["layers with a sliding window of {} tokens, which vLLM does not support"] = text.sliding_window
    for name, limit in limits.items():
        if limit is not None and prompt + response > limit:
            lengths = f"data.max_prompt_length={prompt} + data.max_response_length={response} = {prompt + response}"
            return Problem(lengths, f"has {name.format(limit)}", "Lower one of the two keys")
    return None


def _needs_divisible_heads(use: ModelUse, config: Any) -> Problem | None:
    if use.engine is None or (size := use.engine.tensor_model_parallel_size) == 1:
        return None
    heads, key = getattr(config.get_text_config(), "num_attention_heads", None), use.engine_section
    if (experts := use.engine.expert_parallel_size) > 1 and ExpertSizes.from_config(config) is None:
        name = f"{key}.expert_parallel_size"
        return Problem(f"{name}={experts}", "is not a mixture of experts", f"Set {name}=1")
    if not heads or heads % size == 0:
        return None
    fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
    name = f"{key}.tensor_model_parallel_size"
    return Problem(f"{name}={size}", f"has {heads} attention heads", f"Set {name} to one of {fits}")


def _needs_ulysses(use: ModelUse, config: Any) -> Problem | None:
    heads, size, possible = getattr(config.get_text_config(), "num_attention_heads", 0), use.ulysses_size, 1
    if use.model.trust_remote_code and hasattr(config, "auto_map"):
        reason = "has its own modeling code, whose attention cannot be split"
    elif not (reason := describe_stateful_layers(config)) and (not heads or heads % size):
        reason, possible = f"has {heads} attention heads", math.gcd(heads, size) if heads else 1
    key = f"{use.ulysses_section}ulysses_sequence_parallel_size"
    return Problem(f"{key}={size}", reason, f"Set {key}={possible}") if size > 1 and reason else None


def _needs_routers(use: ModelUse, config: Any) -> Problem | None:
    coef, replays = use.model.router_aux_loss_coef, use.engine is not None and use.engine.router_replay
    if not use.fsdp or use.policy or not (coef or replays):  # only the policy, and models of fine-tuning
        return None
    keys = [f"{use.key.removesuffix('path')}router_aux_loss_coef={coef:g}"] * bool(coef)
    setting = " and ".join(keys + [f"{use.engine_section}.router_replay=true"] * replays)
    if RouterHooks.wrap_routers(load_without_weights(use.model)) is None:
        reason = "is not a mixture of experts with supported routers (docs/parallelism.md)"
        return Problem(setting, reason, f"Remove {setting}")
    if coef and not hasattr(config.get_text_config(), "router_aux_loss_coef"):
        return Problem(setting, "has no load-balancing loss in transformers", f"Remove {setting}")
    return None


def _needs_divisible_experts(use: ModelUse, config: Any) -> Problem | None:
    if use.fsdp is None or (size := use.fsdp.ep_size) == 1:
        return None
    experts, key = find_experts(load_without_weights(use.model)), f"{use.fsdp_section}.ep_size"
    counts = {int(module.num_experts) for module in experts}  # type: ignore[arg-type]
    shards, setting = use.fsdp.count_shards(use.num_ranks), f"{key}={size}"
    if not experts:
        return Problem(setting, "has no experts that can be split (docs/parallelism.md)", f"Set {key}=1")
    if any(count % size for count in counts):
        fits = ", ".join(str(n) for n in range(1, shards + 1) if not any(m % n for m in (*counts, shards)))
        return Problem(setting, f"has {max(counts)} experts in a layer", f"Set {key} to one of {fits}")
    sharing = shards // size  # FSDP shards dimension 1 of the experts over these ranks
    rows = {parameter.shape[1] for module in experts for parameter in module.parameters()}
    if uneven := [count for count in rows if count % sharing]:
        reason = f"has experts of {uneven[0]} rows, shared by {sharing} ranks"
        return Problem(setting, reason, f"Change the number of ranks or {key}")
    return None


def _needs_target_modules(use: ModelUse, config: Any) -> Problem | None:
    try:
        if use.fsdp and use.model.lora_rank:
            resolve_target_modules(load_without_weights(use.model), use.model)
    except ValueError as error:
        reason, _, fix = str(error).removesuffix(".").partition(". ")
        setting = f"{use.key.removesuffix('path')}lora_rank={use.model.lora_rank}"
        return Problem(setting, f"cannot have the adapters: {reason}", fix)
    return None


REQUIREMENTS: dict[str, Callable[[ModelUse, Any], Problem | None]] = {
    "text generation": _needs_causal_lm,
    "reward models": _needs_classifier,
    "images": _needs_images_of_policy,
    "engine of transformers": _needs_engine_with_vision,
    "vLLM": _needs_context_length,
    "tensor parallelism": _needs_divisible_heads,
    "Ulysses": _needs_ulysses,
    "routers": _needs_routers,
    "expert parallelism": _needs_divisible_experts,
    "LoRA": _needs_target_modules,
}


def choose_kernels(model: Model, configured: Model) -> Model:
    """Return the resolved model section with kernels that the architecture supports.

    Liger kernels are disabled if they are not tested on it. Layers with recurrent state need padded rows.

    configured: the section before `resolve_model`. Raises ValueError if it sets a kernel that is not supported.
    """
    config = load_config(model)
    if configured.attention == "auto" and describe_stateful_layers(config):
        model = model.model_copy(update={"attention": "padded"})
    check_layers(config, model.path, get_attention_kernel(model))
    if not model.use_liger:
        return model
    kind = config.model_type
    if configured.use_liger is True and kind not in LIGER_ARCHITECTURES:
        raise ValueError(
            f"model.use_liger=true is not tested on {kind!r} models ({model.path}), only on "
            f"{', '.join(LIGER_ARCHITECTURES)}. Set model.use_liger=auto, or model.use_torch_compile=true."
        )
    return model.model_copy(update={"use_liger": kind in LIGER_ARCHITECTURES})
