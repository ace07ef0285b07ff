"""What a run's metrics should make one look at, in words: each cause is told once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

WINDOW = 5  # iterations over which what fluctuates is judged
FAILED = 0.05
CUT = 0.9
EQUAL = 0.8
COLLAPSED = 0.1  # nats a token
FAR = 0.1  # nats: mean gap of the probe after a publish
SOLVED = 0.9  # an accuracy from which equal groups and little entropy are success

Metrics = Mapping[str, float]


class Advisor:
    """Looks at each iteration's metrics. What it says goes to the console and decides nothing."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._recent: deque[Metrics] = deque(maxlen=WINDOW)

    def look(self, step: int, metrics: Metrics) -> list[str]:
        """What is new to tell after iteration `step`."""
        if "advantage/share_zero" in metrics:
            self._recent.append(metrics)
        causes = dict(_of_one(metrics)) | dict(_of_learning(metrics)) | dict(_of_several(self._recent))
        new = {cause: text for cause, text in causes.items() if cause not in self._told}
        self._told |= new.keys()
        return [f"step {step}: {text}" for text in new.values()]


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
    if get("actor/grad_norm", 1.0) == 0.0 and get("advantage/share_zero", 0.0) < 1.0:
        yield (
            "still",
            "the policy's gradient is exactly 0, though not every advantage is: the weights are ruined (a learning "
            "rate far too large?), or every ratio is clipped. Go back to an earlier checkpoint.",
        )


def _of_several(recent: deque[Metrics]) -> Iterator[tuple[str, str]]:
    """(cause, words) of what counts where it lasts."""
    if len(recent) < WINDOW:
        return

    def mean(name: str, default: float) -> float:
        return sum(metrics.get(name, default) for metrics in recent) / WINDOW

    equal, accuracy, entropy = mean("groups/equal", 0.0), mean("reward/accuracy", 1.0), mean("rollout/entropy", 1.0)
    if equal >= EQUAL and accuracy < SOLVED:
        yield (
            "equal",
            f"in {equal:.0%} of the groups of the last {WINDOW} iterations all samples had the same reward, at an "
            f"accuracy of {accuracy:.2f}: these groups teach nothing. Take prompts nearer to what the model can do, a "
            "larger env.rollout.n, a higher rollout.temperature, or algorithm.filter_groups.enable=true.",
        )
    if entropy < COLLAPSED and equal > 0.5 and accuracy < SOLVED:
        yield (
            "entropy",
            f"the policy hardly explores any more: entropy {entropy:.3f} nats a token, {equal:.0%} equal groups, at an "
            f"accuracy of {accuracy:.2f}. Go back to an earlier checkpoint with a lower learning rate, clip_ratio_high "
            "above clip_ratio_low, entropy_coeff, or a KL to the reference.",
        )
