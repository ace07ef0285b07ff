"""Keys about a mixture of experts that cannot work. Whether the model is one is checked where it is at hand:
models/moe_routing.py."""

from __future__ import annotations

from collections.abc import Iterator

from alphaapollo.config.schema import Config, Model

REPLAY = "actor_rollout_ref.rollout.router_replay"


def check_experts(config: Config) -> Iterator[str]:
    """Problems of main_ppo's keys."""
    yield from check_balance("actor_rollout_ref.model", config.actor_rollout_ref.model)
    rollout, fix = config.actor_rollout_ref.rollout, "Leave it out."
    if not rollout.router_replay:
        return
    if rollout.name != "vllm":
        yield f"{REPLAY}=true: only vllm returns the experts that it chose, not {rollout.name}. {fix}"
    elif not rollout.enable_prefix_caching:
        yield (
            f"{REPLAY}=true: vLLM keeps the experts of a token beside its prefix cache. Set "
            "actor_rollout_ref.rollout.enable_prefix_caching=true."
        )
    elif rollout.lora == "adapter":
        yield f"{REPLAY}=true with actor_rollout_ref.rollout.lora=adapter was never tried. Leave either out."


def check_balance(section: str, model: Model) -> Iterator[str]:
    """`section`: of the model, e.g. actor_rollout_ref.model."""
    if model.router_aux_loss_coef and model.lora_rank:
        yield (
            f"{section}.router_aux_loss_coef={model.router_aux_loss_coef:g}: with {section}.lora_rank="
            f"{model.lora_rank} the routers are frozen, whose load it evens out. Leave it out, or train all weights "
            "(lora_rank=0)."
        )
