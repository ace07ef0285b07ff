"""Checks that the configurations of several commands share: rank groups, tokens of an engine step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from alphaapollo.config.schema.model import Fsdp
from alphaapollo.config.schema.rollout import Rollout
from alphaapollo.config.schema.trainer import Training


def find_group_size_errors(group_sizes: Mapping[str, int], trainer: Training) -> Iterator[str]:
    """Yield an error for each group size (by key; -1 = all ranks) that does not divide the ranks or splits a node."""
    ranks, per_node = trainer.num_ranks, trainer.n_gpus_per_node
    fits = [n for n in range(1, ranks + 1) if ranks % n == 0 and (per_node % n == 0 or n % per_node == 0)]
    for key, size in group_sizes.items():
        if size == -1 or size in fits:
            continue
        all_ranks = f"the {ranks} training ranks (trainer.n_gpus_per_node={per_node} x trainer.nnodes={trainer.nnodes})"
        fault = f"does not divide {all_ranks}" if size == 0 or ranks % size else f"does not fit {per_node}-rank nodes"
        other = ", or -1 for all" if key.endswith("fsdp_size") else ""
        yield f"{key}={size} {fault}. Set one of {', '.join(map(str, fits))}{other}."


def find_ep_size_errors(sections: Mapping[str, Fsdp], trainer: Training) -> Iterator[str]:
    """Yield an error for each fsdp_config section (by key) whose ep_size does not divide the ranks of a model copy."""
    for key, fsdp in sections.items():
        shards = fsdp.count_shards(trainer.num_ranks)
        if shards % fsdp.ep_size:
            fits = ", ".join(str(n) for n in range(1, shards + 1) if shards % n == 0)
            fault = f"does not divide the {shards} ranks that share one copy of the model"
            yield f"{key}.ep_size={fsdp.ep_size} {fault} (fsdp_size={fsdp.fsdp_size}). Set one of {fits}."


def find_batch_token_errors(section: str, rollout: Rollout, max_sequence_length: int) -> Iterator[str]:
    """Yield an error if max_num_batched_tokens is smaller than max_num_seqs, which vLLM refuses."""
    tokens, sequences = rollout.max_num_batched_tokens, rollout.max_num_seqs
    if rollout.name == "vllm" and sequences != "auto" and max(tokens, max_sequence_length) < sequences:
        yield f"{section}.max_num_batched_tokens={tokens} is less than {section}.max_num_seqs={sequences}. Raise it."
