"""Advantages and returns of each sampled token."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from alphaapollo.plugins.verify.reference.samples import Batch, Config, NotCovered, Recorded

Array = np.ndarray


def std(values: Array) -> float:
    """Standard deviation that divides by N - 1; 0 if all values are equal."""
    return 0.0 if len(values) < 2 or np.ptp(values) == 0 else float(values.std(ddof=1))


def standardize(values: Array, eps: float) -> Array:
    """(x - mean) / (std + eps); 0 if all values are equal."""
    return (values - values.mean()) / (std(values) + eps) if std(values) else np.zeros_like(values)


def center(rewards: Array) -> Array:
    return rewards - rewards.mean() if np.ptp(rewards) else np.zeros_like(rewards)


def gain_of_best(rewards: Array) -> Array:
    """arXiv 2503.19595, section 3: max_j R_j - max_{j != i} R_j."""
    return np.array([rewards.max() - np.delete(rewards, i).max() for i in range(len(rewards))])


def pass_at_k(rewards: Array, k: int) -> Array:
    """arXiv 2508.10751, Eq. 12 to 15, for N samples of which W are wrong."""
    size, wrong = len(rewards), int((rewards == 0).sum())
    fails = math.comb(wrong, k) / math.comb(size, k) if size >= k else 0.0
    if fails in (0.0, 1.0):
        return np.zeros(size)
    sigma = math.sqrt(fails * (1 - fails))
    of_wrong = fails - math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1)
    return np.where(rewards > 0, fails / sigma, of_wrong / sigma)


Columns = dict[str, Array]
Members = dict[int, list[int]]  # group -> its samples
# Advantages of the samples of one prompt: rewards [G], sampled tokens [G], section `algorithm` -> [G]
PER_GROUP: dict[str, Callable[[Array, Array, Config], Array]] = {
    "none": lambda r, n, a: np.zeros(len(r)),
    "grpo": lambda r, n, a: group_normalize(r, a, 1e-6, default=True),  # arXiv 2402.03300, section 4.1.2
    "dr_grpo": lambda r, n, a: center(r),  # arXiv 2503.20783, section 3.2
    "rloo": lambda r, n, a: r - (r.sum() - r) / max(len(r) - 1, 1),  # arXiv 2402.14740, Eq. 8
    "opo": lambda r, n, a: r - (n * r).sum() / n.sum(),  # arXiv 2505.23585, Eq. 7
    "gpg": lambda r, n, a: group_normalize(r, a, 0.0, default=False),  # arXiv 2504.02546, Eq. 6
    "maxrl": lambda r, n, a: (r - r.mean()) / r.mean(),  # arXiv 2602.02710, Eq. 10
    "grpo_passk": lambda r, n, a: gain_of_best(r) / ((std(r) + 1e-6) if a.norm_adv_by_std_in_grpo else 1.0),
    "grpo_passk_analytic": lambda r, n, a: pass_at_k(r, a.passk_k),
    "magistral": lambda r, n, a: center(r),  # arXiv 2506.10910, section 2.1; then standardized per mini-batch
    "reinforce_plus_plus_baseline": lambda r, n, a: center(r),  # arXiv 2501.03262, Eq. 6; then over the batch (Eq. 7)
}


def group_normalize(values: Array, algorithm: Config, eps: float, default: bool) -> Array:
    """(R - mean) / (std + eps), or without the division (algorithm.norm_adv_by_std_in_grpo)."""
    divides = default if algorithm.norm_adv_by_std_in_grpo is None else algorithm.norm_adv_by_std_in_grpo
    return standardize(values, eps) if divides else center(values)


def kl_estimate(log_ratio: Array, kind: str) -> Array:
    """Estimators of KL(pi||ref) from d = log pi - log ref (http://joschu.net/blog/kl-approx.html)."""
    d = log_ratio
    return {"k1": d, "kl": d, "abs": np.abs(d), "k2": d**2 / 2, "mse": d**2 / 2}.get(kind, np.expm1(-d) + d)


def next_kl_coef(control: Config, coef: float, kl: float, num_samples: int) -> float:
    """Coefficient of the KL in the reward after a mean KL per sample."""
    if control.type == "adaptive":  # arXiv 1909.08593, section 2.2
        return coef * (1 + min(max(kl / control.target_kl - 1, -0.2), 0.2) * num_samples / control.horizon)
    if control.type == "dual":  # dual ascent on KL <= target, 0.01 per nat
        return max(0.0, coef + 0.01 * (kl - control.target_kl))
    if kl < control.target_kl / 1.5:  # arXiv 1707.06347, section 4
        return max(coef / 2, control.kl_coef / 1024)
    return coef * 2 if kl > control.target_kl * 1.5 else coef


def compute_advantages(
    batch: Batch, config: Config, columns: Columns, kl_coef: float, baseline: float, mini_batches: list[list[int]]
) -> tuple[Array, Array]:
    """Return advantages and returns, [n] each. columns: recorded old_logprobs, ref_logprobs and values."""
    algorithm, name, tokens = config.algorithm, config.algorithm.adv_estimator, np.zeros(batch.num_tokens)
    taught = np.zeros(batch.num_tokens)
    if config.teacher.divergence == "sampled":  # docs/algorithms/distill.md
        if "target_logprobs" not in columns:
            raise NotCovered("several teachers, or a teacher behind a server")
        taught = config.teacher.coef * (columns["target_logprobs"] - columns["old_logprobs"])
    for sample in batch.samples:
        tokens[[turn[-1] for turn in sample.turns]] = sample.rewards
    if algorithm.use_kl_in_reward:  # arXiv 1909.08593, Eq. 2
        tokens -= kl_coef * kl_estimate(columns["old_logprobs"] - columns["ref_logprobs"], algorithm.kl_penalty)
    scores = np.array([tokens[sample.tokens].sum() for sample in batch.samples])
    if name in PER_GROUP or name == "gdpo":
        of_samples = advantages_of_samples(batch, algorithm, name, scores, mini_batches)
        advantages = np.zeros(batch.num_tokens)
        for sample, value in zip(batch.samples, of_samples, strict=True):
            advantages[sample.tokens] = value
        return advantages + taught, advantages
    if name not in PER_TOKEN:
        raise NotCovered(f"the estimator {name}")
    values = columns.get("values", np.zeros(batch.num_tokens))
    advantages, returns = PER_TOKEN[name](batch, algorithm, tokens, values, scores, baseline)
    if name == "reinforce_plus_plus" or (name in ("gae", "turn_gae") and algorithm.whiten_advantages):
        constant = np.ptp(advantages) == 0
        advantages = (advantages - advantages.mean()) / math.sqrt(std(advantages) ** 2 + 1e-8) * (not constant)
    return advantages + taught, returns


def advantages_of_samples(
    batch: Batch, algorithm: Config, name: str, scores: Array, mini_batches: list[list[int]]
) -> Array:
    """Advantages of the samples and, if algorithm.filtration compares with them, of others, [N]."""
    trajectories = [sample.trajectory for sample in batch.samples] + [t for _, t, _ in batch.others]
    group_of = np.array([sample.group for sample in batch.samples] + [group for group, _, _ in batch.others])
    rewards = np.array([*scores, *(reward for _, _, reward in batch.others)])
    lengths = np.array([sum(sum(row.action_mask) for row in t.rows) for t in trajectories], dtype=float)
    groups = [np.flatnonzero(group_of == group) for group in np.unique(group_of)]
    if name == "gdpo":
        return gdpo(trajectories, groups, algorithm)[: len(scores)]
    result = np.zeros(len(rewards))
    varied = [group for group in groups if len(group) > 1 and np.ptp(rewards[group])]
    for group in varied:
        result[group] = PER_GROUP[name](rewards[group], lengths[group], algorithm)
    if name == "gpg" and varied:
        result *= len(rewards) / sum(len(group) for group in varied)  # arXiv 2504.02546, Eq. 7
    if name == "reinforce_plus_plus_baseline":
        result = standardize(result, 1e-8)
    if name == "magistral":
        for rows in mini_batches:
            inside = [i for i, sample in enumerate(batch.samples) if sample.row_numbers[0] in rows]
            result[inside] = standardize(result[inside], 0.0)
    return result[: len(scores)]


def gdpo(trajectories: list[Recorded], groups: list[Array], algorithm: Config) -> Array:
    """arXiv 2601.05242, Eq. 4 to 7: each reward is normalized in its group, their sum over the batch."""
    names = {name for t in trajectories for name in t.score.components}
    rewards = {name: np.array([t.score.component(name) for t in trajectories]) for name in names}
    for name, (other, threshold) in vars(algorithm.gdpo_conditions).items():
        rewards[name] = np.where([t.score.component(other) >= threshold for t in trajectories], rewards[name], 0.0)
    used = algorithm.gdpo_rewards or sorted(names - ({"accuracy"} if "task" in names else set()))
    total = np.zeros(len(trajectories))
    for name, weight in zip(used, algorithm.gdpo_weights or [1.0] * len(used), strict=True):
        for group in groups:
            total[group] += weight * standardize(rewards[name][group], 1e-4)
    return standardize(total, 1e-4)


def to_go(rewards: Array, gamma: float) -> Array:
    """G_k = R_k + gamma G_{k+1}."""
    result, running = np.zeros(len(rewards)), 0.0
    for k in reversed(range(len(rewards))):
        result[k] = running = rewards[k] + gamma * running
    return result


def gae(rewards: Array, values: Array, gamma: float, lam: float) -> Array:
    """arXiv 1506.02438, Eq. 16, with V = 0 after the last step."""
    return to_go(rewards + gamma * np.append(values[1:], 0.0) - values, gamma * lam)


Result = tuple[Array, Array]


def per_token_gae(batch: Batch, a: Config, tokens: Array, values: Array, scores: Array, baseline: float) -> Result:
    advantages = np.zeros(len(tokens))
    for order in (sample.in_time for sample in batch.samples):
        advantages[order] = gae(tokens[order], values[order], a.gamma, a.lam)
    return advantages, advantages + values


def reinforce(batch: Batch, a: Config, tokens: Array, values: Array, scores: Array, baseline: float) -> Result:
    """Rewards-to-go, minus a moving average (Williams, 1992) or the reward of a greedy answer (arXiv 2310.10505)."""
    returns, advantages = np.zeros(len(tokens)), np.zeros(len(tokens))
    for sample in batch.samples:
        returns[sample.in_time] = to_go(tokens[sample.in_time], a.gamma)
        subtracted = baseline if a.adv_estimator == "reinforce" and a.baseline_decay is not None else 0.0
        if a.adv_estimator == "remax":
            subtracted = batch.greedy[sample.group]
        advantages[sample.in_time] = returns[sample.in_time] - subtracted
    return advantages, returns


def per_turn(batch: Batch, a: Config, tokens: Array, values: Array, scores: Array, baseline: float) -> Result:
    """turn_gae, turn_group and gigpo: all tokens of a turn get its advantage."""
    rewards = [np.array([tokens[turn].sum() for turn in sample.turns]) for sample in batch.samples]
    firsts = [np.array([values[turn[0]] for turn in sample.turns]) for sample in batch.samples]
    returns = [to_go(reward, a.gamma) for reward in rewards]
    if a.adv_estimator == "turn_gae":
        advantages = [gae(r, v, a.gamma, a.lam) for r, v in zip(rewards, firsts, strict=True)]
        returns = [x + v for x, v in zip(advantages, firsts, strict=True)]
    else:
        members = defaultdict(list)
        for number, sample in enumerate(batch.samples):
            members[sample.group].append(number)
        compute = turn_group if a.adv_estimator == "turn_group" else gigpo
        advantages = compute(batch, a, returns, scores, members)
    result = np.zeros(len(tokens)), np.zeros(len(tokens))
    for sample, *of_turns in zip(batch.samples, advantages, returns, strict=True):
        for column, one in zip(result, of_turns, strict=True):
            for turn, value in zip(sample.turns, one, strict=True):
                column[turn] = value
    return result


def turn_group(batch: Batch, a: Config, returns: list[Array], scores: Array, members: Members) -> list[Array]:
    """The return of turn k minus the mean return from turn k of the group's other samples."""
    advantages = [np.zeros(len(one)) for one in returns]
    for group in members.values():
        for i in group:
            for k in range(len(returns[i])):
                others = [returns[j] for j in group if j != i]
                if a.turn_baseline == "return_alive":
                    others = [one for one in others if k < len(one)]
                reached = [float(one[k]) if k < len(one) else 0.0 for one in others]
                advantages[i][k] = (returns[i][k] - (np.mean(reached) if reached else 0.0)) * (len(group) > 1)
    return advantages


def gigpo(batch: Batch, a: Config, returns: list[Array], scores: Array, members: Members) -> list[Array]:
    """arXiv 2505.10978, Eq. 3, 7 and 8: advantage of the episode plus that among turns from the same state."""
    advantages = [np.zeros(len(one)) for one in returns]
    for group in members.values():
        episodes = group_normalize(scores[group], a, 1e-6, default=True)
        same = defaultdict(list)
        for i, episode in zip(group, episodes, strict=True):
            advantages[i] += episode
            for k, state in enumerate(batch.samples[i].states):
                same[state].append((i, k))
        for turns in same.values():
            steps = group_normalize(np.array([returns[i][k] for i, k in turns]), a, 1e-6, default=True)
            for (i, k), step in zip(turns, steps, strict=True):
                advantages[i][k] += a.gigpo_step_weight * step
    return advantages


PER_TOKEN: dict[str, Callable[..., Result]] = {
    "gae": per_token_gae,
    "reinforce": reinforce,
    "reinforce_plus_plus": reinforce,  # arXiv 2501.03262, Eq. 4 and 5; then whitened
    "remax": reinforce,
    "turn_gae": per_turn,
    "turn_group": per_turn,
    "gigpo": per_turn,
}
