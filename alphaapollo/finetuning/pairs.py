"""Common base class of preference and reward-model training, both of which train on pairs of responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from alphaapollo.batching.packing import PreferenceBatch, distribute_preference_examples
from alphaapollo.batching.shared_prompts import decide_shared_prompts
from alphaapollo.data.preference_examples import PreferenceExample
from alphaapollo.finetuning.task import FinetuningPlan, FinetuningRun, FinetuningTask
from alphaapollo.runs.example_log import LoggedExample, make_example_row


class PairTask(FinetuningTask):
    """Fine-tuning on pairs of responses to one prompt."""

    uses_shared_prompts = False  # whether the prompt of a pair is computed once for both responses; set by `begin_run`

    def make_batches(self, examples: Sequence[PreferenceExample], plan: FinetuningPlan) -> list[PreferenceBatch]:
        """Build one batch per data-parallel rank. Both responses of a pair are on the same rank."""
        groups = plan.placement.data_parallel_size
        return distribute_preference_examples(examples, groups, plan.max_tokens, plan.padded, self.uses_shared_prompts)

    def describe_example(self, example: PreferenceExample, decode: Callable[[Sequence[int]], str]) -> LoggedExample:
        names = ("rejected", "chosen") if len(example.rows) == 2 else ("undesirable", "desirable")
        logps: Sequence[float | None] = example.ref_logps or [None] * len(example.rows)
        rows = [
            replace(make_example_row(row, decode), label=names[is_good], ref_logp=logp)
            for row, is_good, logp in zip(example.rows, example.is_good, logps, strict=False)
        ]
        return LoggedExample(rows, example.data_source, example.margin)

    async def begin_run(self, run: FinetuningRun) -> None:
        """Decide whether prompts are shared. Raises ValueError if data.use_prefix_grouper=true is not supported."""
        ranks: Any = run.trainer.ranks  # workers with a `sharing` check
        problem: str | None = (await ranks.call(lambda worker: worker.shared_prompts.unsupported_reason))[0]
        if problem is None and self.config.model.router_aux_loss_coef:
            problem = "model.router_aux_loss_coef needs a copy of the prompt for each response"
        wanted = self.config.data.use_prefix_grouper
        self.uses_shared_prompts = decide_shared_prompts("data.use_prefix_grouper", wanted, problem, run.console.notify)


def compute_pair_accuracy_metrics(metric_sums: Mapping[str, float]) -> dict[str, float]:
    """Compute the share of pairs in which the chosen response gets the higher reward, in total and per data source.

    metric_sums: number of pairs, and how many are `right`: {"compared": 8, "right": 6, "maths/compared": 3, ...}.
    """
    metrics = {"accuracy": metric_sums["right"] / metric_sums["compared"]}
    for name, count in metric_sums.items():
        source, separator, quantity = name.rpartition("/")
        if separator and quantity == "compared" and count:
            metrics[f"accuracy/{source}"] = metric_sums[f"{source}/right"] / count
    return metrics
