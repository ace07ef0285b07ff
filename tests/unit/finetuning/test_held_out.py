"""Held-out prompts of a fine-tuning: checks before the start, distribution to ranks, and grading."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.config.schema import SftConfig, ValSampling
from alphaapollo.controller.errors import WorkerDied
from alphaapollo.controller.ranks import Ranks
from alphaapollo.finetuning.sft import SftTask, TrainerEngine, read_held_out_prompts
from alphaapollo.observability.console import Console
from alphaapollo.types import Completion, Prompt, Sampling, SamplingRequest
from tests.builders import make_completion, write_rows
from tests.unit.tiny import save_model

REWARD = "def compute_score(prompt, completion):\n    return float(completion == prompt.ground_truth)\n"
ROWS = [
    {"data_source": "a" if index < 3 else "b", "prompt": f"w{5 + index}", "reward_model": {"ground_truth": "w9"}}
    for index in range(5)
]


class Worker:
    """Complete each prompt with its first token plus the version, and end."""

    def __init__(self, calls: list[list[int]], dies: bool = False):
        self.calls, self.dies = calls, dies

    def generate(self, asked: Sequence[SamplingRequest], version: int) -> list[Completion]:
        self.calls.append([len(one.token_ids) for one in asked])
        if self.dies:
            raise WorkerDied("gone", "trainer")
        return [make_completion([one.token_ids[0] + version, 1], version=version) for one in asked]


class Several(Ranks[Any]):
    def __init__(self, workers: list[Worker]):
        self.workers, self.size, self.role = workers, len(workers), "trainer"

    async def call(self, function: Callable[[Any], Any]) -> list[Any]:
        return [function(worker) for worker in self.workers]

    async def call_with_items(self, function: Callable[[Any, Any], Any], items: Sequence[Any]) -> list[Any]:
        answers = [function(worker, item) for worker, item in zip(self.workers, items, strict=True)]
        return pickle.loads(pickle.dumps(answers))  # as from other processes

    async def call_rank(self, rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.workers[rank], *arguments)

    async def close(self) -> None:
        pass


async def ask(engine: TrainerEngine, lengths: Sequence[int]) -> list[Completion]:
    requests = [engine.generate([length, *[0] * (length - 1)], Sampling(4), str(length)) for length in lengths]
    return await asyncio.gather(*requests)


def test_waiting_requests_are_distributed_by_length() -> None:
    first, second = [], []
    engine = TrainerEngine(Several([Worker(first), Worker(second)]), batch_size=2, step=3)
    answers = asyncio.run(ask(engine, [1, 5, 2, 4, 3]))
    assert [answer.token_ids[0] for answer in answers] == [4, 8, 5, 7, 6]  # each its own
    assert (first, second) == ([[5, 3], [1]], [[4, 2], []])


def test_dead_rank_fails_all_waiting_requests() -> None:
    engine = TrainerEngine(Several([Worker([], dies=True)]), batch_size=1)
    with pytest.raises(WorkerDied):
        asyncio.run(ask(engine, [1, 2, 3]))


def config_of(folder: Path, reward: str = REWARD, **data: Any) -> SftConfig:
    save_model("llama", folder / "model")
    (folder / "reward.py").write_text(reward)
    prompts = write_rows(folder / "val.jsonl", ROWS)
    return SftConfig(
        model={"path": str(folder / "model")},
        data={"val_prompts": prompts, "max_prompt_length": 8, "max_response_length": 4} | data,
        rollout={"val_kwargs": {"n": 2, "greedy": True}},
        custom_reward_function={"path": str(folder / "reward.py") if reward else ""},
        trainer={"output_dir": str(folder)},
    )


async def validate(config: SftConfig, prompts: Sequence[Prompt], worker: Worker, tracker: Any) -> dict[str, float]:
    task, trainer = SftTask(config), SimpleNamespace(ranks=Several([worker]))
    run: Any = SimpleNamespace(trainer=trainer, session=SimpleNamespace(console=Console(), tracker=tracker))
    task.prompts = prompts
    async with AsyncExitStack() as stack:
        await task.begin_run(run, stack)
        return await task.validate(run, 2)


def test_metrics_are_those_of_a_validation_and_answers_are_logged(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    prompts, notices = read_held_out_prompts(config)
    assert len(prompts) == 5 and notices == []
    samples = list[tuple[str, int]]()
    tracker: Any = SimpleNamespace(log_samples=lambda step, groups, suffix: samples.append((suffix, len(groups))))

    metrics = asyncio.run(validate(config, prompts, Worker([]), tracker))  # w7 -> w9: right
    right = {"val/accuracy": 0.2, "val/a/accuracy": 1 / 3, "val/b/accuracy": 0.0, "val/pass@2": 0.2}
    assert {name: metrics[name] for name in right} == pytest.approx(right)
    assert metrics["val/accuracy_greedy"] == 0.2 and metrics["val/failed"] == 0.0
    lines = (config.trainer.folder / "rollouts/val_000002.jsonl").read_bytes().splitlines()
    assert len(lines) == 10 and json.loads(lines[4])["text"] == "w9"
    assert samples == [("", 5), ("_greedy", 5)]


def test_stop_strings_end_answers(tmp_path: Path) -> None:
    config = config_of(tmp_path, reward="def compute_score(prompt, completion):\n    return float(completion == '')\n")
    rollout = config.rollout.model_copy(update={"stop": ["w9"], "val_kwargs": ValSampling()})
    config = config.model_copy(update={"rollout": rollout})
    prompts, _ = read_held_out_prompts(config)
    tracker: Any = SimpleNamespace(log_samples=lambda *_: None)
    stops = list[tuple[str, ...]]()

    class Recorder(Worker):
        def generate(self, asked: Sequence[SamplingRequest], version: int) -> list[Completion]:
            stops.extend(one.sampling.stop for one in asked)
            return super().generate(asked, version)

    metrics = asyncio.run(validate(config, prompts, Recorder([]), tracker))  # w7 -> w9, which is cut
    assert metrics["val/reward"] == 0.2 and stops == [("w9",)] * 5


@pytest.mark.parametrize(
    ("keys", "fact"),
    [
        ({"prompt_key": "question"}, "question"),
        ({"max_response_length": 1000}, "128 tokens"),
        ({"reward": ""}, "no reward function"),
    ],
)
def test_prompts_that_cannot_be_rendered_or_graded_are_refused(tmp_path: Path, keys: dict[str, Any], fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        read_held_out_prompts(config_of(tmp_path, **keys))
