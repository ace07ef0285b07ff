"""Preference training: DPO and related losses on pairs of responses, KTO on single labeled responses.

files -> pairs with exact masks -> [reference log-probs, once] -> mean loss over the pairs of a batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from alphaapollo.algorithms.preference_losses import check_preference_loss, get_preference_loss, preference_metrics
from alphaapollo.algorithms.user_function_checks import check_user_preference_loss
from alphaapollo.config.check import check
from alphaapollo.config.schema import DpoConfig, Model, Preference
from alphaapollo.data.preference_batch import PreferenceBatch, distribute_scored_rows, scores_in_row_order
from alphaapollo.data.preference_examples import PreferenceExample, load_labelled, load_pairs
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.sources import LoadedExamples
from alphaapollo.finetuning import pairs, reference_logps
from alphaapollo.finetuning.layout import Layout
from alphaapollo.finetuning.task import FinetuningTask
from alphaapollo.launch.memory.finetuning import MemoryRequest
from alphaapollo.utils.user_module import load_user_module

if TYPE_CHECKING:
    from alphaapollo.controller.ranks import Ranks
    from alphaapollo.finetuning.task import FinetuningRun
    from alphaapollo.workers.preference import PreferenceWorker
    from alphaapollo.workers.process_group import RankPlacement

REFERENCE_BATCH = 1024  # examples per call when reference log-probs are computed
REFERENCE_FILE = "reference.npz"


class DpoTask(FinetuningTask[DpoConfig, PreferenceExample, PreferenceBatch]):
    """Preference training. An example is a pair, or a labeled response with an unrelated one (KTO).

    share_prompts: whether the model can compute the prompt of a pair once; determined at the start.
    """

    share_prompts = False

    def check(self, config: DpoConfig, num_gpus: int) -> list[str]:
        load_losses(config.preference)
        return check(config, num_gpus, problems=find_problems(config), ineffective=ineffective_keys(config))

    def read(
        self, config: DpoConfig, files: str | Sequence[str], max_samples: int, renderer: Renderer
    ) -> LoadedExamples[PreferenceExample]:
        load = load_pairs if get_preference_loss(config.preference.loss).of_pairs else load_labelled
        return load(files, renderer, config.data, max_samples)

    def memory_request(self, config: DpoConfig, examples: Sequence[PreferenceExample]) -> MemoryRequest:
        preference = config.preference
        live = get_preference_loss(preference.loss).needs_reference and preference.reference == "live"
        longest = max(example.longest for example in examples)
        return MemoryRequest(longest, rows=len(examples[0].rows), reference=live)

    def make_batches(
        self, config: DpoConfig, examples: Sequence[PreferenceExample], layout: Layout
    ) -> list[PreferenceBatch]:
        return pairs.make_batches(examples, layout, self.share_prompts)

    def worker_builder(
        self, config: DpoConfig, model: Model, optimizer_steps: int, saves_in_background: bool
    ) -> Callable[[RankPlacement], PreferenceWorker]:
        return partial(build_worker, config, model, optimizer_steps, saves_in_background)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return preference_metrics(sums) | pairs.pair_accuracies(sums) | {"tokens": sums["tokens"]}

    async def begin(self, run: FinetuningRun[DpoConfig, PreferenceExample, PreferenceBatch]) -> None:
        self.share_prompts = await pairs.can_share_prompts(run)
        preference = run.plan.config.preference
        if get_preference_loss(preference.loss).needs_reference and preference.reference == "kept":
            await self._add_reference_logps(run)

    async def _add_reference_logps(self, run: FinetuningRun[DpoConfig, PreferenceExample, PreferenceBatch]) -> None:
        """Read the saved reference log-probs, or compute and save them. The model still has its initial weights."""
        plan, ranks = run.plan, workers_of(run)
        examples = [*plan.train.examples, *(example for own in plan.val.values() for example in own)]
        parts = await ranks.call(lambda worker: worker.weights_digest())
        digest = reference_logps.reference_digest(examples, f"{sum(parts) % 2**64:016x}", plan.model.dtype)
        path = plan.config.trainer.folder / REFERENCE_FILE
        logps = reference_logps.read_reference(path, digest, run.console.notice)
        if logps is None:
            logps = await self._compute_reference(run, examples)
            reference_logps.save_reference(path, digest, logps)
        reference_logps.assign_reference(examples, logps)

    async def _compute_reference(
        self, run: FinetuningRun[Any, Any, Any], examples: Sequence[PreferenceExample]
    ) -> np.ndarray:
        layout, shared = run.plan.layout, run.trainer.sequence_parallel
        parts = []
        for start in range(0, len(examples), REFERENCE_BATCH):
            run.console.phase("reference", start, len(examples))
            some = examples[start : start + REFERENCE_BATCH]
            dealt = distribute_scored_rows(some, layout.groups, layout.max_tokens, layout.padded, self.share_prompts)
            batches = [batch for batch in dealt.rank_batches for _ in range(shared)]
            columns = await workers_of(run).call_each(
                lambda worker, batch: worker.compute_ref_log_probs(batch), batches
            )
            parts.append(scores_in_row_order(dealt, columns[::shared]))
        return np.concatenate(parts)


def workers_of(run: FinetuningRun[Any, Any, Any]) -> Ranks[PreferenceWorker]:
    """Ranks with the worker type of this task."""
    return cast("Ranks[PreferenceWorker]", run.trainer.ranks)


def load_losses(preference: Preference) -> None:
    """Register the losses of preference.custom_module. Raises ValueError if the file cannot be imported."""
    if preference.custom_module:
        load_user_module(preference.custom_module, "preference.custom_module")


def find_problems(config: DpoConfig) -> Iterator[str]:
    """Yield errors about the loss and its keys."""
    try:
        check_user_preference_loss(get_preference_loss(config.preference.loss), config.preference)
        check_preference_loss(config.preference)
    except ValueError as error:
        yield f"preference.loss: {error}"


def ineffective_keys(config: DpoConfig) -> list[tuple[str, str]]:
    """List (key, reason) for keys without effect with the selected loss."""
    loss = get_preference_loss(config.preference.loss)
    others = {*Preference.model_fields} - {*loss.reads, "loss", "reference", "custom_module"}
    keys = [(f"preference.{name}", f"preference.loss={loss.name} does not use it") for name in sorted(others)]
    if not loss.needs_reference:
        keys.append(("preference.reference", f"preference.loss={loss.name} has no reference"))
    if loss.of_pairs:
        keys += [(f"data.{name}_key", f"preference.loss={loss.name} uses pairs") for name in ("response", "label")]
    return keys


def build_worker(
    config: DpoConfig, model: Model, optimizer_steps: int, saves_in_background: bool, placement: RankPlacement
) -> PreferenceWorker:
    from alphaapollo.workers.preference import PreferenceWorker

    load_losses(config.preference)
    return PreferenceWorker(config, model, placement, optimizer_steps, saves_in_background)
