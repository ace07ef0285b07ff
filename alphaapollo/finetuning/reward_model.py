"""Reward-model training on pairs of responses (Bradley-Terry loss).

files -> pairs -> score at the last token of each response -> mean loss over the pairs of a batch
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from alphaapollo.config.schema import RmConfig
from alphaapollo.data.examples import LoadedExamples
from alphaapollo.data.preference_examples import PreferenceExample, load_preferences
from alphaapollo.data.rendering import Renderer
from alphaapollo.finetuning.pairs import PairTask, compute_pair_accuracy_metrics
from alphaapollo.planning.memory_plan import MemoryRequest
from alphaapollo.types import Row
from alphaapollo.workers.reward_model import RewardTrainingWorker


class RewardModelTask(PairTask):
    """Reward-model training. An example is a pair of responses."""

    config: RmConfig
    worker_class = RewardTrainingWorker

    def load_examples(
        self, files: str | Sequence[str], max_samples: int, renderer: Renderer
    ) -> LoadedExamples[PreferenceExample]:
        read = load_preferences(files, renderer, self.config.data, max_samples)
        for pair in read.examples:
            pair.rows = [prepare_answer_for_scoring(row, renderer) for row in pair.rows]
        return read

    def make_memory_request(self, examples: Sequence[PreferenceExample]) -> MemoryRequest:
        return MemoryRequest(max(one.longest_row_length for one in examples), rows_per_example=2, computes_logits=False)

    def compute_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        count = sums["compared"]
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
