"""Time summary of a run: share of each phase, and the config key most likely to reduce it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

PREFIX = "timing/"
LARGE = 0.3  # share of a run above which a phase gets advice
REGULAR = 0.1  # the same for phases that can run less often
WAITS = 0.5  # share of generation time spent in tools
TAIL = 4.0  # ratio of p99 to median response length
MANY = 2.0  # micro-batches per optimizer step


class TimeSpent:
    """Sums phase times over iterations and keeps the last metrics."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.figures: dict[str, float] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of one iteration."""
        for name, value in metrics.items():
            if name.startswith(PREFIX) and name != f"{PREFIX}step":
                self.seconds[name.removeprefix(PREFIX)] += value
        self.figures |= metrics

    def lines(self) -> list[str]:
        """Format the summary; empty if no iteration ran."""
        total = sum(self.seconds.values())
        if total <= 0:
            return []
        longest_first = sorted(self.seconds.items(), key=lambda item: -item[1])
        shown = [f"{phase} {spent / total:.0%}" for phase, spent in longest_first if spent / total >= 0.005]
        rest = total - self.seconds.get("start", 0.0)  # without the one-time start
        shares = {phase: spent / rest for phase, spent in longest_first if phase != "start"} if rest > 0 else {}
        advice = suggest_key(shares, self.figures)
        return [f"time: {', '.join(shown)} of {total:,.1f} s", *([f"to speed up: {advice}"] if advice else [])]


def suggest_key(shares: Mapping[str, float], figures: Mapping[str, float]) -> str | None:
    """Suggest a config key for the largest phase, with the reason. Returns None if no phase dominates.

    shares: of the run's time without its start, by phase. figures: last metrics of the run.
    """
    bounds = {"validate": REGULAR, "checkpoint": REGULAR, "publish": REGULAR}
    known: dict[str, Any] = {
        "generate": _of_generation,
        "update": _of_update,
        "columns": _of_columns,
        "reward_model": _of_reward_model,
        "publish": _of_publish,
        "validate": _of_validation,
        "checkpoint": _of_checkpoints,
    }
    for phase, share in sorted(shares.items(), key=lambda item: -item[1]):
        if phase in known and share >= bounds.get(phase, LARGE):
            return f"{known[phase](figures)} ({phase} takes {share:.0%})"
    return None


def _of_generation(figures: Mapping[str, float]) -> str:
    calls = figures.get("tool/calls_per_turn", 0.0) * figures.get("num_turns/mean", 0.0)
    if calls * figures.get("tool/seconds", 0.0) > WAITS * figures.get("timing/generate", float("inf")):
        return "env.tool_limits: episodes wait longer for tools than for the engine"
    median, longest = figures.get("response_length/p50", 0.0), figures.get("response_length/p99", 0.0)
    if median and longest > TAIL * median:
        return (
            f"trainer.async_mode=carry: few long responses delay the others (p99 {longest:,.0f} tokens, median "
            f"{median:,.0f})"
        )
    return f"a larger {ROLLOUT}.num_engines if memory allows, or {ROLLOUT}.dtype=bfloat16"


def _of_update(figures: Mapping[str, float]) -> str:
    steps = figures.get("actor/optimizer_steps", 0.0)
    if steps and figures.get("batch/micro_batches", 0.0) >= MANY * steps:
        return f"a larger {ACTOR}.ppo_max_token_len_per_gpu: an optimizer step has several micro-batches"
    return (
        "a larger trainer.n_gpus_per_node, actor_rollout_ref.model.dtype=bfloat16, or "
        "actor_rollout_ref.model.enable_gradient_checkpointing=false if memory allows"
    )


def _of_columns(figures: Mapping[str, float]) -> str:
    if "actor/ref_kl" in figures or "actor/reward_kl_penalty_coeff" in figures:
        return f"{ACTOR}.use_kl_loss and algorithm.use_kl_in_reward: each needs a forward pass of the reference"
    return f"a larger {ACTOR}.ppo_max_token_len_per_gpu"


def _of_reward_model(figures: Mapping[str, float]) -> str:
    return "a larger reward_model.forward_max_token_len_per_gpu"


def _of_publish(figures: Mapping[str, float]) -> str:
    return "a larger data.train_batch_size: weights are synced once per iteration"


def _of_validation(figures: Mapping[str, float]) -> str:
    return "a larger trainer.test_freq or a smaller data.val_max_samples"


def _of_checkpoints(figures: Mapping[str, float]) -> str:
    return "a larger trainer.save_freq"
