"""Stop strings (rollout.stop): all engines end the same answers at the same token."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest
from transformers import AutoTokenizer

from alphaapollo.config.schema import Rollout
from alphaapollo.engines.factory import make_engine
from alphaapollo.engines.types import EngineSpec
from alphaapollo.types import Completion, Sampling, StopReason
from tests.loop.engine_kit import ENGINES_AT_NIGHT, make_model
from tests.loop.stack import StackRunner
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


@pytest.mark.parametrize("name", ENGINES_AT_NIGHT)
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
def test_graders_see_the_text_before_the_stop_string(stack: StackRunner, includes_stop: bool) -> None:
    """The policy is trained on the tokens of the stop string, too."""
    done = stack.run(
        *("actor_rollout_ref.rollout.stop=['0','1','2','3','4','5','6','7','8','9']", "trainer.total_training_steps=1"),
        *(f"actor_rollout_ref.rollout.include_stop_str_in_output={includes_stop}", "data.val_files="),
    )
    tokenizer, stopped = AutoTokenizer.from_pretrained(stack.task.model), 0
    for record in done.rollouts(1):
        (turn,), (row,) = record["turns"], record["rows"]
        sampled = tokenizer.decode([token for token, action in zip(row["ids"], row["mask"], strict=True) if action])
        digits = [letter for letter in sampled if letter.isdigit()]
        assert len(digits) <= 1 and sum(map(str.isdigit, turn["text"])) == (len(digits) if includes_stop else 0)
        assert record["reward"] == pytest.approx(0.1 * len(digits) * includes_stop)
        assert not digits or (sampled.endswith(digits[0]) and turn["stop_reason"] == "stop" and record["end"] == "done")
        stopped += len(digits)
    assert stopped > 4
