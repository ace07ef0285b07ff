"""Warnings for keys with another meaning in verl, if they are set as one would set them there."""

from __future__ import annotations

from collections.abc import Iterator, Set

from alphaapollo.config.schema import Config

MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
VALIDATION = "actor_rollout_ref.rollout.val_kwargs"


def verl_notices(config: Config, given: Set[str]) -> list[str]:
    """One line per key. given: keys that the user set, not the shipped files."""
    return [*_mini_batch(config, given), *_target_kl(config, given), *_rounds(config, given), *_greedy(config, given)]


def _mini_batch(config: Config, given: Set[str]) -> Iterator[str]:
    size, samples = config.actor_rollout_ref.actor.ppo_mini_batch_size, config.group_size
    could_be_prompts = size <= config.data.train_batch_size  # which verl requires
    if MINI_BATCH in given and samples > 1 and could_be_prompts:
        yield (
            f"{MINI_BATCH}={size} counts trajectories, but prompts in verl: {config.optimizer_steps} optimizer steps "
            f"per iteration. For verl's {size} prompts x {samples} samples set {size * samples}."
        )


def _target_kl(config: Config, given: Set[str]) -> Iterator[str]:
    key, control = "algorithm.kl_ctrl.target_kl", config.algorithm.kl_ctrl
    if key in given and config.algorithm.use_kl_in_reward and control.type != "fixed" and control.target_kl < 1:
        yield (
            f"{key}={control.target_kl:g} is in nats per sequence, but per token in verl. Multiply verl's value by the "
            "mean response length."
        )


def _rounds(config: Config, given: Set[str]) -> Iterator[str]:
    key, groups = "algorithm.filter_groups.max_num_gen_batches", config.algorithm.filter_groups
    if key in given and groups.enable:
        yield (
            f"{key}={groups.max_num_gen_batches}: after that many rounds a run trains on the groups it has, while "
            "verl's ends with an error."
        )


def _greedy(config: Config, given: Set[str]) -> Iterator[str]:
    key, sampling = f"{VALIDATION}.temperature", config.actor_rollout_ref.rollout.val_kwargs
    others = [name for name in sorted(given) if name in {f"{VALIDATION}.{other}" for other in ("n", "top_k", "top_p")}]
    if config.data.val_files and others and key not in given and sampling.temperature == 1 and not sampling.greedy:
        yield f"{key}=1.0 samples, but verl's default is 0, greedy. {others[0]} is set without it: set both."
