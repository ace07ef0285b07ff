"""How ranks share the work: whether the sizes asked for fit the ranks that there are."""

from __future__ import annotations

from collections.abc import Iterator

from alphaapollo.config.schema import Config, Fsdp


def check_parallelism(config: Config) -> Iterator[str]:
    """Of main_ppo, one line for each size that does not fit."""
    per_node, ranks = config.trainer.n_gpus_per_node, config.trainer.num_ranks
    where = f"trainer.n_gpus_per_node x trainer.nnodes = {ranks} training ranks"
    yield from _check_sequences(config, ranks, per_node, where)
    for section, fsdp in (
        ("actor_rollout_ref.actor", config.actor_rollout_ref.actor.fsdp_config),
        ("critic", config.critic.fsdp_config),
    ):
        yield from check_fsdp_size(f"{section}.fsdp_config.fsdp_size", fsdp, ranks, per_node, where)


def _check_sequences(config: Config, ranks: int, per_node: int, where: str) -> Iterator[str]:
    name = "ulysses_sequence_parallel_size"
    key, size = f"actor_rollout_ref.actor.{name}", config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    yield from check_group(key, size, ranks, per_node, where)
    others = {
        "actor_rollout_ref.ref": config.actor_rollout_ref.ref.ulysses_sequence_parallel_size,
        "critic": config.critic.ulysses_sequence_parallel_size,
        "reward_model": config.reward_model.ulysses_sequence_parallel_size if config.reward_model.enable else None,
    }
    for section, own in others.items():
        if own not in (None, size):
            yield f"{section}.{name}={own}: it must be the actor's, {size}. Leave it out, or set {key}={own}."


def check_replicas(key: str, size: int, engines: int) -> Iterator[str]:
    """`size`: of data_parallel_size, whose groups of replicas must cover the engines."""
    if engines % size:
        fits = ", ".join(str(n) for n in range(1, engines + 1) if engines % n == 0)
        other = key.replace("data_parallel_size", "num_engines")
        yield f"{key}={size}: does not divide the {engines} engines. Set one of {fits}, or another {other}."


def check_fsdp_size(key: str, fsdp: Fsdp, ranks: int, per_node: int, where: str) -> Iterator[str]:
    """`where`: the ranks, in words."""
    if fsdp.fsdp_size != -1:
        yield from check_group(key, fsdp.fsdp_size, ranks, per_node, where, ", or -1 for all of them")


def check_group(key: str, size: int, ranks: int, per_node: int, where: str, other: str = "") -> Iterator[str]:
    """Groups of `size` consecutive ranks must cover all ranks, each within a node or of whole nodes."""
    fits = [n for n in range(1, ranks + 1) if ranks % n == 0 and (per_node % n == 0 or n % per_node == 0)]
    choice = f"Set one of {', '.join(map(str, fits))}{other}."
    if size == 0 or ranks % size:
        yield f"{key}={size}: does not divide the {where}. {choice}"
    elif size not in fits:
        yield f"{key}={size}: with {per_node} ranks a node its groups would begin and end inside of nodes. {choice}"
