"""Training a reward model on pairs of answers (Bradley-Terry): what reward_model.model.path of main_ppo takes.

files -> pairs, each answer to its last token -> a score each -> the mean loss over the pairs of a batch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from alphaapollo.config.check_tuning import check_tuning
from alphaapollo.config.diff import OTHER_DATA, ROUNDING, Verdict
from alphaapollo.config.schema import Model, RmConfig
from alphaapollo.data.preference_batch import PreferenceBatch
from alphaapollo.data.preference_examples import PreferenceExample, load_pairs
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.sources import Read
from alphaapollo.finetuning import change_rule, pairs
from alphaapollo.finetuning.layout import Layout
from alphaapollo.finetuning.station import MemoryRequest, Station
from alphaapollo.models.load import check_reward_model_family, is_causal_lm, load_config, reward_model_class
from alphaapollo.types import Row

if TYPE_CHECKING:
    from alphaapollo.finetuning.loop import TuningRun
    from alphaapollo.workers.process_group import RankPlacement
    from alphaapollo.workers.reward_training import RewardTrainingWorker

COLUMNS = tuple(f"data.{name}_key" for name in ("prompt", "chosen", "rejected", "margin"))
IDENTITY = change_rule.IDENTITY | dict.fromkeys(COLUMNS, OTHER_DATA)
EFFECTS = change_rule.EFFECTS | {
    "data.use_prefix_grouper": ROUNDING,
    "bradley_terry.centring_coef": "losses before and after do not compare",
}


class Rm(Station[RmConfig, PreferenceExample, PreferenceBatch]):
    """An example is a pair. What the start finds out about the model: share_prompts."""

    share_prompts = False

    def check(self, config: RmConfig, num_gpus: int) -> list[str]:
        notices = check_tuning(config, num_gpus, problems(config))
        check_model(config.model)
        return notices

    def change_rule(self, key: str) -> tuple[Verdict, str]:
        return ("refused", IDENTITY[key]) if key in IDENTITY else ("applied", EFFECTS.get(key, ""))

    def read(
        self, config: RmConfig, files: str | Sequence[str], max_samples: int, renderer: Renderer
    ) -> Read[PreferenceExample]:
        read = load_pairs(files, renderer, config.data, max_samples)
        for pair in read.examples:
            pair.rows = [scored_row(row, renderer) for row in pair.rows]
        return read

    def demand(self, config: RmConfig, examples: Sequence[PreferenceExample]) -> MemoryRequest:
        return MemoryRequest(max(example.longest for example in examples), rows=2, head=False)

    def deal(self, config: RmConfig, examples: Sequence[PreferenceExample], layout: Layout) -> list[PreferenceBatch]:
        return pairs.deal(examples, layout, self.share_prompts)

    def builder(
        self, config: RmConfig, model: Model, optimizer_steps: int, saves_in_background: bool
    ) -> Callable[[RankPlacement], RewardTrainingWorker]:
        return partial(build_worker, config, model, optimizer_steps, saves_in_background)

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
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
            **pairs.accuracies(sums),
        }

    async def begin(self, run: TuningRun[RmConfig, PreferenceExample, PreferenceBatch]) -> None:
        self.share_prompts = await pairs.may_share(run)


def problems(config: RmConfig) -> Iterator[str]:
    """What cannot work."""
    if config.data.truncation in ("left", "right"):
        yield "data.truncation: an answer that was cut is no better or worse. Set error or drop."
    if config.trainer.export_lora == "adapter":
        yield (
            "trainer.export_lora=adapter: a reward model's head is trained beside its adapters, and "
            "reward_model.model.path wants them whole. Set merged."
        )


def check_model(model: Model) -> None:
    """ValueError: neither a reward model nor a language model that can become one."""
    config = load_config(model)
    if is_causal_lm(config):
        check_reward_model_family(config, model.path)
    else:
        reward_model_class(config, model.path)


def scored_row(row: Row, renderer: Renderer) -> Row:
    """A whole answer as main_ppo shows it to a reward model, with the last token as its response: there the score
    stands."""
    ids = renderer.ended(list(row.token_ids))
    return replace(row, token_ids=ids, action_mask=[0] * (len(ids) - 1) + [1], logprobs=[0.0] * len(ids))


def build_worker(
    config: RmConfig, model: Model, optimizer_steps: int, saves_in_background: bool, placement: RankPlacement
) -> RewardTrainingWorker:
    from alphaapollo.workers.reward_training import RewardTrainingWorker

    return RewardTrainingWorker(config, model, placement, optimizer_steps, saves_in_background)
