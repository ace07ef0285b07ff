"""Checks of sizes that several configurations share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from alphaapollo.config.schema.model import Lora
from alphaapollo.config.schema.rollout import Rollout
from alphaapollo.config.schema.trainer import Training


def find_rank_group_errors(sizes: Mapping[str, int], trainer: Training) -> Iterator[str]:
    """Yield errors for rank groups that do not divide the ranks, or that cross nodes without covering complete nodes.

    sizes: {key: ranks per group}; -1 = all ranks.
    """
    ranks, per_node = trainer.num_ranks, trainer.n_gpus_per_node
    fits = [n for n in range(1, ranks + 1) if ranks % n == 0 and (per_node % n == 0 or n % per_node == 0)]
    for key, size in sizes.items():
        if size == -1 or size in fits:
            continue
        all_ranks = f"the {ranks} training ranks (trainer.n_gpus_per_node={per_node} x trainer.nnodes={trainer.nnodes})"
        fault = f"does not divide {all_ranks}" if size == 0 or ranks % size else f"crosses nodes of {per_node} ranks"
        other = ", or -1 for all" if key.endswith("fsdp_size") else ""
        yield f"{key}={size} {fault}. Set one of {', '.join(map(str, fits))}{other}."


def find_adapter_export_errors(section: str, lora: Lora, trainer: Training) -> Iterator[str]:
    """Yield an error if adapters are to be exported, but the model has none."""
    if trainer.export_lora == "adapter" and not lora.lora_rank:
        yield f"trainer.export_lora=adapter needs adapters, but {section}.lora_rank=0. Set trainer.export_lora=merged."


def find_engine_step_errors(section: str, rollout: Rollout, longest: int) -> Iterator[str]:
    """Yield an error if an engine step has fewer tokens than sequences. longest: tokens of prompt and response."""
    tokens, sequences = rollout.max_num_batched_tokens, rollout.max_num_seqs
    if rollout.name == "vllm" and max(tokens, longest) < sequences:
        yield f"{section}.max_num_batched_tokens={tokens} is less than {section}.max_num_seqs={sequences}. Raise it."
