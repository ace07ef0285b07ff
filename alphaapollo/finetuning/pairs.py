"""Shared parts of preference and reward-model training: batches of pairs, shared prompts, accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from alphaapollo.config.schema import PairData
from alphaapollo.data.preference_batch import PreferenceBatch, distribute_examples
from alphaapollo.data.preference_examples import PreferenceExample
from alphaapollo.finetuning.layout import Layout

if TYPE_CHECKING:
    from alphaapollo.finetuning.task import FinetuningRun


def make_batches(examples: Sequence[PreferenceExample], layout: Layout, share_prompts: bool) -> list[PreferenceBatch]:
    """Build one batch per group of ranks. A pair is never split."""
    return distribute_examples(examples, layout.groups, layout.max_tokens, layout.padded, share_prompts)


async def can_share_prompts(run: FinetuningRun[Any, Any, Any]) -> bool:
    """Decide whether the prompt of a pair is computed once. Raises ValueError if requested and not supported."""
    config = run.plan.config
    data: PairData = config.data
    ranks: Any = run.trainer.ranks  # workers with a `sharing` check
    problem: str | None = (await ranks.call(lambda worker: worker.sharing.problem))[0]
    if problem is None and config.model.router_aux_loss_coef:
        problem = "model.router_aux_loss_coef needs the prompt of each response"
    if problem and data.use_prefix_grouper is True:
        raise ValueError(f"data.use_prefix_grouper=true: {problem}. Set it to false or auto.")
    if problem and data.use_prefix_grouper == "auto":
        run.console.notice(f"prompts are computed separately for each response: {problem}.")
    return data.use_prefix_grouper is not False and problem is None


def pair_accuracies(sums: Mapping[str, float]) -> dict[str, float]:
    """Accuracy of all pairs and of each data source."""
    metrics = {"accuracy": sums["right"] / sums["compared"]}
    for name, count in sums.items():
        source, found, what = name.rpartition("/")
        if found and what == "compared" and count:
            metrics[f"accuracy/{source}"] = sums[f"{source}/right"] / count
    return metrics
