"""Keys of LoRA that cannot work together. Whether the model has the layers is checked where it is at hand:
models/lora.py."""

from __future__ import annotations

from collections.abc import Iterator

from alphaapollo.config.keys import plain
from alphaapollo.config.schema import Config, Lora, TuningConfig

MODEL = "actor_rollout_ref.model"
LARGEST_SERVED = 512


def check_lora(config: Config) -> Iterator[str]:
    """Problems of main_ppo's keys."""
    lora, reset = config.actor_rollout_ref.model, config.algorithm.reference_reset
    yield from _check_section(MODEL, lora)
    yield from _check_section("critic.model", config.critic.model)
    yield from _check_export(config.trainer.export_lora, MODEL, lora)
    if config.actor_rollout_ref.rollout.lora == "adapter":
        yield from _check_served(config, lora)
    if lora.lora_rank and (reset.every is not None or reset.patience is not None):
        yield (
            f"algorithm.reference_reset: with {MODEL}.lora_rank={lora.lora_rank} the reference is the model without "
            "its adapters, which cannot become what they have made of it. Leave the reset out, or train all weights "
            "(lora_rank=0)."
        )


def _check_served(config: Config, lora: Lora) -> Iterator[str]:
    """Engines that get adapters: what they can do, and from where they can take them."""
    rollout, key = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout.lora=adapter"
    fix = "Leave it out: the engine then gets whole weights."
    if not lora.lora_rank:
        yield f"{key}: there is none, for {MODEL}.lora_rank is 0. Set it, or leave this out."
    elif rollout.name != "vllm":
        yield f"{key}: only the vllm engine serves adapters, not {rollout.name}. {fix}"
    elif rollout.tensor_model_parallel_size > 1:
        yield (
            f"{key} with tensor_model_parallel_size={rollout.tensor_model_parallel_size}: what several ranks hold of "
            f"an adapter cannot be proved yet. {fix}"
        )
    elif lora.lora_rank > LARGEST_SERVED:
        yield f"{key}: vLLM serves ranks up to {LARGEST_SERVED}, not {MODEL}.lora_rank={lora.lora_rank}. {fix}"


def check_tuning_lora(config: TuningConfig) -> Iterator[str]:
    """Problems of fine-tuning's keys."""
    yield from _check_section("model", config.model)
    yield from _check_export(config.trainer.export_lora, "model", config.model)


def _check_section(prefix: str, lora: Lora) -> Iterator[str]:
    if lora.target_modules == []:
        yield f"{prefix}.target_modules=[]: no layer would get an adapter. Name some, or set all-linear."
    if lora.lora_rank:
        return
    for name in ("lora_alpha", "target_modules"):
        value = getattr(lora, name)
        if value != type(lora).model_fields[name].default:
            yield (
                f"{prefix}.{name}={plain(value)}: there are no adapters, for {prefix}.lora_rank is 0. Set "
                f"{prefix}.lora_rank=16, or leave {name} out."
            )


def _check_export(form: str, prefix: str, lora: Lora) -> Iterator[str]:
    if form == "adapter" and not lora.lora_rank:
        yield f"trainer.export_lora=adapter: there is none, for {prefix}.lora_rank is 0. Set it, or leave this out."
