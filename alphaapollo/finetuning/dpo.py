"""Training on preferences: DPO and its family on pairs of answers, KTO on single ones with a label.

files -> pairs with exact masks -> [the reference's log-probs, once] -> the mean loss over the pairs of a batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from alphaapollo.algorithms.preference_losses import check_preference, figures_of, get_preference_loss
from alphaapollo.algorithms.try_user_functions import try_preference_loss
from alphaapollo.config.check_tuning import check_tuning
from alphaapollo.config.diff import OTHER_DATA, ROUNDING, SAME_NAME, Verdict
from alphaapollo.config.notices import void_lines
from alphaapollo.config.schema import DpoConfig, Model, Preference
from alphaapollo.data.preference_batch import PreferenceBatch, deal_scored, scores_of
from alphaapollo.data.preference_examples import PreferenceExample, load_labelled, load_pairs
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.sources import Read
from alphaapollo.finetuning import change_rule, pairs, reference
from alphaapollo.finetuning.layout import Layout
from alphaapollo.finetuning.station import MemoryRequest, Station
from alphaapollo.utils.user_module import load_user_module

if TYPE_CHECKING:
    from alphaapollo.controller.ranks import Ranks
    from alphaapollo.finetuning.loop import TuningRun
    from alphaapollo.workers.preference import PreferenceWorker
    from alphaapollo.workers.process_group import RankPlacement

COLUMNS = tuple(f"data.{name}_key" for name in ("prompt", "chosen", "rejected", "response", "label"))
OF_THE_LOSS = {"preference.loss": "another algorithm", "preference.custom_module": SAME_NAME}
IDENTITY = change_rule.IDENTITY | dict.fromkeys(COLUMNS, OTHER_DATA) | OF_THE_LOSS
EFFECTS = change_rule.EFFECTS | {
    "data.use_prefix_grouper": ROUNDING,
    "preference.reference": ROUNDING,
    **dict.fromkeys(
        [
            f"preference.{name}"
            for name in Preference.model_fields
            if name not in ("loss", "custom_module", "reference")
        ],
        "losses before and after do not compare",
    ),
}
AT_ONCE = 1024  # examples whose log-probs the reference computes in one call
FILE = "reference.npz"


class Dpo(Station[DpoConfig, PreferenceExample, PreferenceBatch]):
    """An example is a pair, or a single answer with an unrelated one. What the start finds out about the model:
    share_prompts."""

    share_prompts = False

    def check(self, config: DpoConfig, num_gpus: int) -> list[str]:
        load_losses(config.preference)
        return [*check_tuning(config, num_gpus, problems(config)), *void_lines(config, void_keys(config))]

    def change_rule(self, key: str) -> tuple[Verdict, str]:
        return ("refused", IDENTITY[key]) if key in IDENTITY else ("applied", EFFECTS.get(key, ""))

    def read(
        self, config: DpoConfig, files: str | Sequence[str], max_samples: int, renderer: Renderer
    ) -> Read[PreferenceExample]:
        load = load_pairs if get_preference_loss(config.preference.loss).of_pairs else load_labelled
        return load(files, renderer, config.data, max_samples)

    def demand(self, config: DpoConfig, examples: Sequence[PreferenceExample]) -> MemoryRequest:
        preference = config.preference
        live = get_preference_loss(preference.loss).needs_reference and preference.reference == "live"
        longest = max(example.longest for example in examples)
        return MemoryRequest(longest, rows=len(examples[0].rows), reference=live)

    def deal(self, config: DpoConfig, examples: Sequence[PreferenceExample], layout: Layout) -> list[PreferenceBatch]:
        return pairs.deal(examples, layout, self.share_prompts)

    def builder(
        self, config: DpoConfig, model: Model, optimizer_steps: int, saves_in_background: bool
    ) -> Callable[[RankPlacement], PreferenceWorker]:
        return partial(build_worker, config, model, optimizer_steps, saves_in_background)

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        return figures_of(sums) | pairs.accuracies(sums) | {"tokens": sums["tokens"]}

    async def begin(self, run: TuningRun[DpoConfig, PreferenceExample, PreferenceBatch]) -> None:
        self.share_prompts = await pairs.may_share(run)
        preference = run.prepared.config.preference
        if get_preference_loss(preference.loss).needs_reference and preference.reference == "kept":
            await self._give_reference(run)

    async def _give_reference(self, run: TuningRun[DpoConfig, PreferenceExample, PreferenceBatch]) -> None:
        """Read the reference's log-probs, or compute and keep them: the model is still what it began as."""
        prepared, ranks = run.prepared, workers_of(run)
        examples = [*prepared.train.examples, *(example for own in prepared.val.values() for example in own)]
        parts = await ranks.call(lambda worker: worker.weights_digest())
        digest = reference.digest_of(examples, f"{sum(parts) % 2**64:016x}", prepared.model.dtype)
        path = prepared.config.trainer.folder / FILE
        logps = reference.read_kept(path, digest, run.console.notice)
        if logps is None:
            logps = await self._compute(run, examples)
            reference.keep(path, digest, logps)
        reference.give(examples, logps)

    async def _compute(self, run: TuningRun[Any, Any, Any], examples: Sequence[PreferenceExample]) -> np.ndarray:
        layout, shared = run.prepared.layout, run.trainer.sequence_parallel
        parts = []
        for start in range(0, len(examples), AT_ONCE):
            run.console.phase("reference", start, len(examples))
            some = examples[start : start + AT_ONCE]
            dealt = deal_scored(some, layout.groups, layout.max_tokens, layout.padded, self.share_prompts)
            batches = [batch for batch in dealt.rank_batches for _ in range(shared)]
            columns = await workers_of(run).call_each(lambda worker, batch: worker.compute_ref(batch), batches)
            parts.append(scores_of(dealt, columns[::shared]))
        return np.concatenate(parts)


def workers_of(run: TuningRun[Any, Any, Any]) -> Ranks[PreferenceWorker]:
    """The ranks as what this kind has built them."""
    return cast("Ranks[PreferenceWorker]", run.trainer.ranks)


def load_losses(preference: Preference) -> None:
    """Those of the user's own file, into this process's registry. ValueError: it is not there, or does not import."""
    if preference.custom_module:
        load_user_module(preference.custom_module, "preference.custom_module")


def problems(config: DpoConfig) -> Iterator[str]:
    """What cannot work."""
    try:
        try_preference_loss(get_preference_loss(config.preference.loss), config.preference)
        check_preference(config.preference)
    except ValueError as error:
        yield f"preference.loss: {error}"
    if config.data.truncation in ("left", "right"):
        yield "data.truncation: an answer that was cut is no better or worse. Set error or drop."


def void_keys(config: DpoConfig) -> list[tuple[str, str]]:
    """Keys that the loss, a known one, does not read, and why."""
    loss = get_preference_loss(config.preference.loss)
    others = {*Preference.model_fields} - {*loss.reads, "loss", "reference", "custom_module"}
    void = [(f"preference.{name}", f"preference.loss={loss.name} does not read it") for name in sorted(others)]
    if not loss.needs_reference:
        void.append(("preference.reference", f"preference.loss={loss.name} has no reference"))
    if loss.of_pairs:
        void += [(f"data.{name}_key", f"preference.loss={loss.name} is of pairs") for name in ("response", "label")]
    return void


def build_worker(
    config: DpoConfig, model: Model, optimizer_steps: int, saves_in_background: bool, placement: RankPlacement
) -> PreferenceWorker:
    from alphaapollo.workers.preference import PreferenceWorker

    load_losses(config.preference)
    return PreferenceWorker(config, model, placement, optimizer_steps, saves_in_background)
