"""What a run's metrics should make one look at, in words: each cause is told once, and anew after it was gone for long.

Every rule is a function of the last iterations' metrics. Nothing in the run reads what it says.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, variance

WINDOW = 5  # iterations over which what fluctuates is judged
HISTORY = 50  # iterations that are remembered
CALM = 20  # iterations without a cause after which it is news again
FAILED = 0.05
CUT = 0.9
EQUAL = 0.8
COLLAPSED = 0.1  # nats a token
FAR = 0.1  # nats: mean gap of the probe after a publish
SOLVED = 0.9  # an accuracy from which equal groups are success
HALF_WAY = 0.75  # an accuracy before which little entropy comes too early
LOST = 0.5  # of the best mean reward, or of its spread over trajectories
NOISE = 4.0  # standard errors that tell a loss from chance
STILL = 1e-6  # nats a publish: the least that moves anything
SAFE_K3 = 1e-2  # nats a token
SAFE_ESS = 0.8

Metrics = Mapping[str, float]


class Advisor:
    """Looks at each iteration's metrics. What it says goes to the console and decides nothing."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}  # iteration in which a cause was last there
        self._recent: deque[Metrics] = deque(maxlen=HISTORY)

    def look(self, step: int, metrics: Metrics) -> list[str]:
        """What is new to tell after iteration `step`."""
        causes = [*_of_one(metrics), *_of_learning(metrics), *_of_engine(metrics)]
        if "reward/mean" in metrics:
            self._recent.append(metrics)
            recent = [*self._recent]
            causes += [*_of_several(recent[-WINDOW:]), *_of_the_policy(recent[-WINDOW:]), *_of_reward(recent)]
        new = [text for cause, text in causes if step - self._last.get(cause, -math.inf) > CALM]
        self._last |= {cause: step for cause, _ in causes}
        return [f"step {step}: {text}" for text in new]


def _of_one(metrics: Metrics) -> Iterator[tuple[str, str]]:
    """(cause, words) of what needs no second look."""
    get = metrics.get
    if get("advantage/share_zero", 0.0) == 1.0:
        low, high = get("reward/min", 0.0), get("reward/max", 0.0)
        why = f"all rewards are {low:g}" if low == high else "the samples of each prompt have equal rewards"
        yield (
            "zero",
            f"{why}: every advantage is 0, and the policy loss has no gradient. Look at rollouts/ (does the reward "
            "function read the answers?), and take easier or harder prompts.",
        )
    if (share := get("outcome/grader_failed", 0.0)) > FAILED:
        yield (
            "grader",
            f"{share:.0%} of the trajectories have no reward because the grader failed (outcome/grader_failed); they "
            "are left out of every mean. The field `reason` in rollouts/ says why.",
        )
    if (share := get("outcome/environment_failed", 0.0)) > FAILED:
        yield (
            "environment",
            f"{share:.0%} of the trajectories have no reward because the environment failed "
            "(outcome/environment_failed). The field `reason` in rollouts/ says why.",
        )
    for name in sorted(name for name in metrics if name in ("val/failed", "val/failed_greedy")):
        if metrics[name] > FAILED:
            yield (
                name,
                f"{metrics[name]:.0%} of the validation's samples failed ({name}): its figures are of the others.",
            )
    if (gap := get("sync/probe_gap", 0.0)) > FAR:
        yield (
            "gap",
            f"after publishing, engine and trainer differ by {gap:.2g} nats on average over the probe's tokens "
            "(sync/probe_gap), though the engine holds the trainer's weights. That may be bfloat16's rounding; with "
            "model.dtype=float32 the run ends where it is not. Watch mismatch/*.",
        )
    if (share := get("end/time_limit", 0.0)) > 0:
        yield (
            "time",
            f"{share:.1%} of the episodes ended because their environment took over env.episode_timeout; they are not "
            "trained on. Make it faster, or raise the limit.",
        )
    if (share := get("response/truncated", 0.0)) >= CUT:
        yield (
            "cut",
            f"{share:.0%} of the responses were cut by the token limit before they ended. Raise "
            "data.max_response_length, or look in rollouts/ for why the model does not stop.",
        )


def _of_learning(metrics: Metrics) -> Iterator[tuple[str, str]]:
    """The same of the optimiser's steps."""
    get = metrics.get
    for role, name in (("policy", "actor/steps_skipped"), ("critic", "critic/steps_skipped")):
        if count := get(name, 0.0):
            yield (
                name,
                f"{count:g} optimiser steps of the {role} were left out, for their gradient was not finite ({name}); "
                "rollouts/ has the trajectories. Look for huge rewards, advantages or log-ratios.",
            )
    if get("train/steps_skipped", 0.0):
        yield (
            "train/steps_skipped",
            "an optimiser step was left out, for its gradient was not finite (train/steps_skipped). Look for damaged "
            "examples, or lower optim.lr.",
        )
    if get("actor/grad_norm", 1.0) == 0.0 and get("advantage/share_zero", 0.0) < 1.0:
        yield (
            "still",
            "the policy's gradient is exactly 0, though not every advantage is: the weights are ruined (a learning "
            "rate far too large?), or every ratio is clipped. Go back to an earlier checkpoint.",
        )


def _of_engine(metrics: Metrics) -> Iterator[tuple[str, str]]:
    """The same of the gap between who sampled and who learns."""
    k3, ess = metrics.get("mismatch/k3", 0.0), metrics.get("mismatch/ess", 1.0)
    if k3 <= SAFE_K3 and ess >= SAFE_ESS:
        return
    figures = (
        f"KL {k3:.1e} nats a token (safe: {SAFE_K3:.0e}), effective sample size {ess:.0%} (safe: {SAFE_ESS:.0%}). "
    )
    if metrics.get("staleness/max", 0.0) > 0:
        yield (
            "mismatch",
            f"the trained tokens are of weights far behind: {figures}Lower trainer.max_staleness or the learning rate.",
        )
    else:
        yield (
            "mismatch",
            f"engine and trainer disagree: {figures}Set algorithm.rollout_correction.method=tis, or bring the engine's "
            "arithmetic nearer (actor_rollout_ref.rollout.dtype); mismatch/k3_at_* say whether it grows with the "
            "position.",
        )


def _of_the_policy(recent: Sequence[Metrics]) -> Iterator[tuple[str, str]]:
    """(cause, words) where steps are made and nothing comes of them. While the learning rate rises that is no news."""
    stepped = [
        metrics
        for metrics in recent
        if "sync/probe_moved" in metrics
        and metrics.get("actor/optimizer_steps", 0.0) > metrics.get("actor/steps_skipped", 0.0)
        and metrics.get("advantage/share_zero", 0.0) < 1.0
    ]
    if len(stepped) < WINDOW or stepped[-1].get("actor/lr", 0.0) > stepped[0].get("actor/lr", 0.0):
        return
    moved = fmean(metrics["sync/probe_moved"] for metrics in stepped)
    if moved < STILL:
        lr, norm = stepped[-1].get("actor/lr", 0.0), stepped[-1].get("actor/grad_norm", 0.0)
        yield (
            "unmoved",
            f"the policy does not move: in the last {WINDOW} iterations its log-probs of a fixed text changed by "
            f"{moved:.1e} nats a publish (sync/probe_moved), with a learning rate of {lr:.1e} and a gradient norm of "
            f"{norm:.1e}. Raise actor_rollout_ref.actor.optim.lr.",
        )


def _of_reward(recent: Sequence[Metrics]) -> Iterator[tuple[str, str]]:
    """(cause, words) where the mean reward has fallen far below what it was, and by more than chance."""
    rewards = [metrics["reward/mean"] for metrics in recent if "reward/mean" in metrics]
    spread = max((metrics.get("reward/std", 0.0) for metrics in recent), default=0.0)
    last, earlier = rewards[-WINDOW:], rewards[:-WINDOW]
    windows = [earlier[start : start + WINDOW] for start in range(len(earlier) - WINDOW + 1)]
    if not windows:
        return
    best = max(windows, key=fmean)
    noise = NOISE * math.sqrt((variance(best) + variance(last)) / WINDOW)
    if fmean(best) - fmean(last) > max(LOST * max(abs(fmean(best)), spread), noise):
        yield (
            "collapse",
            f"the reward has collapsed: {fmean(last):.3g} on average over the last {WINDOW} iterations, after "
            f"{fmean(best):.3g} over {WINDOW} of the {len(earlier)} before. Look at actor/entropy, actor/grad_norm_max "
            "and rollouts/ where it fell, and go back to a checkpoint from before with a lower learning rate "
            "(docs/troubleshooting.md).",
        )


def _of_several(recent: Sequence[Metrics]) -> Iterator[tuple[str, str]]:
    """(cause, words) of what counts where it lasts."""
    if len(recent) < WINDOW or "advantage/share_zero" not in recent[-1]:
        return  # too early; or nothing is learnt from rewards

    def mean(name: str, default: float) -> float:
        return fmean(metrics.get(name, default) for metrics in recent)

    equal, accuracy, entropy = (
        mean("groups/zero_variance", 0.0),
        mean("reward/accuracy", 1.0),
        mean("rollout/entropy", 1.0),
    )
    if equal >= EQUAL and accuracy < SOLVED:
        yield (
            "equal",
            f"in {equal:.0%} of the groups of the last {WINDOW} iterations all samples had the same reward, at an "
            f"accuracy of {accuracy:.2f}: these groups teach nothing. Take prompts nearer to what the model can do, a "
            "larger env.rollout.n, a higher rollout.temperature, or algorithm.filter_groups.enable=true.",
        )
    if entropy < COLLAPSED and equal > 0.5 and accuracy < HALF_WAY:
        yield (
            "entropy",
            f"the policy hardly explores any more: entropy {entropy:.3f} nats a token, {equal:.0%} equal groups, at an "
            f"accuracy of {accuracy:.2f}. Go back to an earlier checkpoint with a lower learning rate, clip_ratio_high "
            "above clip_ratio_low, entropy_coeff, or a KL to the reference.",
        )
