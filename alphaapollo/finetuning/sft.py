"""Supervised fine-tuning: next-token loss on given responses.

files -> rows with exact masks (data/sft_examples.py) -> mean loss over the trained tokens of a batch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from alphaapollo.config.check import check
from alphaapollo.config.schema import Model, SftConfig
from alphaapollo.data.batch import RankBatch
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.sft_examples import load_examples
from alphaapollo.data.sources import LoadedExamples
from alphaapollo.finetuning.layout import Layout, distribute_rows
from alphaapollo.finetuning.task import FinetuningTask
from alphaapollo.launch.memory.finetuning import MemoryRequest
from alphaapollo.types import Prompt, Row

if TYPE_CHECKING:
    from alphaapollo.controller.ranks import Ranks
    from alphaapollo.finetuning.held_out import HeldOutEvaluation
    from alphaapollo.finetuning.task import FinetuningRun
    from alphaapollo.workers.process_group import RankPlacement
    from alphaapollo.workers.sft import SftWorker


class SftTask(FinetuningTask[SftConfig, Row, RankBatch]):
    """Supervised fine-tuning. An example is a row whose action mask marks the trained tokens.

    prompts: held-out prompts of data.val_prompts. held_out: samples and grades answers to them while the run trains.
    """

    prompts: Sequence[Prompt] = ()
    held_out: HeldOutEvaluation | None = None

    def check(self, config: SftConfig, num_gpus: int) -> list[str]:
        return check(config, num_gpus)

    def read(
        self, config: SftConfig, files: str | Sequence[str], max_samples: int, renderer: Renderer
    ) -> LoadedExamples[Row]:
        return load_examples(files, renderer, config.data, max_samples)

    def read_more(self, config: SftConfig) -> list[str]:
        if not self.uses_held_out_prompts(config):
            return []
        from alphaapollo.finetuning.held_out import read_held_out_prompts

        self.prompts, notices = read_held_out_prompts(config)
        passes = config.rollout.val_kwargs.n + config.rollout.val_kwargs.greedy
        return [f"data.val_prompts: {len(self.prompts)} prompts x {passes} answers at each validation", *notices]

    def uses_held_out_prompts(self, config: SftConfig) -> bool:
        """Whether the run samples answers to held-out prompts."""
        return bool(config.data.val_prompts) and config.trainer.test_freq > 0

    def memory_request(self, config: SftConfig, examples: Sequence[Row]) -> MemoryRequest:
        data = config.data
        answers = (config.rollout.max_num_seqs, data.max_prompt_length, data.max_response_length)
        longest = max(len(row.token_ids) for row in examples)
        return MemoryRequest(longest, answers=answers if self.uses_held_out_prompts(config) else None)

    def make_batches(self, config: SftConfig, examples: Sequence[Row], layout: Layout) -> list[RankBatch]:
        return distribute_rows(examples, layout)

    def worker_builder(
        self, config: SftConfig, model: Model, optimizer_steps: int, saves_in_background: bool
    ) -> Callable[[RankPlacement], SftWorker]:
        return partial(build_worker, config, model, optimizer_steps, saves_in_background)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        mean = sums["loss"] / sums["tokens"]
        return {"loss": mean, "perplexity": math.exp(min(mean, 50.0)), "tokens": sums["tokens"]}

    async def begin(self, run: FinetuningRun[SftConfig, Row, RankBatch]) -> None:
        if not self.prompts:
            return
        from alphaapollo.finetuning.held_out import HeldOutEvaluation

        config = run.plan.config
        ranks = cast("Ranks[SftWorker]", run.trainer.ranks)  # built by build_worker
        self.held_out = HeldOutEvaluation(config, self.prompts, ranks, config.trainer.folder)
        await self.held_out.start()

    async def validate(self, run: FinetuningRun[SftConfig, Row, RankBatch], step: int) -> dict[str, float]:
        return await self.held_out.validate(step, run.console) if self.held_out else {}

    async def end(self) -> None:
        held_out, self.held_out = self.held_out, None
        if held_out:
            await held_out.close()


def build_worker(
    config: SftConfig, model: Model, optimizer_steps: int, saves_in_background: bool, placement: RankPlacement
) -> SftWorker:
    from alphaapollo.workers.sft import SftWorker

    return SftWorker(config, model, placement, optimizer_steps, saves_in_background)
