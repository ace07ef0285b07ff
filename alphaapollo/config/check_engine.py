"""What the engine would refuse only once it has started."""

from __future__ import annotations

from collections.abc import Iterator

from alphaapollo.config.schema import Config, Data, GenerationData, GenerationRollout, Rollout
from alphaapollo.config.schema.base import Device

CPU_BLOCK = 32  # tokens: vLLM's attention on a CPU works on multiples of it


def check_engine(
    prefix: str, rollout: Rollout | GenerationRollout, data: Data | GenerationData, device: Device
) -> Iterator[str]:
    """One line a problem. prefix: the section, e.g. actor_rollout_ref.rollout."""
    if rollout.name != "vllm":
        return
    if device == "cpu" and rollout.block_size % CPU_BLOCK:
        yield (
            f"{prefix}.block_size={rollout.block_size}: on a CPU vLLM takes multiples of {CPU_BLOCK}. Set "
            f"{CPU_BLOCK * max(1, round(rollout.block_size / CPU_BLOCK))}."
        )
    longest = data.max_prompt_length + data.max_response_length
    if max(rollout.max_num_batched_tokens, longest) < rollout.max_num_seqs:
        yield (
            f"{prefix}.max_num_batched_tokens={rollout.max_num_batched_tokens}: a step of the engine takes a token of "
            f"each of {prefix}.max_num_seqs={rollout.max_num_seqs} sequences. Set {rollout.max_num_seqs} or more, or "
            "lower the other."
        )


def check_nucleus(prefix: str, top_p: float, top_k: int) -> Iterator[str]:
    """One line a problem of what is sampled from."""
    if top_p == 0:
        yield f"{prefix}.top_p=0: nothing is left to sample. Set 1.0 for all tokens."
    if top_k < -1 or top_k == 0:
        yield f"{prefix}.top_k={top_k}: expected -1 (all tokens) or a count above 0. Set -1."


def check_sampling(config: Config) -> Iterator[str]:
    """The same, of training and of validation."""
    rollout = config.actor_rollout_ref.rollout
    for prefix, top_p, top_k in (
        ("actor_rollout_ref.rollout", rollout.top_p, rollout.top_k),
        ("actor_rollout_ref.rollout.val_kwargs", rollout.val_kwargs.top_p, rollout.val_kwargs.top_k),
    ):
        yield from check_nucleus(prefix, top_p, top_k)
