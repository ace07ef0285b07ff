"""Supervised fine-tuning: the next token of given answers.

files -> rows with exact masks (data/sft_examples.py) -> the mean loss over the trained tokens of a batch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from alphaapollo.config.check_tuning import check_answers, check_tuning
from alphaapollo.config.diff import OTHER_DATA, Verdict
from alphaapollo.config.notices import OF_ANSWERS, answer_notices
from alphaapollo.config.schema import Model, SftConfig
from alphaapollo.data.batch import RankBatch
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.sft_examples import load_examples
from alphaapollo.data.sources import Read
from alphaapollo.finetuning import change_rule
from alphaapollo.finetuning.layout import Layout, deal_rows
from alphaapollo.finetuning.station import MemoryRequest, Station
from alphaapollo.types import Prompt, Row

if TYPE_CHECKING:
    from alphaapollo.controller.ranks import Ranks
    from alphaapollo.finetuning.answers import Answers
    from alphaapollo.finetuning.loop import TuningRun
    from alphaapollo.workers.process_group import RankPlacement
    from alphaapollo.workers.sft import SftWorker

COLUMNS = ("data.messages_key", "data.prompt_key", "data.response_key")
IDENTITY = change_rule.IDENTITY | dict.fromkeys(COLUMNS, OTHER_DATA)
EFFECTS = change_rule.EFFECTS | {"data.val_prompts": change_rule.OTHER_VALIDATION}


class Sft(Station[SftConfig, Row, RankBatch]):
    """An example is a row whose action mask says which tokens are trained on. Of data.val_prompts it has the prompts,
    and while the run goes on who answers them."""

    prompts: Sequence[Prompt] = ()
    answers: Answers | None = None

    def check(self, config: SftConfig, num_gpus: int) -> list[str]:
        return [*check_tuning(config, num_gpus, check_answers(config)), *answer_notices(config)]

    def change_rule(self, key: str) -> tuple[Verdict, str]:
        if key.startswith(OF_ANSWERS):
            return "applied", change_rule.OTHER_VALIDATION
        return ("refused", IDENTITY[key]) if key in IDENTITY else ("applied", EFFECTS.get(key, ""))

    def read(self, config: SftConfig, files: str | Sequence[str], max_samples: int, renderer: Renderer) -> Read[Row]:
        return load_examples(files, renderer, config.data, max_samples)

    def read_more(self, config: SftConfig) -> list[str]:
        if not self.answers_in(config):
            return []
        from alphaapollo.finetuning.answers import read_held_out

        self.prompts, notices = read_held_out(config)
        passes = config.rollout.val_kwargs.n + config.rollout.val_kwargs.greedy
        return [f"data.val_prompts: {len(self.prompts)} prompts x {passes} answers at every validation", *notices]

    def answers_in(self, config: SftConfig) -> bool:
        """Whether a run of it has prompts answered."""
        return bool(config.data.val_prompts) and config.trainer.test_freq > 0

    def demand(self, config: SftConfig, examples: Sequence[Row]) -> MemoryRequest:
        data = config.data
        answers = (config.rollout.max_num_seqs, data.max_prompt_length, data.max_response_length)
        longest = max(len(row.token_ids) for row in examples)
        return MemoryRequest(longest, answers=answers if self.answers_in(config) else None)

    def deal(self, config: SftConfig, examples: Sequence[Row], layout: Layout) -> list[RankBatch]:
        return deal_rows(examples, layout)

    def builder(
        self, config: SftConfig, model: Model, optimizer_steps: int, saves_in_background: bool
    ) -> Callable[[RankPlacement], SftWorker]:
        return partial(build_worker, config, model, optimizer_steps, saves_in_background)

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        mean = sums["loss"] / sums["tokens"]
        return {"loss": mean, "perplexity": math.exp(min(mean, 50.0)), "tokens": sums["tokens"]}

    async def begin(self, run: TuningRun[SftConfig, Row, RankBatch]) -> None:
        if not self.prompts:
            return
        from alphaapollo.finetuning.answers import Answers

        config = run.prepared.config
        ranks = cast("Ranks[SftWorker]", run.trainer.ranks)  # as built below
        self.answers = Answers(config, self.prompts, ranks, config.trainer.folder)
        await self.answers.start()

    async def validate(self, run: TuningRun[SftConfig, Row, RankBatch], step: int) -> dict[str, float]:
        return await self.answers.validate(step, run.console) if self.answers else {}

    async def end(self) -> None:
        answers, self.answers = self.answers, None
        if answers:
            await answers.close()


def build_worker(
    config: SftConfig, model: Model, optimizer_steps: int, saves_in_background: bool, placement: RankPlacement
) -> SftWorker:
    from alphaapollo.workers.sft import SftWorker

    return SftWorker(config, model, placement, optimizer_steps, saves_in_background)
