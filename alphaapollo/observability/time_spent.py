"""Where a run's time went, in the console's last lines: shares by phase, and the key most worth turning."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

PREFIX = "timing/"
LARGE = 0.3  # of a run: a phase that is worth a look
REGULAR = 0.1  # of a run: the same for what comes now and then, and can come less often
WAITS = 0.5  # of the time of generation that an episode spends in its tools
TAIL = 4.0  # p99 of the lengths over their median
MANY = 2.0  # micro-batches an optimiser step


class TimeSpent:
    """Adds up the phases of the iterations, and remembers what the last one's metrics said."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.figures: dict[str, float] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """The metrics of one iteration."""
        for name, value in metrics.items():
            if name.startswith(PREFIX) and name != f"{PREFIX}step":
                self.seconds[name.removeprefix(PREFIX)] += value
        self.figures |= metrics

    def lines(self) -> list[str]:
        """Nothing where no iteration was made."""
        total = sum(self.seconds.values())
        if total <= 0:
            return []
        longest_first = sorted(self.seconds.items(), key=lambda item: -item[1])
        shown = [f"{phase} {spent / total:.0%}" for phase, spent in longest_first if spent / total >= 0.005]
        rest = total - self.seconds.get("start", 0.0)  # a start is made once
        shares = {phase: spent / rest for phase, spent in longest_first if phase != "start"} if rest > 0 else {}
        advice = most_worth_turning(shares, self.figures)
        return [f"time: {', '.join(shown)} of {total:,.1f} s", *([f"most worth turning: {advice}"] if advice else [])]


def most_worth_turning(shares: Mapping[str, float], figures: Mapping[str, float]) -> str | None:
    """The key that the largest of the phases asks for, with the reason; None where no phase stands out.

    shares: of the run's time without its start, by phase. figures: the last metrics of the run.
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
    calls = figures.get("tool/calls_a_turn", 0.0) * figures.get("rollout/turns_mean", 0.0)
    if calls * figures.get("tool/seconds", 0.0) > WAITS * figures.get("timing/generate", float("inf")):
        return "env.tool_limits, for the tools are waited for more than the engine"
    median, longest = figures.get("response/length_p50", 0.0), figures.get("response/length_p99", 0.0)
    if median and longest > TAIL * median:
        return (
            f"trainer.async_mode=carry, for a few long answers hold all others up: the longest of a hundred has "
            f"{longest:,.0f} tokens, the median {median:,.0f}"
        )
    return f"{ROLLOUT}.num_engines where there is room for more, then {ROLLOUT}.dtype=bfloat16"


def _of_update(figures: Mapping[str, float]) -> str:
    steps = figures.get("actor/optimizer_steps", 0.0)
    if steps and figures.get("batch/micro_batches", 0.0) >= MANY * steps:
        return f"{ACTOR}.ppo_max_token_len_per_gpu, a larger one: an optimiser step has several micro-batches"
    return (
        "trainer.n_gpus_per_node, then actor_rollout_ref.model.dtype=bfloat16, and "
        "actor_rollout_ref.model.enable_gradient_checkpointing=false where memory allows it"
    )


def _of_columns(figures: Mapping[str, float]) -> str:
    if "actor/ref_kl" in figures or "kl/reward_coef" in figures:
        return f"{ACTOR}.use_kl_loss and algorithm.use_kl_in_reward: each needs a pass of the reference"
    return f"{ACTOR}.ppo_max_token_len_per_gpu, a larger one"


def _of_reward_model(figures: Mapping[str, float]) -> str:
    return "reward_model.forward_max_token_len_per_gpu, a larger one"


def _of_publish(figures: Mapping[str, float]) -> str:
    return "data.train_batch_size, a larger one: weights travel once an iteration"


def _of_validation(figures: Mapping[str, float]) -> str:
    return "trainer.test_freq, a larger one, or a smaller data.val_max_samples"


def _of_checkpoints(figures: Mapping[str, float]) -> str:
    return "trainer.save_freq, a larger one"
