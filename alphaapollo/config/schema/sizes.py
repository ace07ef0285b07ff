"""Rules about sizes that several configurations share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from alphaapollo.config.schema.model import Lora
from alphaapollo.config.schema.rollout import Rollout
from alphaapollo.config.schema.trainer import Training


def find_rank_group_errors(sizes: Mapping[str, int], trainer: Training) -> Iterator[str]:
    """Groups of `size` consecutive ranks must cover all ranks, each within one node or over whole nodes; -1 = all.

    sizes: key -> size.
    """
    ranks, per_node = trainer.num_ranks, trainer.n_gpus_per_node
    fits = [n for n in range(1, ranks + 1) if ranks % n == 0 and (per_node % n == 0 or n % per_node == 0)]
    for key, size in sizes.items():
        if size == -1 or size in fits:
            continue
        what = f"the {ranks} training ranks (trainer.n_gpus_per_node={per_node} x trainer.nnodes={trainer.nnodes})"
        why = f"does not divide {what}" if size == 0 or ranks % size else f"crosses nodes of {per_node} ranks"
        other = ", or -1 for all" if key.endswith("fsdp_size") else ""
        yield f"{key}={size} {why}. Set one of {', '.join(map(str, fits))}{other}."


def find_adapter_export_errors(section: str, lora: Lora, trainer: Training) -> Iterator[str]:
    if trainer.export_lora == "adapter" and not lora.lora_rank:
        yield f"trainer.export_lora=adapter needs adapters, got {section}.lora_rank=0. Set merged."


def find_engine_step_errors(section: str, rollout: Rollout, longest: int) -> Iterator[str]:
    """An engine step takes at least one token of each sequence. longest: tokens of prompt and response."""
    tokens, sequences = rollout.max_num_batched_tokens, rollout.max_num_seqs
    if rollout.name == "vllm" and max(tokens, longest) < sequences:
        yield f"{section}.max_num_batched_tokens={tokens} is less than {section}.max_num_seqs={sequences}. Raise it."
