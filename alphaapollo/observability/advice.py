"""Warn about alarming metrics of a run, e.g. a collapsed reward.

A warning is shown once, and again if its cause returns after CALM iterations without it. Every check is a pure function
of the metrics of the last iterations. Warnings never change the run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, variance

WINDOW = 5  # iterations over which noisy metrics are averaged
HISTORY = 50  # iterations whose metrics are stored
CALM = 20  # a cause is reported again after this many iterations without it
ZERO_VARIANCE = 0.8  # share of groups with zero reward variance that causes a warning
LOW_ENTROPY = 0.1  # nats per token; lower entropy may be a collapse
FALLEN_SHARE = 0.5  # share of the first iteration's entropy; higher entropy is no collapse
SOLVED_ACCURACY = 0.9  # accuracy from which groups without variance are a success
LOW_ACCURACY = 0.75  # accuracy below which low entropy is premature
LARGE_DROP = 0.5  # drop that causes a warning, relative to the best mean reward or its standard deviation
NOISE_ERRORS = 4.0  # standard errors above which a drop is not chance
MANY_TRUNCATED = 0.9  # share of truncated responses that causes a warning
MIN_CHANGE = 1e-6  # nats per publish: smallest meaningful change
MAX_CHANGE = 2.0  # nats per publish; a larger change of a fixed text destroys the policy
BROKEN_EFFECTS = ("zero", "equal", "entropy", "truncated")  # causes that follow from a larger change
MAX_Z = 5.0  # standard deviations
SAFE_K3 = 1e-2  # nats per token; largest safe KL between engine and trainer
SAFE_ESS = 0.8  # smallest safe effective sample size, relative

SKIPPED = "{:g} optimizer steps were skipped because the gradient was not finite ({name}). "
VALIDATION_FAILED = "{:.0%} of the validation samples failed ({name}). Validation metrics exclude them."
LIMITS: dict[str, tuple[float, str]] = {  # metric -> (largest normal value, warning about larger values)
    "outcome/grader_failed": (
        0.05,
        "{:.0%} of the trajectories have no reward because the grader failed, e.g. {reason}. See rollouts/.",
    ),
    "outcome/environment_failed": (
        0.05,
        "{:.0%} of the trajectories have no reward because the environment failed, e.g. {reason}. See rollouts/.",
    ),
    "val/failed": (0.05, VALIDATION_FAILED),
    "val/failed_greedy": (0.05, VALIDATION_FAILED),
    "sync/probe_gap": (
        0.1,
        "after publishing, engine and trainer log-probs of the probe differ by {:.2g} nats on average, although the "
        "weights are equal. With model.dtype=float32 the run stops if rounding cannot explain this.",
    ),
    "end/time_limit": (
        0.0,
        "{:.1%} of the episodes exceeded env.episode_timeout and are not trained on. Increase it, or make the "
        "environment faster.",
    ),
    "actor/steps_skipped": (0.0, SKIPPED + "Check rewards, advantages and log-ratios in rollouts/."),
    "critic/steps_skipped": (0.0, SKIPPED + "Check rewards and returns in rollouts/."),
    "train/steps_skipped": (0.0, SKIPPED + "Check for invalid examples, or lower optim.lr."),
}

Metrics = Mapping[str, float]
Warnings = Iterator[tuple[str, str]]  # (cause, warning)


class MetricsAdvisor:
    """Advisor that warns about alarming metrics."""

    def __init__(self) -> None:
        self._last_present: dict[str, int] = {}  # last iteration in which each cause was present
        self._recent: deque[Metrics] = deque(maxlen=HISTORY)

    def list_warnings(self, step: int, metrics: Metrics, failure_reason: str = "") -> list[str]:
        """Check the metrics of iteration `step`. Returns the warnings whose cause was not present in the last CALM
        iterations. `failure_reason`: why a trajectory of the iteration failed."""
        warnings = dict(_check_iteration(metrics, failure_reason or "no reason recorded"))
        if "critic/score/mean" in metrics:  # fine-tuning has no rewards
            self._recent.append(metrics)
            checks = (_check_truncation, _check_groups, _check_policy_change, _check_reward, _check_accuracy)
            for check in checks:
                warnings |= check([*self._recent])
            if any(map(_is_broken, self._recent)):
                warnings = {cause: text for cause, text in warnings.items() if cause not in BROKEN_EFFECTS}
        new = [text for cause, text in warnings.items() if step - self._last_present.get(cause, -math.inf) > CALM]
        self._last_present |= dict.fromkeys(warnings, step)
        return [f"step {step}: {text}" for text in new]


def _check_iteration(metrics: Metrics, failure_reason: str) -> Warnings:
    """Check failures, truncation, zero gradients and log-prob mismatch in one iteration."""
    for name, (limit, text) in LIMITS.items():
        if metrics.get(name, limit) > limit:
            yield name, text.format(metrics[name], name=name, reason=failure_reason)
    if metrics.get("critic/advantages/share_zero", 0.0) == 1.0:
        check = "Check with alphaapollo samples RUN that the reward function reads the answers, or use easier prompts."
        fix = "Use harder prompts." if metrics.get("reward/accuracy", 0.0) >= SOLVED_ACCURACY else check
        yield (
            "zero",
            "the samples of each prompt have equal rewards: every advantage is 0 and the policy loss has no gradient. "
            f"{fix}",
        )
    elif metrics.get("actor/grad_norm", 1.0) == 0.0 and metrics.get("groups/zero_variance", 0.0) < 1.0:
        yield (
            "gradient",
            "the policy's gradient is exactly 0 although some advantages are not: the weights are corrupt, or every "
            "ratio is clipped. Resume from an earlier checkpoint with a lower learning rate.",
        )
    for name in ("sampling/z", "sampling/repetition_z", "sampling/run_z", "sampling/run_repetition_z"):
        if abs(z := metrics.get(name, 0.0)) > MAX_Z:
            found = "repeat each other" if "repetition" in name else f"are {'more' if z > 0 else 'less'} probable"
            yield (
                "sampling",
                f"the engines' tokens are not samples of the policy: they {found} by {abs(z):.0f} standard deviations "
                f"({name}). Check temperature, top_p, seeds and weights of the engines (docs/verify.md#sampling).",
            )
    k3, ess = metrics.get("mismatch/k3", 0.0), metrics.get("mismatch/ess", 1.0)
    if not (k3 <= SAFE_K3 and ess >= SAFE_ESS):  # also true for NaN
        is_stale = metrics.get("staleness/max", 0.0) > 0
        fix = "Lower trainer.max_staleness" if is_stale else "Set algorithm.rollout_correction.method=tis"
        fix = "Lower data.reuse.max_age" if metrics.get("reuse/groups") else fix
        yield (
            "mismatch",
            f"log-probs of engine and trainer differ: KL {k3:.1e} nats per token (safe: {SAFE_K3:.0e}), effective "
            f"sample size {ess:.0%} (safe: {SAFE_ESS:.0%}). {fix} (docs/algorithms/loss_parts.md).",
        )


def _check_truncation(recent: Sequence[Metrics]) -> Warnings:
    """Check that responses end. If they did before, when the reward was higher, the limit is not the cause."""
    first, last = recent[0], recent[-1]
    before, now = (each.get("response_length/clip_ratio", 0.0) for each in (first, last))
    fix = (
        "Increase data.max_response_length. If texts in rollouts/ repeat a special token, add its id to eos_token_id "
        "in the model's generation_config.json."
    )
    if before < now / 2 and last["critic/score/mean"] < first["critic/score/mean"]:
        fix = (
            f"It was {before:.0%} when the reward was higher: the policy no longer ends its answers. Resume from an "
            f"earlier checkpoint with a learning rate below {last.get('actor/lr', 0.0):.1e} (docs/debugging.md)."
        )
    if now > MANY_TRUNCATED:
        yield "truncated", f"{now:.0%} of the responses were truncated by the token limit. {fix}"


def _is_broken(metrics: Metrics) -> bool:
    return metrics.get("sync/probe_moved", 0.0) > MAX_CHANGE


def _check_policy_change(recent: Sequence[Metrics]) -> Warnings:
    """Check that optimizer steps change the policy, except during learning rate warm-up, and do not destroy it."""
    if _is_broken(last := recent[-1]):
        yield (
            "broken",
            f"one update changed the policy's log-probs of a fixed text by {last['sync/probe_moved']:.1f} nats on "
            f"average (sync/probe_moved; safe: below {MAX_CHANGE:g}): the policy is destroyed. Start again with "
            f"actor_rollout_ref.actor.optim.lr below {last.get('actor/lr', 0.0):.1e} (docs/debugging.md).",
        )
    stepped = [
        metrics
        for metrics in recent[-WINDOW:]
        if "sync/probe_moved" in metrics
        and metrics.get("actor/optimizer_steps", 0.0) > metrics.get("actor/steps_skipped", 0.0)
        and metrics.get("critic/advantages/share_zero", 0.0) < 1.0
    ]
    if len(stepped) < WINDOW or (lr := stepped[-1].get("actor/lr", 0.0)) > stepped[0].get("actor/lr", 0.0):  # warm-up
        return
    if (moved := fmean(metrics["sync/probe_moved"] for metrics in stepped)) < MIN_CHANGE:
        yield (
            "unmoved",
            f"the policy does not change: in {WINDOW} iterations its log-probs of a fixed text changed by "
            f"{moved:.1e} nats per publish (sync/probe_moved), with learning rate {lr:.1e}. "
            "Increase actor_rollout_ref.actor.optim.lr.",
        )


def _check_reward(recent: Sequence[Metrics]) -> Warnings:
    """Check that the mean reward has not dropped far below its best value, beyond noise."""
    spread = max(metrics.get("critic/score/std", 0.0) for metrics in recent)
    if drop := _find_drop([metrics["critic/score/mean"] for metrics in recent], spread):
        _, high, low = drop
        yield (
            "collapse",
            f"the reward has collapsed: {low:.3g} on average over the last {WINDOW} iterations, compared with "
            f"{high:.3g} at its best. Resume from an earlier checkpoint with a lower learning rate "
            "(docs/debugging.md).",
        )


def _check_accuracy(recent: Sequence[Metrics]) -> Warnings:
    """Check that accuracy has not dropped far below its best value, beyond noise, in a run with a rising reward."""
    with_accuracy = [metrics for metrics in recent if "reward/accuracy" in metrics]
    if not (drop := _find_drop([metrics["reward/accuracy"] for metrics in with_accuracy])):
        return
    start, high, low = drop
    windows = with_accuracy[start : start + WINDOW], with_accuracy[-WINDOW:]
    before, now = (fmean(metrics["critic/score/mean"] for metrics in window) for window in windows)
    if now > before:
        yield (
            "exploited",
            f"accuracy has fallen to {low:.2f} from {high:.2f} at its best, while the reward rises: the "
            "policy earns another part of the reward. See reward/component/ and read samples (docs/debugging.md).",
        )


def _find_drop(values: Sequence[float], spread: float = 0.0) -> tuple[int, float, float] | None:
    """Return start and mean of the best window, and the mean of the last window; None unless the last mean is far below
    the best one, relative to the best mean and to `spread`, and beyond noise."""
    windows = [values[start : start + WINDOW] for start in range(len(values) - 2 * WINDOW + 1)]
    if not windows:
        return None
    best, last = max(windows, key=fmean), values[-WINDOW:]
    noise = NOISE_ERRORS * math.sqrt((variance(best) + variance(last)) / WINDOW)  # largest difference by chance
    high, low = fmean(best), fmean(last)
    return (windows.index(best), high, low) if high - low > max(LARGE_DROP * max(abs(high), spread), noise) else None


def _check_groups(recent: Sequence[Metrics]) -> Warnings:
    """Check whether, over several iterations, many groups have equal rewards or the entropy is low."""
    if len(recent) < WINDOW or "critic/advantages/share_zero" not in recent[-1]:
        return  # too few iterations, or the algorithm does not train on rewards
    start, window = recent[0].get("rollout/entropy", 1.0), recent[-WINDOW:]
    zero_variance = fmean(metrics.get("groups/zero_variance", 0.0) for metrics in window)
    accuracy = fmean(metrics.get("reward/accuracy", 0.0) for metrics in window)
    entropy = fmean(metrics.get("rollout/entropy", 1.0) for metrics in window)
    if zero_variance >= ZERO_VARIANCE and accuracy < SOLVED_ACCURACY:
        yield (
            "equal",
            f"{zero_variance:.0%} of the groups of the last {WINDOW} iterations have zero reward variance and "
            "therefore no gradient. Use prompts closer to the model's ability, a larger env.rollout.n, or "
            "algorithm.filter_groups.enable=true.",
        )
    if entropy < min(LOW_ENTROPY, FALLEN_SHARE * start) and zero_variance > 0.5 and accuracy < LOW_ACCURACY:
        yield (
            "entropy",
            f"the entropy has collapsed: {entropy:.3f} nats per token, {zero_variance:.0%} groups with zero variance"
            + (f", at accuracy {accuracy:.2f}" if "reward/accuracy" in window[-1] else "")
            + ". Resume from an earlier checkpoint with a lower learning rate "
            "(docs/debugging.md).",
        )
