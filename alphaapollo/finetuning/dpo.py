"""Preference training (DPO and related losses on pairs of responses, KTO on single labeled responses) and reward-model
training (Bradley-Terry loss on the scores at the last tokens of a pair).

files -> tokenized pairs -> [reference log-probs, computed once] -> mean loss over the pairs of a batch
"""

from __future__ import annotations

import hashlib
import math
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from alphaapollo.algorithms.preference_losses import compute_preference_metrics, get_preference_loss
from alphaapollo.batching.packing import (
    PreferenceBatch,
    collect_row_values,
    distribute_preference_examples,
    distribute_rows_for_reference,
)
from alphaapollo.batching.shared_prompts import decide_shared_prompts
from alphaapollo.config.check import check_config_and_get_notices
from alphaapollo.config.schema import DpoConfig, Preference, RmConfig
from alphaapollo.data.examples import LoadedExamples
from alphaapollo.data.preference_examples import PreferenceExample, load_preferences
from alphaapollo.data.rendering import Renderer
from alphaapollo.finetuning.task import FinetuningPlan, FinetuningRun, FinetuningTask
from alphaapollo.planning.memory_plan import MemoryRequest
from alphaapollo.runs.training_examples import LoggedExample, make_example_row
from alphaapollo.types import Row
from alphaapollo.utils.disk import replace_file
from alphaapollo.utils.user_module import load_user_module
from alphaapollo.workers.preference import PreferenceWorker, RewardTrainingWorker

REFERENCE_BATCH = 1024  # examples per worker call that computes reference log-probs
REFERENCE_FILE = "reference.npz"


class PairTask(FinetuningTask):
    """Fine-tuning on pairs of responses to one prompt."""

    uses_shared_prompts = False  # whether the prompt of a pair is computed once for both responses; set by `begin_run`

    def make_batches(self, examples: Sequence[PreferenceExample], plan: FinetuningPlan) -> list[PreferenceBatch]:
        """Build one batch per data-parallel rank. Both responses of a pair are on the same rank."""
        groups = plan.placement.data_parallel_size
        return distribute_preference_examples(examples, groups, plan.max_tokens, plan.padded, self.uses_shared_prompts)

    def describe_example(self, example: PreferenceExample, decode: Callable[[Sequence[int]], str]) -> LoggedExample:
        bad, good = ("rejected", "chosen") if len(example.rows) == 2 else ("undesirable", "desirable")
        logps: Sequence[float | None] = example.ref_logps or [None] * len(example.rows)
        rows = [
            msgspec.structs.replace(make_example_row(row, decode), label=good if is_good else bad, ref_logp=logp)
            for row, is_good, logp in zip(example.rows, example.is_good, logps, strict=False)
        ]
        return LoggedExample(rows, example.data_source, example.margin)

    async def begin_run(self, run: FinetuningRun, stack: AsyncExitStack) -> None:
        """Decide whether prompts are shared. Raises ValueError if data.use_prefix_grouper=true is not supported."""
        ranks: Any = run.trainer.ranks  # ranks of workers with `shared_prompts`
        problem: str | None = (await ranks.call(lambda worker: worker.shared_prompts.unsupported_reason))[0]
        if problem is None and self.config.model.router_aux_loss_coef:
            problem = "model.router_aux_loss_coef needs a copy of the prompt for each response"
        setting = self.config.data.use_prefix_grouper
        notify = run.session.console.notify
        self.uses_shared_prompts = decide_shared_prompts("data.use_prefix_grouper", setting, problem, notify)


def compute_pair_accuracy_metrics(metric_sums: Mapping[str, float]) -> dict[str, float]:
    """Compute the share of pairs in which the chosen response gets the higher reward, in total and per data source.

    metric_sums: number of pairs, and how many are `right`: {"examples": 8, "right": 6, "maths/examples": 3, ...}.
    """
    metrics = {"accuracy": metric_sums["right"] / metric_sums["examples"]}
    for name, count in metric_sums.items():
        source, separator, quantity = name.rpartition("/")
        if separator and quantity == "examples" and count:
            metrics[f"accuracy/{source}"] = metric_sums[f"{source}/right"] / count
    return metrics


class DpoTask(PairTask):
    """Preference training. An example is a pair of responses, or for KTO a single labeled response."""

    config: DpoConfig
    worker_class = PreferenceWorker

    def check_config_and_get_notices(self, num_gpus: int) -> list[str]:
        config = self.config
        if config.preference.custom_module:
            load_user_module(config.preference.custom_module, "preference.custom_module")
        errors, unused = list_loss_errors(config), list_ineffective_keys(config)
        return check_config_and_get_notices(config, num_gpus, extra_errors=errors, extra_ineffective_keys=unused)

    def load_examples(
        self, files: str | Sequence[str], max_samples: int, renderer: Renderer
    ) -> LoadedExamples[PreferenceExample]:
        reads_single_answers = not get_preference_loss(self.config.preference.loss).is_pairwise
        return load_preferences(files, renderer, self.config.data, max_samples, reads_single_answers)

    def make_memory_request(self, examples: Sequence[PreferenceExample]) -> MemoryRequest:
        longest = max(example.longest_row_length for example in examples)
        return MemoryRequest(longest, rows_per_example=len(examples[0].rows))

    def compute_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return compute_preference_metrics(sums) | compute_pair_accuracy_metrics(sums) | {"tokens": sums["tokens"]}

    async def begin_run(self, run: FinetuningRun, stack: AsyncExitStack) -> None:
        """Read the saved reference log-probs. If there are none, compute them with the initial weights."""
        await super().begin_run(run, stack)
        if not get_preference_loss(self.config.preference.loss).needs_reference:
            return
        plan = run.plan
        ranks: Any = run.trainer.ranks  # ranks of PreferenceWorker
        examples = [*plan.train.examples, *(example for source in plan.val.values() for example in source)]
        rank_digests = await ranks.call(lambda worker: worker.compute_weights_digest())
        digest = compute_reference_digest(examples, f"{sum(rank_digests) % 2**64:016x}", plan.model.dtype)
        path = self.config.trainer.folder / REFERENCE_FILE
        logps = read_reference_logps(path, digest)
        if logps is None:
            logps = await self._compute_reference_logps(run, examples)
            save_reference_logps(path, digest, logps)
        assign_reference_logps(examples, logps)

    async def _compute_reference_logps(self, run: FinetuningRun, examples: Sequence[PreferenceExample]) -> np.ndarray:
        plan, ranks_per_batch = run.plan, run.trainer.sequence_parallel
        ranks: Any = run.trainer.ranks
        parts = []
        for start in range(0, len(examples), REFERENCE_BATCH):
            run.session.console.show_phase("reference", start, len(examples))
            batch_examples = examples[start : start + REFERENCE_BATCH]
            limits = plan.placement.data_parallel_size, plan.max_tokens, plan.padded
            layout = distribute_rows_for_reference(batch_examples, *limits, self.uses_shared_prompts)
            batches = [batch for batch in layout.rank_batches for _ in range(ranks_per_batch)]
            columns = await ranks.call_with_items(lambda worker, batch: worker.compute_ref_log_probs(batch), batches)
            parts.append(collect_row_values(layout, columns[::ranks_per_batch]))
        run.session.console.show_phase("reference", len(examples), len(examples))
        return np.concatenate(parts)


def list_loss_errors(config: DpoConfig) -> Iterator[str]:
    """Yield messages about an unknown preference.loss, invalid loss parameters, or a loss function that fails."""
    try:
        get_preference_loss(config.preference.loss).try_on_toy_answers(config.preference)
    except ValueError as error:
        yield f"preference.loss: {error}"


def list_ineffective_keys(config: DpoConfig) -> list[tuple[str, str]]:
    """Return (config key, reason) for each key that has no effect with the selected loss."""
    loss = get_preference_loss(config.preference.loss)
    unused = {*Preference.model_fields} - {*loss.reads, "loss", "custom_module"}
    keys = [(f"preference.{name}", f"preference.loss={loss.name} does not use it") for name in sorted(unused)]
    if loss.is_pairwise:
        keys += [(f"data.{name}_key", f"preference.loss={loss.name} uses pairs") for name in ("response", "label")]
    return keys


def compute_reference_digest(examples: Iterable[PreferenceExample], weights_digest: str, dtype: str) -> str:
    """Compute a digest of everything that determines reference log-probs: tokens, weights and dtype."""
    sha = hashlib.sha256(f"{weights_digest} {dtype}".encode())
    for example in examples:
        for row in example.rows_for_reference:
            sha.update(np.array([len(row.token_ids), *row.token_ids, *row.action_mask], dtype=np.int64).tobytes())
    return sha.hexdigest()


def read_reference_logps(path: Path, digest: str) -> np.ndarray | None:
    """Read reference log-probs, float64 [responses]. None if the file is missing, damaged or has another digest."""
    with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile), np.load(path) as file:
        return np.asarray(file["logps"], dtype=np.float64) if str(file["digest"]) == digest else None
    return None


def save_reference_logps(path: Path, digest: str, logps: np.ndarray) -> None:
    """Write the reference log-probs of all responses, and the `digest` of what determines them, atomically."""
    content = BytesIO()
    np.savez(content, digest=np.array(digest), logps=logps)
    replace_file(path, [content.getvalue()])


def assign_reference_logps(examples: Sequence[PreferenceExample], logps: np.ndarray) -> None:
    """Store the reference log-probs in the examples. logps: [responses], in the order of the examples."""
    values = iter(logps.tolist())
    for example in examples:
        example.ref_logps = [next(values) for _ in example.rows_for_reference]


class RewardModelTask(PairTask):
    """Reward-model training. An example is a pair of responses."""

    config: RmConfig
    worker_class = RewardTrainingWorker

    def load_examples(
        self, files: str | Sequence[str], max_samples: int, renderer: Renderer
    ) -> LoadedExamples[PreferenceExample]:
        loaded = load_preferences(files, renderer, self.config.data, max_samples)
        for pair in loaded.examples:
            pair.rows = [prepare_answer_for_scoring(row, renderer) for row in pair.rows]
        return loaded

    def make_memory_request(self, examples: Sequence[PreferenceExample]) -> MemoryRequest:
        longest = max(example.longest_row_length for example in examples)
        return MemoryRequest(longest, rows_per_example=2, computes_logits=False)

    def compute_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        count = sums["examples"]
        chosen, rejected = sums["score_chosen"] / count, sums["score_rejected"] / count
        mean = (chosen + rejected) / 2
        return {
            "loss": sums["loss"] / count,
            "score_chosen": chosen,
            "score_rejected": rejected,
            "margin": chosen - rejected,
            "score_std": math.sqrt(max(0.0, sums["score_square"] / (2 * count) - mean**2)),
            "tokens": sums["tokens"],
            **compute_pair_accuracy_metrics(sums),
        }


def prepare_answer_for_scoring(row: Row, renderer: Renderer) -> Row:
    """Append the end of the turn to an answer. The mask marks only the last token, where the score is read."""
    ids = renderer.append_turn_end(list(row.token_ids))
    return replace(row, token_ids=ids, action_mask=[0] * (len(ids) - 1) + [1], logprobs=[0.0] * len(ids))
