"""Warnings derived from a run's metrics. Each cause is reported once, and again if it returns after a long absence.

Every rule is a pure function of the metrics of the last iterations. Warnings never change the run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, variance

WINDOW = 5  # iterations over which noisy metrics are averaged
HISTORY = 50  # iterations kept
CALM = 20  # iterations without a cause before it is reported again
FAILED = 0.05
TRUNCATED = 0.9
ZERO_VARIANCE = 0.8
COLLAPSED = 0.1  # nats per token
PROBE_MISMATCH = 0.1  # nats: mean log-prob mismatch of the probe after a publish
SOLVED = 0.9  # accuracy above which groups without variance are a success
HALF_WAY = 0.75  # accuracy below which low entropy is premature
LOST = 0.5  # of the best mean reward, or of its standard deviation over trajectories
NOISE = 4.0  # standard errors above which a drop is not chance
MIN_CHANGE = 1e-6  # nats per publish: smallest meaningful change
SAFE_K3 = 1e-2  # nats per token
SAFE_ESS = 0.8

Metrics = Mapping[str, float]


class MetricsAdvisor:
    """Checks the metrics of each iteration."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}  # last iteration of each cause
        self._recent: deque[Metrics] = deque(maxlen=HISTORY)

    def check(self, step: int, metrics: Metrics) -> list[str]:
        """Return new warnings after iteration `step`."""
        causes = [*_check_iteration(metrics), *_check_optimizer(metrics), *_check_mismatch(metrics)]
        if "critic/score/mean" in metrics:
            self._recent.append(metrics)
            recent = [*self._recent]
            causes += [
                *_check_groups(recent[-WINDOW:]),
                *_check_policy_change(recent[-WINDOW:]),
                *_check_reward(recent),
            ]
        new = [text for cause, text in causes if step - self._last.get(cause, -math.inf) > CALM]
        self._last |= {cause: step for cause, _ in causes}
        return [f"step {step}: {text}" for text in new]


def _check_iteration(metrics: Metrics) -> Iterator[tuple[str, str]]:
    """Yield (cause, warning) from a single iteration."""
    get = metrics.get
    if get("critic/advantages/share_zero", 0.0) == 1.0:
        low, high = get("critic/score/min", 0.0), get("critic/score/max", 0.0)
        why = f"all rewards are {low:g}" if low == high else "the samples of each prompt have equal rewards"
        yield (
            "zero",
            f"{why}: every advantage is 0 and the policy loss has no gradient. Check in rollouts/ that the reward "
            "function parses the answers, or use easier or harder prompts.",
        )
    if (share := get("outcome/grader_failed", 0.0)) > FAILED:
        yield (
            "grader",
            f"{share:.0%} of the trajectories have no reward because the grader failed (outcome/grader_failed); they "
            "are excluded from all means. See the field `reason` in rollouts/.",
        )
    if (share := get("outcome/environment_failed", 0.0)) > FAILED:
        yield (
            "environment",
            f"{share:.0%} of the trajectories have no reward because the environment failed "
            "(outcome/environment_failed). See the field `reason` in rollouts/.",
        )
    for name in sorted(name for name in metrics if name in ("val/failed", "val/failed_greedy")):
        if metrics[name] > FAILED:
            yield (
                name,
                f"{metrics[name]:.0%} of the validation samples failed ({name}); its metrics cover the others.",
            )
    if (gap := get("sync/probe_gap", 0.0)) > PROBE_MISMATCH:
        yield (
            "gap",
            f"after publishing, engine and trainer log-probs of the probe differ by {gap:.2g} nats on average "
            "(sync/probe_gap), although the weights are equal. This may be bfloat16 rounding; with model.dtype=float32 "
            "the run fails if it is not. Watch mismatch/*.",
        )
    if (share := get("end/time_limit", 0.0)) > 0:
        yield (
            "time",
            f"{share:.1%} of the episodes exceeded env.episode_timeout and are not trained on. Make the environment "
            "faster or increase the limit.",
        )
    if (share := get("response_length/clip_ratio", 0.0)) >= TRUNCATED:
        yield (
            "cut",
            f"{share:.0%} of the responses were truncated by the token limit. Increase data.max_response_length, or "
            "check in rollouts/ why the model does not stop.",
        )


def _check_optimizer(metrics: Metrics) -> Iterator[tuple[str, str]]:
    """Yield (cause, warning) about optimizer steps."""
    get = metrics.get
    for role, name in (("policy", "actor/steps_skipped"), ("critic", "critic/steps_skipped")):
        if count := get(name, 0.0):
            yield (
                name,
                f"{count:g} optimizer steps of the {role} were skipped because their gradient was not finite ({name}). "
                "Check rewards, advantages and log-ratios of the trajectories in rollouts/.",
            )
    if get("train/steps_skipped", 0.0):
        yield (
            "train/steps_skipped",
            "an optimizer step was skipped because its gradient was not finite (train/steps_skipped). Check for "
            "invalid examples, or lower optim.lr.",
        )
    if get("actor/grad_norm", 1.0) == 0.0 and get("critic/advantages/share_zero", 0.0) < 1.0:
        yield (
            "still",
            "the policy's gradient is exactly 0 although some advantages are not: the weights are corrupt (learning "
            "rate too high?), or every ratio is clipped. Resume from an earlier checkpoint.",
        )


def _check_mismatch(metrics: Metrics) -> Iterator[tuple[str, str]]:
    """Yield (cause, warning) about the log-prob mismatch between engine and trainer."""
    k3, ess = metrics.get("mismatch/k3", 0.0), metrics.get("mismatch/ess", 1.0)
    if k3 <= SAFE_K3 and ess >= SAFE_ESS:
        return
    numbers = (
        f"KL {k3:.1e} nats per token (safe: {SAFE_K3:.0e}), effective sample size {ess:.0%} (safe: {SAFE_ESS:.0%}). "
    )
    if metrics.get("staleness/max", 0.0) > 0:
        yield (
            "mismatch",
            f"trained tokens were sampled by old weights: {numbers}Lower trainer.max_staleness or the learning rate.",
        )
    else:
        yield (
            "mismatch",
            f"log-probs of engine and trainer differ: {numbers}Set algorithm.rollout_correction.method=tis, or use the "
            "trainer's dtype in the engine (actor_rollout_ref.rollout.dtype). mismatch/k3_at_* show whether the "
            "mismatch grows with the position.",
        )


def _check_policy_change(recent: Sequence[Metrics]) -> Iterator[tuple[str, str]]:
    """Yield (cause, warning) if optimizer steps do not change the policy. Not checked during warm-up."""
    stepped = [
        metrics
        for metrics in recent
        if "sync/probe_moved" in metrics
        and metrics.get("actor/optimizer_steps", 0.0) > metrics.get("actor/steps_skipped", 0.0)
        and metrics.get("critic/advantages/share_zero", 0.0) < 1.0
    ]
    if len(stepped) < WINDOW or stepped[-1].get("actor/lr", 0.0) > stepped[0].get("actor/lr", 0.0):
        return
    moved = fmean(metrics["sync/probe_moved"] for metrics in stepped)
    if moved < MIN_CHANGE:
        lr, norm = stepped[-1].get("actor/lr", 0.0), stepped[-1].get("actor/grad_norm", 0.0)
        yield (
            "unmoved",
            f"the policy does not change: over the last {WINDOW} iterations its log-probs of a fixed text changed by "
            f"{moved:.1e} nats per publish (sync/probe_moved), with learning rate {lr:.1e} and gradient norm "
            f"{norm:.1e}. Increase actor_rollout_ref.actor.optim.lr.",
        )


def _check_reward(recent: Sequence[Metrics]) -> Iterator[tuple[str, str]]:
    """Yield (cause, warning) if the mean reward has dropped far below its best, by more than chance."""
    rewards = [metrics["critic/score/mean"] for metrics in recent if "critic/score/mean" in metrics]
    spread = max((metrics.get("critic/score/std", 0.0) for metrics in recent), default=0.0)
    last, earlier = rewards[-WINDOW:], rewards[:-WINDOW]
    windows = [earlier[start : start + WINDOW] for start in range(len(earlier) - WINDOW + 1)]
    if not windows:
        return
    best = max(windows, key=fmean)
    noise = NOISE * math.sqrt((variance(best) + variance(last)) / WINDOW)
    if fmean(best) - fmean(last) > max(LOST * max(abs(fmean(best)), spread), noise):
        yield (
            "collapse",
            f"the reward has collapsed: {fmean(last):.3g} on average over the last {WINDOW} iterations, compared with "
            f"{fmean(best):.3g} at its best. Check actor/entropy, actor/grad_norm_max and rollouts/ at the drop, and "
            "resume from an earlier checkpoint with a lower learning rate (docs/troubleshooting.md).",
        )


def _check_groups(recent: Sequence[Metrics]) -> Iterator[tuple[str, str]]:
    """Yield (cause, warning) about groups and entropy, averaged over several iterations."""
    if len(recent) < WINDOW or "critic/advantages/share_zero" not in recent[-1]:
        return  # too early, or rewards are not trained on

    def mean(name: str, default: float) -> float:
        return fmean(metrics.get(name, default) for metrics in recent)

    equal, accuracy, entropy = (
        mean("groups/zero_variance", 0.0),
        mean("reward/accuracy", 1.0),
        mean("rollout/entropy", 1.0),
    )
    if equal >= ZERO_VARIANCE and accuracy < SOLVED:
        yield (
            "equal",
            f"{equal:.0%} of the groups of the last {WINDOW} iterations have zero reward variance at accuracy "
            f"{accuracy:.2f}, so they give no gradient. Use prompts closer to the model's ability, a larger "
            "env.rollout.n, a higher rollout.temperature, or algorithm.filter_groups.enable=true.",
        )
    if entropy < COLLAPSED and equal > 0.5 and accuracy < HALF_WAY:
        yield (
            "entropy",
            f"the entropy has collapsed: {entropy:.3f} nats per token, {equal:.0%} groups with zero variance, at "
            f"accuracy {accuracy:.2f}. Resume from an earlier checkpoint with a lower learning rate, clip_ratio_high "
            "above clip_ratio_low, entropy_coeff, or a KL to the reference.",
        )
