"""Loss of one mini-batch, from log-probs [T] of each sample's tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alphaapollo.plugins.verify.reference.samples import Config, NotCovered, Sample

CLIP = {  # loss -> default bounds; of all others 0.2
    "gspo": (3e-4, 4e-4),
    "gspo_token": (3e-4, 4e-4),
    "cispo": (math.inf, 0.28),
    "gmpo": (0.4, 0.4),
    "dppo_kl": (0.05, 0.05),
}
OF_ENGINE = ("dppo_tv", "dppo_kl", "vespo")  # losses whose ratio is to the engine's log-probs


@dataclass
class Terms:
    """Columns of a sample's tokens, tensors [T] each. None: the loss does not need them."""

    sample: Sample
    logp: Tensor  # of the trained policy, with a gradient
    old: Tensor
    engine: Tensor
    advantages: Tensor
    ref: Any = None
    selected: Any = None  # tokens that clip_cov and kl_cov treat differently
    entropy: Any = None
    full_kl: Any = None  # KL(pi||ref) over the vocabulary
    divergence: Tensor | None = None  # from a teacher


def clipped(r: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    """arXiv 1707.06347, Eq. 7."""
    return -torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)


def policy_loss(x: Terms, actor: Config, kl_coef: float | None) -> tuple[Tensor, Tensor]:
    """Loss of each token [T], or of the sample [], and a penalty that rollout correction does not weight."""
    name, options, a, none = actor.policy_loss.loss_mode, actor.policy_loss, x.advantages, torch.zeros(())
    low, high = CLIP.get(name, (0.2, 0.2))
    low = next(b for b in (actor.clip_ratio_low, actor.clip_ratio, low) if b is not None)
    high = next(b for b in (actor.clip_ratio_high, actor.clip_ratio, high) if b is not None)
    d = (x.logp - x.old).clamp(-20, 20)
    r, constant = d.exp(), d.detach().exp()
    match name:
        case "ppo":
            loss, cap = clipped(r, a, low, high), actor.clip_ratio_c
            return loss if cap is None else torch.where(a < 0, loss.minimum(-cap * a), loss), none  # 1912.09729, Eq. 5
        case "ppo_kl":  # arXiv 1707.06347, Eq. 8, with the estimate r - 1 - log r
            return -r * a, (options.ppo_kl_coef if kl_coef is None else kl_coef) * (torch.expm1(d) - d)
        case "surrogate":  # arXiv 1502.05477, Eq. 14
            return -r * a, none
        case "reinforce" | "gpg":  # arXiv 2504.02546, Eq. 6
            return -a * x.logp, none
        case "cispo":  # arXiv 2506.13585, Eq. 4 to 7
            bounds = options.cispo_mask_low, options.cispo_mask_high
            keep_low, keep_high = (math.inf if bound is None else bound for bound in bounds)
            dropped = ((a > 0) & (constant > 1 + keep_high)) | ((a < 0) & (constant < 1 - keep_low))
            return -constant.clamp(1 - low, 1 + high) * a * x.logp * ~dropped, none
        case "sapo":  # arXiv 2511.20347, Eq. 5 and 6
            tau = torch.full_like(a, actor.tau_neg).masked_fill(a > 0, actor.tau_pos)
            return -4 / tau * torch.sigmoid(tau * (r - 1)) * a, none
        case "gspo":  # arXiv 2507.18071, Eq. 5 and 7
            return clipped((x.logp - x.old).mean().exp(), a.mean(), low, high), none
        case "gspo_token":  # arXiv 2507.18071, Eq. 13 and 14
            sequence = (x.logp - x.old).mean().exp().detach()
            return clipped(sequence * (x.logp - x.logp.detach()).exp(), a, low, high), none
        case "sequence_ppo":  # arXiv 2402.14740, section 3: the response is one action
            return clipped((x.logp - x.old).sum().clamp(-20, 20).exp(), a.mean(), low, high), none
        case "gmpo":  # arXiv 2507.20673, Eq. 3
            bounded = d.clamp(max=high) if a.mean() >= 0 else d.clamp(min=-low)
            return -a.mean() * bounded.mean().exp(), none
        case "dppo_tv" | "dppo_kl":  # arXiv 2602.04879, Eq. 12 to 14 and 23
            p, mu = x.logp.detach().exp(), x.old.exp()
            tv = (p - mu).abs()
            kl = mu * (mu / p).log() + torch.xlogy(1 - mu, 1 - mu) - torch.xlogy(1 - mu, 1 - p)
            far, away = tv if name == "dppo_tv" else kl, (a > 0) & (p > mu)
            dropped = (away & (far > high)) | ((a < 0) & (p < mu) & (far > low))
            weight = constant.clamp(max=actor.clip_ratio_c or math.inf)
            return -weight * a * (1 + x.logp - x.logp.detach()) * ~dropped, none
        case "vespo":  # arXiv 2602.10693, Eq. 17 and 20
            w = (x.logp.detach() - x.old).sum()
            kernels = options.vespo_positive, options.vespo_negative
            of_sign = [(k * w + decay * (1 - w.exp())).exp() for k, decay in kernels]
            weight = torch.where(a >= 0, of_sign[0], of_sign[1])
            return -weight * a * x.logp, none
        case "clip_cov":  # arXiv 2505.22617, Eq. 9 and 10
            return clipped(r, a, low, high) * ~x.selected, none
        case "kl_cov":  # arXiv 2505.22617, Eq. 11 and 12
            return -r * a, options.ppo_kl_coef * d.abs() * x.selected
    raise NotCovered(f"the policy loss {name}")


def count_wrongly_selected(logp: Tensor, advantages: Tensor, selected: Tensor, options: Config) -> int:
    """Count tokens that clip_cov or kl_cov should not have selected, and missing ones (arXiv 2505.22617, Eq. 9 to 12).
    All tensors [n], of the tokens of a mini-batch."""
    covariance = (advantages - advantages.mean()) * (logp - logp.mean())
    ratio = options.clip_cov_ratio if options.loss_mode == "clip_cov" else options.kl_cov_ratio
    count = max(1, int(ratio * len(logp)))
    if options.loss_mode == "clip_cov":
        allowed = (covariance > options.clip_cov_lb) & (covariance < options.clip_cov_ub)
        count = min(count, int(allowed.sum()))
    else:
        allowed = covariance >= covariance.sort(descending=True).values[count - 1]
    return int((selected & ~allowed).sum()) + abs(int(selected.sum()) - count)


def correction(x: Terms, options: Config) -> Tensor:
    """Weight of each token for the mismatch of engine and trainer (docs/algorithms/loss_parts.md), [T]."""
    d, weight = x.old - x.engine, torch.ones_like(x.old)
    if options.method:
        d = {"token": d, "sequence": d.sum().expand_as(d), "geometric": d.mean().expand_as(d)}[options.level]
        rho, low = d.clamp(-20, 20).exp(), options.low or 0.0
        high = math.inf if options.high is None else options.high
        weight = rho.clamp(low, high) if options.method == "tis" else rho * ((rho >= low) & (rho <= high))
    if options.off_policy_mask_threshold is not None:  # arXiv 2512.02556, Eq. 9
        far = (x.engine - x.logp.detach()).mean() > options.off_policy_mask_threshold
        weight = weight * ~((x.advantages < 0) & far)
    return weight


def reference_kl(x: Terms, kind: str) -> Tensor:
    """KL(pi||ref) of each token, with the gradient of its kind (docs/algorithms/loss_parts.md). [T]"""
    if kind == "full":
        kl: Tensor = x.full_kl
        return kl
    d = x.logp - x.ref
    if kind == "unbiased":  # arXiv 2512.02556, Eq. 7
        return (x.logp - x.engine).exp() * (torch.expm1(-d) + d)
    values = {"k1": d, "kl": d, "abs": d.abs(), "k2": d**2 / 2, "mse": d**2 / 2}
    value = values.get(kind.removesuffix("+"), torch.expm1(-d) + d)
    return d**2 / 2 - d.detach() ** 2 / 2 + value.detach() if kind.endswith("+") else value


def divergence(logp: Tensor, logq: Tensor, teacher: Config) -> Tensor:
    """Divergence of policy and teacher at each token (arXiv 2306.13649, section 2; with the k most probable tokens,
    arXiv 2601.20802, Eq. 11). logp, logq: [T, V] -> [T]"""
    if teacher.top_k is not None and teacher.top_k < logp.shape[1]:
        tokens = (logq if teacher.self_teacher.context is None else logp).detach().topk(teacher.top_k).indices
        kept = [x.gather(1, tokens) for x in (logp, logq)]
        logp, logq = (torch.cat([x, torch.log1p(-x.exp().sum(1, keepdim=True))], 1) for x in kept)

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p.exp() * (p - q)).sum(1)

    if teacher.divergence != "jsd":
        return kl(logp, logq) if teacher.divergence == "reverse" else kl(logq, logp)
    beta = teacher.beta
    mixture = torch.logaddexp(logq + math.log(beta), logp + math.log(1 - beta))
    return beta * kl(logq, mixture) + (1 - beta) * kl(logp, mixture)


def weigh(samples: list[Sample], config: Config, mode: str, of_loss: bool = True) -> list[float]:
    """Weight of each token of the samples of a mini-batch (docs/algorithms/loss_parts.md#aggregation)."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    cut = [of_loss and algorithm.overlong_filter and s.trajectory.end == "token_limit" for s in samples]
    n = [0 if is_cut else s.tokens.stop - s.tokens.start for s, is_cut in zip(samples, cut, strict=True)]
    in_group = {s.group: sum(m for other, m in zip(samples, n, strict=True) if other.group == s.group) for s in samples}
    horizon, count = actor.loss_scale_factor or config.data.max_response_length, len(samples)
    per_token = {
        "token-mean": lambda s, m: 1 / sum(n),
        "token-sum": lambda s, m: 1.0,
        "seq-mean-token-sum": lambda s, m: 1 / count,
        "seq-mean-token-mean": lambda s, m: 1 / (m * count),  # arXiv 2402.03300, Eq. 3
        "seq-mean-token-sum-norm": lambda s, m: 1 / (count * horizon),  # arXiv 2503.20783, section 3.2
        "group-mean-token-mean": lambda s, m: 1 / (in_group[s.group] * len(in_group)),
    }[mode]
    return [per_token(s, m) if m else 0.0 for s, m in zip(samples, n, strict=True)]


def further_factors(
    samples: list[Sample], config: Config, groups: dict[int, list[float]], num_in_batch: float
) -> list[float]:
    """Further weight of each sample of a mini-batch. groups: rewards of all samples by group. num_in_batch: samples of
    the batch that was planned, divided by its mini-batches."""
    algorithm, method, result = config.algorithm, config.algorithm.filtration.method, []
    for sample in samples:
        rewards, own, factor = groups[sample.group], sample.total, 1.0
        if method in ("best", "best_random", "best_worst") and min(rewards) < max(rewards):  # arXiv 2409.06957, Eq. 6
            best, worst = own == max(rewards), own == min(rewards)
            share = len(rewards) / max(1, rewards.count(own)) if best or method == "best_worst" else 0.0
            rest = len(rewards) / (len(rewards) - rewards.count(max(rewards)))
            factor = {
                "best": share * best,
                "best_random": (share * best + rest * (not best)) / 2,
                "best_worst": share * (best + worst) / 2,
            }[method]
        filters, mode = algorithm.filter_groups, config.actor_rollout_ref.actor.loss_agg_mode
        if filters.enable and filters.mode == "reweight" and mode == "token-sum":
            factor *= num_in_batch / len(samples)
        result.append(factor)
    return result


def loss_of_sample(
    x: Terms, of_token: float, of_sample: float, config: Config, kl_coef: float | None, of_teacher: float = 0.0
) -> Tensor:
    """Share of a sample in the loss of its mini-batch, given the weight of its tokens, of its one loss, and of its
    divergences from a teacher."""
    actor, teacher = config.actor_rollout_ref.actor, config.teacher
    loss, penalty = policy_loss(x, actor, kl_coef)
    weight = correction(x, config.algorithm.rollout_correction)
    if loss.ndim == 0:
        total = of_sample * (loss * weight.mean() + penalty)
    else:
        total = of_token * (loss * weight + penalty).sum()
    if actor.entropy_coeff:
        total = total - of_token * actor.entropy_coeff * x.entropy.sum()
    if actor.use_kl_loss:
        total = total + of_token * actor.kl_loss_coef * reference_kl(x, actor.kl_loss_type).sum()
    if x.divergence is not None:
        ratio = (x.logp.detach() - x.old).exp()  # arXiv 2601.20802, is_clip of its code
        cap = teacher.self_teacher.max_ratio if teacher.self_teacher.context else None
        of_ratio = torch.ones_like(ratio) if cap is None else ratio.clamp(max=cap)
        total = total + teacher.coef * of_teacher * (of_ratio * x.divergence).sum()
    return total


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Clipped loss of a critic, [T] each (OpenAI baselines; without clip, arXiv 1707.06347, Eq. 9)."""
    bounded = values if clip is None else values.clamp(old - clip, old + clip)
    return torch.maximum((values - returns) ** 2, (bounded - returns) ** 2) / 2
