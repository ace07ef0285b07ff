"""Values that an iteration computes for the next one: coefficients of KL penalties, and the baseline of REINFORCE."""

from __future__ import annotations

from alphaapollo.config.schema import Algorithm, KLControl, PolicyLossOptions


def next_kl_coef(config: KLControl, coef: float, kl: float, num_sequences: int) -> float:
    """Compute the coefficient of the KL in the reward for the next iteration.

    Args:
        coef: coefficient of this iteration.
        kl: measured KL in nats *per sequence*, so target_kl=6 means 6 nats per response, not per token.
        num_sequences: number of trajectories in the iteration.
    """
    target = config.target_kl
    match config.type:
        case "fixed":
            return config.kl_coef
        case "adaptive":  # arXiv 1909.08593, section 2.2
            error = min(max(kl / target - 1.0, -0.2), 0.2)
            return coef * (1.0 + error * num_sequences / config.horizon)
        case "doubling":
            return next_kl_coef_by_doubling(coef, kl, target, config.kl_coef)
        case "dual":
            return next_kl_coef_by_dual_ascent(coef, kl, target)


def next_policy_kl_coef(options: PolicyLossOptions, coef: float | None, kl: float) -> float:
    """Compute the coefficient of ppo_kl for the next iteration.

    Args:
        coef: coefficient of this iteration; None: the initial one.
        kl: KL(old||new) of this iteration's update, in nats per token.
    """
    coef, target = options.ppo_kl_coef if coef is None else coef, options.ppo_kl_target
    if options.ppo_kl_type == "dual":
        return next_kl_coef_by_dual_ascent(coef, kl, target, options.ppo_kl_rate)
    return next_kl_coef_by_doubling(coef, kl, target, options.ppo_kl_coef)


def next_kl_coef_by_doubling(coef: float, kl: float, target: float, initial: float) -> float:
    """Halve the KL coefficient if kl < target / 1.5, double it if kl > 1.5 target (arXiv 1707.06347, section 4). The
    result is at least initial / 1024, so that it can grow again in a few iterations."""
    if kl < target / 1.5:
        return max(coef / 2.0, initial / 1024)
    return coef * 2.0 if kl > target * 1.5 else coef


def next_kl_coef_by_dual_ascent(coef: float, kl: float, target: float, step_size: float = 0.01) -> float:
    """Update the KL coefficient as the Lagrange multiplier of kl <= target: max(0, coef + step_size (kl - target)).

    step_size: change of the coefficient per nat. A negative coefficient would reward divergence.
    """
    return max(0.0, coef + step_size * (kl - target))


def next_baseline(config: Algorithm, baseline: float | None, mean_return: float) -> float | None:
    """Update the moving average of mean returns; without baseline_decay, it does not change. None: no average yet."""
    decay = config.baseline_decay
    if decay is None:
        return baseline
    return mean_return if baseline is None else decay * baseline + (1.0 - decay) * mean_return
