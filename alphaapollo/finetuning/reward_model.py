"""Train a reward model on pairs of responses (Bradley-Terry), for reward_model.model.path of main_ppo.

files -> pairs -> a score at the last token of each response -> mean loss over the pairs of a batch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from alphaapollo.config.check import check
from alphaapollo.config.schema import Model, RmConfig
from alphaapollo.data.preference_batch import PreferenceBatch
from alphaapollo.data.preference_examples import PreferenceExample, load_pairs
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.sources import LoadedExamples
from alphaapollo.finetuning import pairs
from alphaapollo.finetuning.layout import Layout
from alphaapollo.finetuning.task import FinetuningTask
from alphaapollo.launch.memory.finetuning import MemoryRequest
from alphaapollo.models.load import check_reward_model_family, is_causal_lm, load_config, reward_model_class
from alphaapollo.types import Row

if TYPE_CHECKING:
    from alphaapollo.finetuning.task import FinetuningRun
    from alphaapollo.workers.process_group import RankPlacement
    from alphaapollo.workers.reward_training import RewardTrainingWorker


class RewardModelTask(FinetuningTask[RmConfig, PreferenceExample, PreferenceBatch]):
    """Reward-model training. An example is a pair.

    share_prompts: whether the model can compute the prompt of a pair once; determined at the start.
    """

    share_prompts = False

    def check(self, config: RmConfig, num_gpus: int) -> list[str]:
        notices = check(config, num_gpus)
        check_model(config.model)
        return notices

    def read(
        self, config: RmConfig, files: str | Sequence[str], max_samples: int, renderer: Renderer
    ) -> LoadedExamples[PreferenceExample]:
        read = load_pairs(files, renderer, config.data, max_samples)
        for pair in read.examples:
            pair.rows = [scored_row(row, renderer) for row in pair.rows]
        return read

    def memory_request(self, config: RmConfig, examples: Sequence[PreferenceExample]) -> MemoryRequest:
        return MemoryRequest(max(example.longest for example in examples), rows=2, head=False)

    def make_batches(
        self, config: RmConfig, examples: Sequence[PreferenceExample], layout: Layout
    ) -> list[PreferenceBatch]:
        return pairs.make_batches(examples, layout, self.share_prompts)

    def worker_builder(
        self, config: RmConfig, model: Model, optimizer_steps: int, saves_in_background: bool
    ) -> Callable[[RankPlacement], RewardTrainingWorker]:
        return partial(build_worker, config, model, optimizer_steps, saves_in_background)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
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
            **pairs.pair_accuracies(sums),
        }

    async def begin(self, run: FinetuningRun[RmConfig, PreferenceExample, PreferenceBatch]) -> None:
        self.share_prompts = await pairs.can_share_prompts(run)


def check_model(model: Model) -> None:
    """Raise ValueError for a model that is neither a reward model nor a causal language model with a known head."""
    config = load_config(model)
    if is_causal_lm(config):
        check_reward_model_family(config, model.path)
    else:
        reward_model_class(config, model.path)


def scored_row(row: Row, renderer: Renderer) -> Row:
    """Format a response as main_ppo does for a reward model. The mask marks the last token, where the score is read."""
    ids = renderer.with_turn_end(list(row.token_ids))
    return replace(row, token_ids=ids, action_mask=[0] * (len(ids) - 1) + [1], logprobs=[0.0] * len(ids))


def build_worker(
    config: RmConfig, model: Model, optimizer_steps: int, saves_in_background: bool, placement: RankPlacement
) -> RewardTrainingWorker:
    from alphaapollo.workers.reward_training import RewardTrainingWorker

    return RewardTrainingWorker(config, model, placement, optimizer_steps, saves_in_background)
