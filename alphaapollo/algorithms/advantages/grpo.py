"""GRPO and the estimators that compare the samples of a group: one advantage per trajectory.

grpo, dr_grpo   subtract the group's mean; grpo also divides by the group's standard deviation
rloo            subtracts the mean of the other samples
opo             subtracts the length-weighted mean
gpg             subtracts the mean, and scales by the share of samples in groups with a gradient
maxrl           subtracts the mean, and divides by it
magistral       subtracts the mean, then standardizes over each mini-batch
grpo_passk      pass@k training, which rewards a group for its best samples; also grpo_passk_analytic
gdpo            normalizes each named reward over the group, then sums them
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from alphaapollo.algorithms.advantages.base import Trajectories, register_estimator
from alphaapollo.algorithms.statistics import Groups, center_in_groups, standardize
from alphaapollo.config.schema import Algorithm

COMPARES_GROUP = {"scope": "trajectories", "group": True}


def grpo(scores: Tensor, groups: Groups, ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """Compute (R - mean) / (std + eps) within each group (arXiv 2402.03300, section 4.1.2). [N] -> [N].

    Groups of equal rewards get exactly 0, even with eps=0.
    """
    spread = groups.std(scores, ddof) + eps
    spread = torch.where(spread > 0, spread, torch.ones_like(spread))
    return center_in_groups(scores, groups) / spread[groups.group_index]


@register_estimator("grpo", "scores", "groups", "norm_adv_by_std_in_grpo", **COMPARES_GROUP)
def normalize(scores: Tensor, groups: Groups, divides_by_std: bool | None) -> Tensor:
    """Apply grpo to the scores, without the division if algorithm.norm_adv_by_std_in_grpo=false."""
    return center_in_groups(scores, groups) if divides_by_std is False else grpo(scores, groups)


# R - mean within each group (arXiv 2503.20783), for loss_agg_mode=seq-mean-token-sum-norm
register_estimator("dr_grpo", "scores", "groups", **COMPARES_GROUP)(center_in_groups)


@register_estimator("rloo", "scores", "groups", **COMPARES_GROUP)
def rloo(scores: Tensor, groups: Groups) -> Tensor:
    """Subtract from each score the mean of the other scores in its group (arXiv 2402.14740). [N] -> [N]."""
    sizes = groups.sizes.to(scores.dtype)
    factor = sizes / (sizes - 1).clamp(min=1)
    return factor[groups.group_index] * center_in_groups(scores, groups)


@register_estimator("opo", "scores", "lengths", "groups", **COMPARES_GROUP, on_policy=True)
def opo(scores: Tensor, lengths: Tensor, groups: Groups) -> Tensor:
    """Subtract from each score the length-weighted mean score of its group (arXiv 2505.23585). [N] each -> [N].

    lengths: number of action tokens. The mean is 0 in a group without action tokens, which has nothing to train on.
    """
    baseline = groups.sum(lengths * scores) / groups.sum(lengths).clamp(min=1)
    return center_in_groups(scores, groups, baseline)


def gpg_alpha(scores: Tensor, groups: Groups) -> Tensor:
    """Compute the factor alpha = B / (B - M) of GPG's advantages, a scalar (arXiv 2504.02546, Eq. 7); 1 if M = B.

    B: number of samples. M: number of samples in groups with zero reward variance, which have no gradient.
    """
    num_constant = groups.is_constant(scores)[groups.group_index].sum()
    num_samples = scores.numel()
    num_with_gradient = num_samples - num_constant if num_constant < num_samples else num_samples
    return scores.new_tensor(num_samples) / num_with_gradient


@register_estimator("gpg", "scores", "groups", "norm_adv_by_std_in_grpo", **COMPARES_GROUP)
def gpg(scores: Tensor, groups: Groups, std_norm: bool | None = False, ddof: int = 1, eps: float = 0.0) -> Tensor:
    """Compute gpg_alpha() * (score - mean), divided by the group's std if std_norm (arXiv 2504.02546). [N] -> [N]."""
    centered = grpo(scores, groups, ddof, eps) if std_norm else center_in_groups(scores, groups)
    return gpg_alpha(scores, groups) * centered


def maxrl(scores: Tensor, groups: Groups) -> Tensor:
    """Compute (R - mean) / mean within each group (arXiv 2602.02710); 0 in groups with a mean of at most 0. [N] -> [N].

    For rewards of 0 and 1 and groups of n samples, the policy gradient is unbiased for the first n - 1 terms of the
    gradient of log p, where p is the success rate: sum over j < n - 1 of (1 - p)^j grad p.
    """
    means = groups.mean(scores)
    scale = torch.where(means > 0, 1.0 / means, 0.0)
    return center_in_groups(scores, groups, means) * scale[groups.group_index]


@register_estimator(
    "maxrl",
    *("scores", "groups"),
    **COMPARES_GROUP,
    no_shaping_reason="it divides by the group's mean reward, which must be a success rate",
)
def _maxrl(scores: Tensor, groups: Groups) -> Tensor:
    """Raises ValueError for a negative reward, with which the mean is not a success rate."""
    if (lowest := float(scores.min())) < 0:
        raise ValueError(
            f"algorithm.adv_estimator=maxrl needs rewards of at least 0, but got {lowest:g}. Return 0 for a wrong "
            "answer, or set algorithm.adv_estimator=grpo."
        )
    return maxrl(scores, groups)


def magistral(centered: Tensor, mini_batch_ids: Tensor, ddof: int = 1, eps: float = 0.0) -> Tensor:
    """Standardize rewards over the *sequences* of each mini-batch (arXiv 2506.10910, section 2.1). [N] -> [N].

    Args:
        centered: [N] reward minus group mean.
        mini_batch_ids: [N] mini-batch of each sequence.
    """
    advantages = torch.zeros_like(centered)
    for mini_batch_id in mini_batch_ids.unique():
        is_member = mini_batch_ids == mini_batch_id
        advantages[is_member] = standardize(centered[is_member], ddof, eps, eps_in_sqrt=False)
    return advantages


@register_estimator("magistral", "scores", "groups", "mini_batches", **COMPARES_GROUP, needs=("mini_batches",))
def _magistral(scores: Tensor, groups: Groups, mini_batch_ids: Tensor) -> Tensor:
    return magistral(center_in_groups(scores, groups), mini_batch_ids)


@register_estimator("grpo_passk", "scores", "groups", "norm_adv_by_std_in_grpo", **COMPARES_GROUP)
def passk_leave_one_out(
    scores: Tensor, groups: Groups, std_norm: bool | None = False, ddof: int = 1, eps: float = 1e-6
) -> Tensor:
    """Compute how much each sample raises the best score of its group (arXiv 2503.19595). [N] -> [N].

    A_i = max_j R_j - max_{j != i} R_j, so only a unique best sample has a non-zero advantage; 0 in a group of one.
    std_norm divides by the group's std + eps, which the paper's formula does not.
    """
    best = groups.max(scores)
    is_best = scores == best[groups.group_index]
    has_unique_best = groups.sum(is_best.to(scores.dtype)) == 1
    second = groups.max(torch.where(is_best, torch.full_like(scores, -math.inf), scores))
    gain = torch.where(has_unique_best & (groups.sizes > 1), best - second, torch.zeros_like(best))
    if std_norm:
        gain = gain / (groups.std(scores, ddof) + eps)
    return torch.where(is_best, gain[groups.group_index], torch.zeros_like(scores))


def _check_passk_k(config: Algorithm, group_size: int) -> None:
    if config.passk_k > group_size:
        raise ValueError(
            f"algorithm.passk_k={config.passk_k} must not exceed the group size, env.rollout.n={group_size}. "
            "Raise env.rollout.n or lower algorithm.passk_k."
        )


@register_estimator(
    "grpo_passk_analytic",
    *("scores", "groups", "passk_k"),
    **COMPARES_GROUP,
    no_shaping_reason="its closed form needs rewards of 0 or 1",
    check=_check_passk_k,
)
def passk_analytic(correct: Tensor, groups: Groups, k: int) -> Tensor:
    """Compute pass@k advantages of binary rewards in closed form (arXiv 2508.10751). correct 0/1 [N] -> [N].

    For a group of N samples, W of them wrong: R = 1 - C(W, k)/C(N, k), s = sqrt(R (1 - R)), and the advantage is
    (1 - R)/s of correct samples, (1 - R - C(W - 1, k - 1)/C(N - 1, k - 1))/s of wrong ones. It is 0 if s = 0 or N < k.

    Raises ValueError if a reward is neither 0 nor 1.
    """
    bad = correct[(correct != 0) & (correct != 1)]
    if len(bad):
        raise ValueError(
            f"grpo_passk_analytic needs rewards of 0 or 1, but got {bad[0]:g}. Set algorithm.adv_estimator=grpo_passk."
        )
    sizes_and_wrong = zip(groups.sizes, groups.sum(1 - correct), strict=True)
    pairs = [_compute_group_advantages(int(size), int(num_wrong), k) for size, num_wrong in sizes_and_wrong]
    sample_pairs = torch.tensor(pairs, dtype=torch.float64, device=correct.device)[groups.group_index]
    if_correct, if_wrong = sample_pairs.unbind(1)
    return torch.where(correct > 0, if_correct, if_wrong).to(correct.dtype)


def _compute_group_advantages(group_size: int, num_wrong: int, k: int) -> tuple[float, float]:
    """Compute the advantages (correct sample, wrong sample) of one group with the formula of passk_analytic."""
    if group_size < k:
        return 0.0, 0.0
    p_all_wrong = math.comb(num_wrong, k) / math.comb(group_size, k)  # 1 - R
    std = math.sqrt(p_all_wrong * (1.0 - p_all_wrong))
    if std == 0.0:
        return 0.0, 0.0
    p_others_wrong = math.comb(num_wrong - 1, k - 1) / math.comb(group_size - 1, k - 1)
    return p_all_wrong / std, (p_all_wrong - p_others_wrong) / std


def gdpo_sum(rewards: Tensor, groups: Groups, weights: Tensor, ddof: int = 1, eps: float = 1e-4) -> Tensor:
    """Compute the weighted sum of K rewards, each normalized within its group (arXiv 2601.05242, Eq. 4, 5, 7).

    Normalization is (r - mean) / (std + eps). rewards [N, K], weights [K] -> [N].
    """
    normalized = [grpo(reward, groups, ddof, eps) for reward in rewards.unbind(1)]
    return torch.stack(normalized, dim=1) @ weights.to(rewards.dtype)


def _check_gdpo_keys(config: Algorithm, group_size: int) -> None:
    names, weights = config.gdpo_rewards, config.gdpo_weights
    if len(weights) not in (0, len(names)):
        raise ValueError(
            f"algorithm.gdpo_weights has {len(weights)} entries, but algorithm.gdpo_rewards has {len(names)}. Set one "
            "weight per reward, in the order of gdpo_rewards."
        )
    unused = [name for name in config.gdpo_conditions if names and name not in names]
    if unused:
        raise ValueError(
            f"algorithm.gdpo_conditions sets conditions for [{', '.join(unused)}], but algorithm.gdpo_rewards is only "
            f"[{', '.join(names)}]. Add the missing rewards to gdpo_rewards, or remove their conditions."
        )


@register_estimator(
    "gdpo",
    **COMPARES_GROUP,
    needs=("components",),
    reads=("gdpo_rewards", "gdpo_weights", "gdpo_conditions"),
    no_shaping_reason="it sums the named rewards as returned by the reward function",
    check=_check_gdpo_keys,
)
def _gdpo(trajectories: Trajectories, config: Algorithm) -> Tensor:
    """Compute the weighted sum of normalized rewards, standardized over the whole batch (arXiv 2601.05242, Eq. 6)."""
    assert trajectories.components is not None
    names, weights = _select_rewards(trajectories.components, config)
    conditioned = apply_reward_conditions(trajectories.components, config.gdpo_conditions)
    rewards = torch.stack([conditioned[name] for name in names], dim=1)
    summed = gdpo_sum(rewards, trajectories.groups, rewards.new_tensor(weights))
    return standardize(summed, ddof=1, eps=1e-4, eps_in_sqrt=False)


def apply_reward_conditions(rewards: dict[str, Tensor], conditions: dict[str, tuple[str, float]]) -> dict[str, Tensor]:
    """Set named rewards to 0 where their condition is not met (arXiv 2601.05242, section 3). All [N].

    Example: with conditions {"style": ("accuracy", 1.0)} the reward "style" is 0 where "accuracy" is below 1.
    """
    return rewards | {
        name: torch.where(rewards[other] >= threshold, rewards[name], 0.0)
        for name, (other, threshold) in conditions.items()
    }


def _select_rewards(components: dict[str, Tensor], config: Algorithm) -> tuple[list[str], list[float]]:
    """Return names and weights of the rewards to sum. Raises ValueError if one is missing or not finite."""
    ignored = {"accuracy"} if "task" in components else set()  # both measure correctness, which would count twice
    names = config.gdpo_rewards or sorted(components.keys() - ignored)
    in_conditions = [name for key, (other, _) in config.gdpo_conditions.items() for name in (key, other)]
    required = list(dict.fromkeys(names + in_conditions))
    missing = [name for name in required if name not in components]
    if missing or not names:
        raise ValueError(
            f"For gdpo, the reward function must return {', '.join(missing) or 'named rewards'}, but it only returns "
            f"[{', '.join(sorted(components))}]. Return a dict with every reward that algorithm.gdpo_rewards and "
            "algorithm.gdpo_conditions name, or change these keys."
        )
    incomplete = [name for name in required if not components[name].isfinite().all()]
    if incomplete:
        raise ValueError(
            f"gdpo needs finite rewards, but [{', '.join(incomplete)}] are missing or not finite in some samples. "
            "Return a finite number for every sample from the reward function."
        )
    return names, config.gdpo_weights or [1.0] * len(names)
