"""Preference training: DPO and related losses on pairs of responses, KTO on single labeled responses.

files -> tokenized pairs -> [reference log-probs, computed once] -> mean loss over the pairs of a batch
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from alphaapollo.algorithms.preference_losses import compute_preference_metrics, get_preference_loss
from alphaapollo.batching.packing import collect_row_values, distribute_rows_for_reference
from alphaapollo.config.check import check_config_and_get_notices
from alphaapollo.config.schema import DpoConfig, Preference
from alphaapollo.data.examples import LoadedExamples
from alphaapollo.data.preference_examples import PreferenceExample, load_preferences
from alphaapollo.data.rendering import Renderer
from alphaapollo.finetuning.pairs import PairTask, compute_pair_accuracy_metrics
from alphaapollo.finetuning.task import FinetuningRun
from alphaapollo.planning.memory_plan import MemoryRequest
from alphaapollo.utils.disk import replace_file
from alphaapollo.utils.user_module import load_user_module
from alphaapollo.workers.preference import PreferenceWorker

REFERENCE_BATCH = 1024  # examples per worker call that computes reference log-probs
REFERENCE_FILE = "reference.npz"


class DpoTask(PairTask):
    """Preference training. An example is a pair of responses, or for KTO a single labeled response."""

    config: DpoConfig
    worker_class = PreferenceWorker

    def check_config_and_get_notices(self, num_gpus: int) -> list[str]:
        config = self.config
        if config.preference.custom_module:
            load_user_module(config.preference.custom_module, "preference.custom_module")
        return check_config_and_get_notices(
            config,
            num_gpus,
            extra_errors=list_loss_errors(config),
            extra_ineffective_keys=list_ineffective_keys(config),
        )

    def load_examples(
        self, files: str | Sequence[str], max_samples: int, renderer: Renderer
    ) -> LoadedExamples[PreferenceExample]:
        single_answers = not get_preference_loss(self.config.preference.loss).is_pairwise
        return load_preferences(files, renderer, self.config.data, max_samples, single_answers)

    def make_memory_request(self, examples: Sequence[PreferenceExample]) -> MemoryRequest:
        longest = max(example.longest_row_length for example in examples)
        return MemoryRequest(longest, rows_per_example=len(examples[0].rows))

    def compute_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return compute_preference_metrics(sums) | compute_pair_accuracy_metrics(sums) | {"tokens": sums["tokens"]}

    async def begin_run(self, run: FinetuningRun) -> None:
        """Read the saved reference log-probs. If there are none, compute them with the initial weights."""
        await super().begin_run(run)
        if not get_preference_loss(self.config.preference.loss).needs_reference:
            return
        plan = run.plan
        ranks: Any = run.trainer.ranks  # ranks of PreferenceWorker
        examples = [*plan.train.examples, *(example for source in plan.val.values() for example in source)]
        parts = await ranks.call(lambda worker: worker.compute_weights_digest())
        digest = compute_reference_digest(examples, f"{sum(parts) % 2**64:016x}", plan.model.dtype)
        path = self.config.trainer.folder / REFERENCE_FILE
        logps = read_reference_logps(path, digest, run.console.notify)
        if logps is None:
            logps = await self._compute_reference_logps(run, examples)
            save_reference_logps(path, digest, logps)
        assign_reference_logps(examples, logps)

    async def _compute_reference_logps(self, run: FinetuningRun, examples: Sequence[PreferenceExample]) -> np.ndarray:
        plan, shared = run.plan, run.trainer.sequence_parallel
        ranks: Any = run.trainer.ranks
        parts = []
        for start in range(0, len(examples), REFERENCE_BATCH):
            run.console.show_phase("reference", start, len(examples))
            batch_examples = examples[start : start + REFERENCE_BATCH]
            split = distribute_rows_for_reference(
                batch_examples,
                plan.placement.data_parallel_size,
                plan.max_tokens,
                plan.padded,
                self.uses_shared_prompts,
            )
            batches = [batch for batch in split.rank_batches for _ in range(shared)]
            columns = await ranks.call_with_items(lambda worker, batch: worker.compute_ref_log_probs(batch), batches)
            parts.append(collect_row_values(split, columns[::shared]))
        run.console.show_phase("reference", len(examples), len(examples))
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


def read_reference_logps(path: Path, digest: str, notify: Callable[[str], None]) -> np.ndarray | None:
    """Read reference log-probs, float64 [responses]. None if the file is missing, damaged or has another digest."""
    if not path.exists():
        return None
    try:
        with np.load(path) as file:
            saved_digest, logps = str(file["digest"]), file["logps"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        notify(f"{path} is damaged; the reference log-probs are computed again.")
        return None
    if saved_digest != digest:
        notify(f"{path} was computed for other data or another model; the reference log-probs are computed again.")
        return None
    return np.asarray(logps, dtype=np.float64)


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
