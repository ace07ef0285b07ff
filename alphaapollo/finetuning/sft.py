"""Supervised fine-tuning: next-token loss on given responses.

files -> tokenized examples (data/examples.py) -> mean loss over the response tokens of a batch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from alphaapollo.batching.batch import RankBatch
from alphaapollo.batching.packing import build_batch_layout
from alphaapollo.config.schema import SftConfig
from alphaapollo.data.examples import LoadedExamples, load_examples
from alphaapollo.data.rendering import Renderer
from alphaapollo.finetuning.held_out import HeldOutEvaluation, read_held_out_prompts
from alphaapollo.finetuning.task import FinetuningPlan, FinetuningRun, FinetuningTask
from alphaapollo.planning.memory_plan import MemoryRequest
from alphaapollo.runs.example_log import LoggedExample, make_example_row
from alphaapollo.types import Prompt, Row
from alphaapollo.workers.finetuning_worker import SftWorker


class SftTask(FinetuningTask):
    """Supervised fine-tuning. An example is a token sequence whose action mask marks the tokens to train on."""

    config: SftConfig
    worker_class = SftWorker
    prompts: Sequence[Prompt] = ()  # held-out prompts from data.val_prompts
    held_out: HeldOutEvaluation | None = None  # validation on the held-out prompts, during the run

    def check_config_and_get_notices(self, num_gpus: int) -> list[str]:
        config = self.config
        notices = super().check_config_and_get_notices(num_gpus)
        if not config.data.val_prompts or config.trainer.test_freq < 1:
            return notices
        self.prompts, more = read_held_out_prompts(config)
        passes = config.rollout.val_kwargs.n + config.rollout.val_kwargs.greedy
        shown = f"data.val_prompts: {len(self.prompts)} prompts x {passes} answers at each validation"
        return [*notices, shown, *more]

    def load_examples(self, files: str | Sequence[str], max_samples: int, renderer: Renderer) -> LoadedExamples[Row]:
        return load_examples(files, renderer, self.config.data, max_samples)

    def make_memory_request(self, examples: Sequence[Row]) -> MemoryRequest:
        return MemoryRequest(max(len(row.token_ids) for row in examples))

    def make_batches(self, examples: Sequence[Row], plan: FinetuningPlan) -> list[RankBatch]:
        return build_batch_layout(
            examples,
            range(len(examples)),
            num_ranks=plan.placement.data_parallel_size,
            mini_batch_size=len(examples),
            max_tokens=plan.max_tokens,
            padded=plan.padded,
        ).rank_batches

    def describe_example(self, example: Row, decode: Callable[[Sequence[int]], str]) -> LoggedExample:
        return LoggedExample([make_example_row(example, decode)])

    def compute_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        mean = sums["loss"] / sums["tokens"]
        return {"loss": mean, "perplexity": math.exp(min(mean, 50.0)), "tokens": sums["tokens"]}

    async def begin_run(self, run: FinetuningRun) -> None:
        if self.prompts:
            self.held_out = HeldOutEvaluation(self.config, self.prompts, run.trainer.ranks)
            await self.held_out.start()

    async def validate(self, run: FinetuningRun, step: int) -> dict[str, float]:
        return await self.held_out.validate(step, run.console, run.tracker) if self.held_out else {}

    async def end_run(self) -> None:
        held_out, self.held_out = self.held_out, None
        if held_out:
            await held_out.close()
