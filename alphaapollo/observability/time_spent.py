"""Summarize the time of a run: share of each phase, and the config key that most likely reduces it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

PREFIX = "timing/"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SUGGESTIONS = {  # phase -> (share of the run that is large, changes that reduce it)
    "generate": (
        0.3,
        f"a larger {ROLLOUT}.num_engines if memory allows, {ROLLOUT}.dtype=bfloat16, or trainer.async_mode=carry if "
        "few long responses delay the others",
    ),
    "update": (0.3, f"a larger {ACTOR}.ppo_max_token_len_per_gpu or trainer.n_gpus_per_node"),
    "columns": (0.3, f"a larger {ACTOR}.ppo_max_token_len_per_gpu"),
    "reward_model": (0.3, "a larger reward_model.forward_max_token_len_per_gpu"),
    "publish": (0.1, "a larger data.train_batch_size: weights are synced once per iteration"),
    "validate": (0.1, "a larger trainer.test_freq or a smaller data.val_max_samples"),
    "checkpoint": (0.1, "a larger trainer.save_freq"),
}


class TimeSummary:
    """Summary of the time that a run spends in each phase (generate, update, ...)."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the timing metrics of one iteration."""
        for name, value in metrics.items():
            if name.startswith(PREFIX) and name != f"{PREFIX}step":
                self.seconds[name.removeprefix(PREFIX)] += value

    def format_lines(self) -> list[str]:
        """Return the lines to print at the end of the run; empty if no iteration ran."""
        total = sum(self.seconds.values())
        if total <= 0:
            return []
        longest_first = sorted(self.seconds.items(), key=lambda item: -item[1])
        shown = [f"{phase} {spent / total:.0%}" for phase, spent in longest_first if spent / total >= 0.005]
        lines = [f"time: {', '.join(shown)} of {total:,.1f} s"]
        rest = total - self.seconds.get("start", 0.0)  # without the start, which happens once
        for phase, spent in longest_first:
            bound, suggestion = SUGGESTIONS.get(phase, (1.0, ""))
            if suggestion and spent >= bound * rest:
                return [*lines, f"to speed up: {suggestion} ({phase} takes {spent / rest:.0%})"]
        return lines
