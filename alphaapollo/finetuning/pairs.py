"""What training on preferences and reward models share: how examples are dealt, and whether prompts are shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from alphaapollo.config.schema import PairData
from alphaapollo.data.preference_batch import PreferenceBatch, deal_examples
from alphaapollo.data.preference_examples import PreferenceExample
from alphaapollo.finetuning.layout import Layout

if TYPE_CHECKING:
    from alphaapollo.finetuning.loop import TuningRun


def deal(examples: Sequence[PreferenceExample], layout: Layout, share_prompts: bool) -> list[PreferenceBatch]:
    """A batch for each group of ranks; a pair is never cut."""
    return deal_examples(examples, layout.groups, layout.max_tokens, layout.padded, share_prompts)


async def may_share(run: TuningRun[Any, Any, Any]) -> bool:
    """Whether what a pair has in common is computed once. ValueError: it is asked for, and the model cannot."""
    config = run.prepared.config
    data: PairData = config.data
    ranks: Any = run.trainer.ranks  # of workers that have such a check
    problem: str | None = (await ranks.call(lambda worker: worker.sharing.problem))[0]
    if problem is None and config.model.router_aux_loss_coef:
        problem = "model.router_aux_loss_coef looks at each answer's own copy of the prompt"
    if problem and data.use_prefix_grouper is True:
        raise ValueError(f"data.use_prefix_grouper=true: {problem}. Set it to false or auto.")
    if problem and data.use_prefix_grouper == "auto":
        run.console.notice(f"prompts are computed for each answer: {problem}.")
    return data.use_prefix_grouper is not False and problem is None


def accuracies(sums: Mapping[str, float]) -> dict[str, float]:
    """Shares of what was right: of all, and of each data source."""
    figures = {"accuracy": sums["right"] / sums["compared"]}
    for name, count in sums.items():
        source, found, what = name.rpartition("/")
        if found and what == "compared" and count:
            figures[f"accuracy/{source}"] = sums[f"{source}/right"] / count
    return figures
