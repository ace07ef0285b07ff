"""Supervised fine-tuning: the next token of given answers.

files -> rows with exact masks (data/sft_examples.py) -> the mean loss over the trained tokens of a batch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from alphaapollo.config.check_tuning import check_tuning
from alphaapollo.config.diff import OTHER_DATA, Verdict
from alphaapollo.config.schema import Model, SftConfig
from alphaapollo.data.batch import RankBatch
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.sft_examples import load_examples
from alphaapollo.data.sources import Read
from alphaapollo.finetuning import change_rule
from alphaapollo.finetuning.layout import Layout, deal_rows
from alphaapollo.finetuning.station import Demand, Station
from alphaapollo.types import Row

if TYPE_CHECKING:
    from alphaapollo.workers.base import RankPlacement
    from alphaapollo.workers.sft import SftWorker

COLUMNS = ("data.messages_key", "data.prompt_key", "data.response_key")
IDENTITY = change_rule.IDENTITY | dict.fromkeys(COLUMNS, OTHER_DATA)
EFFECTS = change_rule.EFFECTS


class Sft(Station[SftConfig, Row, RankBatch]):
    """An example is a row whose action mask says which tokens are trained on."""

    def check(self, config: SftConfig, num_gpus: int) -> list[str]:
        return check_tuning(config, num_gpus)

    def change_rule(self, key: str) -> tuple[Verdict, str]:
        return ("refused", IDENTITY[key]) if key in IDENTITY else ("applied", EFFECTS.get(key, ""))

    def read(self, config: SftConfig, files: str | Sequence[str], max_samples: int, renderer: Renderer) -> Read[Row]:
        return load_examples(files, renderer, config.data, max_samples)

    def demand(self, config: SftConfig, examples: Sequence[Row]) -> Demand:
        return Demand(longest=max(len(row.token_ids) for row in examples))

    def deal(self, config: SftConfig, examples: Sequence[Row], layout: Layout) -> list[RankBatch]:
        return deal_rows(examples, layout)

    def builder(
        self, config: SftConfig, model: Model, optimiser_steps: int, saves_behind: bool
    ) -> Callable[[RankPlacement], SftWorker]:
        return partial(build_worker, config, model, optimiser_steps, saves_behind)

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        mean = sums["loss"] / sums["tokens"]
        return {"loss": mean, "perplexity": math.exp(min(mean, 50.0)), "tokens": sums["tokens"]}


def build_worker(
    config: SftConfig, model: Model, optimiser_steps: int, saves_behind: bool, placement: RankPlacement
) -> SftWorker:
    from alphaapollo.workers.sft import SftWorker

    return SftWorker(config, model, placement, optimiser_steps, saves_behind)
