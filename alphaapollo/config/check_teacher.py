"""Keys of the teacher that cannot work together. Whether its tokens are the policy's is checked where both tokenizers
are at hand: trainer/setup/teacher_tokens.py."""

from __future__ import annotations

from collections.abc import Iterator

from alphaapollo.config.schema import Config


def check_teacher(config: Config) -> Iterator[str]:
    """Problems of main_ppo's keys."""
    teacher, actor = config.teacher, config.actor_rollout_ref.actor
    if teacher.divergence and not teacher.model.path:
        yield f"teacher.model.path: required with teacher.divergence={teacher.divergence}, got nothing. Give it."
    if teacher.whole and actor.full_kl:
        yield (
            f"teacher.divergence={teacher.divergence} and actor_rollout_ref.actor.kl_loss_type=full: an update "
            "compares whole distributions with one other model. Set kl_loss_type=low_var_kl+, or "
            "teacher.divergence=sampled."
        )
