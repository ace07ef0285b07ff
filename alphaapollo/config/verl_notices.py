"""Keys that mean something else in verl: what a run says that sets them as one would there."""

from __future__ import annotations

from collections.abc import Iterator, Set

from alphaapollo.config.schema import Config

MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
VALIDATION = "actor_rollout_ref.rollout.val_kwargs"


def verl_notices(config: Config, given: Set[str]) -> list[str]:
    """One line for each. given: the keys that the user set himself; the shipped files know what they mean."""
    return [*_mini_batch(config, given), *_target_kl(config, given), *_rounds(config, given), *_greedy(config, given)]


def _mini_batch(config: Config, given: Set[str]) -> Iterator[str]:
    size, samples = config.actor_rollout_ref.actor.ppo_mini_batch_size, config.group_size
    could_be_prompts = size <= config.data.train_batch_size  # as verl demands of it
    if MINI_BATCH in given and samples > 1 and could_be_prompts:
        yield (
            f"{MINI_BATCH}={size} counts trajectories, in verl prompts: {config.optimizer_steps} optimiser steps an "
            f"iteration. verl's {size} x {samples} samples is {size * samples} here."
        )


def _target_kl(config: Config, given: Set[str]) -> Iterator[str]:
    key, control = "algorithm.kl_ctrl.target_kl", config.algorithm.kl_ctrl
    if key in given and config.algorithm.use_kl_in_reward and control.type != "fixed" and control.target_kl < 1:
        yield (
            f"{key}={control.target_kl:g} is nats a sequence, in verl nats a token: multiply verl's value by the mean "
            "response length."
        )


def _rounds(config: Config, given: Set[str]) -> Iterator[str]:
    key, groups = "algorithm.filter_groups.max_num_gen_batches", config.algorithm.filter_groups
    if key in given and groups.enable:
        yield (
            f"{key}={groups.max_num_gen_batches}: when it is reached, a run trains on the groups it has; verl's ends "
            "with an error."
        )


def _greedy(config: Config, given: Set[str]) -> Iterator[str]:
    key, sampling = f"{VALIDATION}.temperature", config.actor_rollout_ref.rollout.val_kwargs
    others = [name for name in sorted(given) if name in {f"{VALIDATION}.{other}" for other in ("n", "top_k", "top_p")}]
    if config.data.val_files and others and key not in given and sampling.temperature == 1 and not sampling.greedy:
        yield f"{key}=1.0: validation samples; verl's default is 0, greedy. {others[0]} is given without it."
