"""Stop strings (rollout.stop): all engines end the same answers at the same token."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from alphaapollo.config.schema import CustomRewardFunction, Data, Env, Model, Reward, Rollout
from alphaapollo.engines.factory import make_engine
from alphaapollo.engines.protocol import EngineSpec
from alphaapollo.rollout.worker import RolloutWorker, RolloutWorkerConfig
from alphaapollo.types import Completion, EpisodeEnd, GroupRequest, Prompt, Sampling, StopReason, TrajectoryGroup
from tests.loop.engine_kit import ENGINES, make_model
from tests.unit.tiny import VOCABULARY, save_tokenizer

PROMPT = [42]  # the tokenizer reads a prompt as one word; the greedy answer has no stop token
SIZES = {"kv_cache_gib": 0.1, "max_num_seqs": 16, "enforce_eager": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Model whose tokens are words, e.g. `w7`."""
    folder = tmp_path_factory.mktemp("model")
    make_model("Qwen3", seed=0, vocab_size=VOCABULARY).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def generate(model: str, name: str, *samplings: Sampling) -> list[Completion]:
    rollout = Rollout(name=name, stop=["unused"], **SIZES)
    log = f"{model}/engine.log"
    engine = make_engine(EngineSpec(0, model, False, rollout, "cpu", "float32", 64, log, tokenizer_path=model))

    async def run() -> list[Completion]:
        await engine.start()
        try:
            calls = [engine.generate(PROMPT, sampling, f"r{index}") for index, sampling in enumerate(samplings)]
            return list(await asyncio.gather(*calls))
        finally:
            await engine.close()

    return asyncio.run(run())


@pytest.mark.parametrize("name", ENGINES)
def test_engines_stop_at_the_token_that_completes_a_string(model: str, name: str) -> None:
    (whole,) = generate(model, "hf", Sampling(24, temperature=0.0))
    words = [f"w{token}" for token in whole.token_ids]
    stops = [
        (words[3],),
        (f"{words[5]} {words[6]}",),  # over two tokens
        (f"{words[5][1:]} {words[6][:2]}",),  # parts of tokens
        ("absent", words[9], words[2]),
        (words[-1],),
        ("absent",),
    ]
    samplings = [Sampling(24, temperature=0.0, stop=stop) for stop in stops]
    hf, answers = (generate(model, engine, *samplings) for engine in ("hf", name))
    for stop, one, other in zip(stops, hf, answers, strict=True):
        lengths = (n for n in range(1, 25) if any(text in " ".join(words[:n]) for text in stop))
        count = next(lengths, None)
        assert list(one.token_ids) == list(other.token_ids) == whole.token_ids[:count]
        assert len(other.logprobs) == len(other.token_ids)
        assert one.stop_reason is other.stop_reason is (StopReason.STOP if count else StopReason.LENGTH)


@pytest.mark.parametrize("includes_stop", [False, True])
def test_graders_see_the_text_before_the_stop_string(model: str, tmp_path: Path, includes_stop: bool) -> None:
    (whole,) = generate(model, "hf", Sampling(24, temperature=0.0))
    words = [f"w{token}" for token in whole.token_ids]
    first = next(n for n in range(2, 24) if words[n] not in " ".join(words[:n]))
    rollout = Rollout(name="hf", max_num_seqs=16, stop=words[first], include_stop_str_in_output=includes_stop)
    setup = RolloutWorkerConfig(
        model=Model(path=model),
        rollout=rollout.model_copy(update={"dtype": "float32"}),
        env=Env(),
        data=Data(max_prompt_length=32, max_response_length=24),
        reward=Reward(),
        custom_reward=CustomRewardFunction(),
        device="cpu",
        run_dir=str(tmp_path),
    )
    text = " ".join(words[: first + includes_stop])
    prompt = Prompt(0, "exact", "w42", text.strip())

    async def run() -> TrajectoryGroup:
        worker = RolloutWorker(setup)
        await worker.start()
        try:
            return await worker.generate(GroupRequest(prompt, 1, Sampling(24, temperature=0.0), stream_position=0))
        finally:
            await worker.close()

    (trajectory,) = asyncio.run(run()).trajectories
    (turn,) = trajectory.turns
    assert turn.text.strip() == text.strip() and trajectory.score.reward == 1.0
    assert turn.completion.token_ids == whole.token_ids[: first + 1]
    assert trajectory.rows[0].action_mask[-first - 1 :] == [1] * (first + 1)
    assert trajectory.end is EpisodeEnd.DONE and turn.completion.stop_reason is StopReason.STOP
