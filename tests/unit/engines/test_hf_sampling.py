import asyncio
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from alphaapollo.algorithms.sampling import sample_among_kept, sample_token
from alphaapollo.engines.hf import HFEngine
from alphaapollo.engines.types import EngineError
from alphaapollo.engines.weight_sync.shared_memory import SharedMemorySender
from alphaapollo.engines.weight_sync.transport import WeightUpdate
from alphaapollo.types import Completion, Sampling
from alphaapollo.utils.kept_tokens import KEPT_TOKENS
from tests.unit.engines.specs import make_spec
from tests.unit.tiny import build_model, save_model

PROBS = [0.5, 0.3, 0.15, 0.05]
LOGITS = torch.tensor(PROBS).log()


def draw(sampling: Sampling, count: int = 2000) -> Counter[int]:
    generator = torch.Generator().manual_seed(0)
    return Counter(sample_token(LOGITS, sampling, generator)[0] for _ in range(count))


def test_frequencies_follow_the_probabilities():
    counts = draw(Sampling(1))
    assert all(abs(counts[token] / 2000 - prob) < 0.04 for token, prob in enumerate(PROBS))


def test_top_k_and_top_p_truncate():
    assert set(draw(Sampling(1, top_k=2))) == {0, 1}
    assert set(draw(Sampling(1, top_p=0.7))) == {0, 1}  # .5 is below .7, .5 + .3 crosses it
    assert set(draw(Sampling(1, top_p=0.5))) == {0}
    assert set(draw(Sampling(1, top_p=0.81, top_k=2))) == {0, 1}


@pytest.mark.parametrize(
    ("settings", "prob"),
    [
        ({"temperature": 0}, 0.5),  # greedy
        ({"top_k": 1}, 0.5),
        ({"temperature": 0.5, "top_k": 1}, 0.25 / 0.365),  # squares: .25 + .09 + .0225 + .0025
    ],
)
def test_logprobs_are_after_temperature_and_before_truncation(settings: dict[str, Any], prob: float):
    token, logprob = sample_token(LOGITS, Sampling(1, **settings), torch.Generator().manual_seed(1))
    assert token == 0 and math.isclose(logprob, math.log(prob), rel_tol=1e-6)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.7}, [0, 1]),
        ({"min_p": 0.25}, [0, 1, 2]),  # .15 is at least a quarter of .5, and .05 is not
        ({"min_p": 0.25, "top_p": 0.8}, [0, 1]),  # of .5, .3, .15 over .95
        ({"min_p": 0.01}, []),  # all
        ({"temperature": 0.5, "top_p": 0.8}, [0, 1]),  # .25 + .09 of .365
        ({"temperature": 0}, []),
    ],
)
def test_kept_tokens_are_those_of_the_log_prob(settings: dict[str, Any], kept: list[int]):
    sampling = Sampling(1, returns_kept_tokens=True, **settings)
    token, logprob, found = sample_among_kept(LOGITS, sampling, torch.Generator().manual_seed(1))
    powers = [p ** (1 / (settings.get("temperature") or 1)) for p in PROBS]
    total = sum(powers[one] for one in kept or range(4))
    assert found == kept or (not kept and found == ()), found
    assert math.isclose(logprob, math.log(powers[token] / total), rel_tol=1e-5)
    assert not sample_among_kept(LOGITS, Sampling(1, **settings), torch.Generator())[2], "only if they are requested"


@pytest.fixture
def engine(tmp_path: Path) -> HFEngine:
    folder = save_model("qwen3", tmp_path / "model")
    return HFEngine(make_spec(name="hf", model_path=str(folder), max_model_len=64, max_num_seqs=2))


def send_changed_weights(folder: Path) -> WeightUpdate:
    """Send the model with other embeddings."""
    trained = {name: parameter.detach() for name, parameter in build_model("qwen3").named_parameters()}
    trained["model.embed_tokens.weight"] *= 2
    update = SharedMemorySender(folder, torch.float32).send(trained.items(), 1)
    assert update is not None
    return update


def test_sleeping_engine_frees_weights_and_receives_new_ones(engine: HFEngine, tmp_path: Path):
    engine.is_colocated = True
    update = send_changed_weights(tmp_path / "weights")

    async def publish_and_sleep() -> tuple[bool, str, list[float]]:
        await engine.start()
        await engine.sleep()
        asleep = all(parameter.is_meta for parameter in engine._model.parameters())
        await engine.wake_weights()
        await engine.receive_weights(str(tmp_path / "weights" / update.folder), update.version)
        receipt = await engine.confirm_weights(1)
        await engine.wake_cache()
        return asleep, receipt.digest, await engine.log_probs([3, 4, 5])

    asleep, digest, logprobs = asyncio.run(publish_and_sleep())
    assert asleep and digest == update.digest and all(map(math.isfinite, logprobs))


def test_paused_answer_continues_with_new_weights(engine: HFEngine, tmp_path: Path):
    """Each token has the log-prob under the weights of its version."""
    context = [3, 4, 5]

    async def change_in_flight() -> tuple[Completion, list[float], list[float]]:
        await engine.start()
        answers = [engine.generate(context[: 3 - i], Sampling(40 - i, seed=i), "r") for i in range(2)]
        calls = [asyncio.ensure_future(answer) for answer in answers]
        await asyncio.sleep(0)
        request = engine._waiting[0]
        while len(request.sampled) < 5:
            await asyncio.sleep(0)
        await engine.pause()
        whole = [*context, *request.sampled]
        before = await engine.log_probs(whole)
        update = send_changed_weights(tmp_path / "weights")
        await engine.receive_weights(str(tmp_path / "weights" / update.folder), update.version)
        await engine.confirm_weights(1)
        await engine.resume()
        answer, _ = await asyncio.gather(*calls)
        return answer, before, await engine.log_probs([*context, *answer.token_ids])

    answer, before, after = asyncio.run(change_in_flight())
    sampled = len(before) - 2
    assert 0 < sampled < 40
    assert answer.weight_versions == [(0, sampled), (1, 40 - sampled)]
    expected = [*before[2:], *after[2 + sampled :]]
    assert answer.logprobs == pytest.approx(expected, abs=1e-5)
    assert max(abs(a - b) for a, b in zip(before[2:], after[2:], strict=False)) > 0.01


def test_paused_answers_continue_before_those_that_wait(engine: HFEngine):
    """Two of three answers are sampled at a time."""

    async def pause_in_flight() -> list[str]:
        await engine.start()
        lengths, ended = {"first": 40, "second": 40, "waits": 1}, list[str]()
        answers = [engine.generate([3, 4], Sampling(length), name) for name, length in lengths.items()]
        calls = [asyncio.ensure_future(answer) for answer in answers]
        for name, call in zip(lengths, calls, strict=True):
            call.add_done_callback(lambda _, name=name: ended.append(name))
        await asyncio.sleep(0)
        request = engine._waiting[0]
        while len(request.sampled) < 5:
            await asyncio.sleep(0)
        await engine.pause()
        assert ended == []
        await engine.resume()
        await asyncio.gather(*calls)
        return ended

    assert asyncio.run(pause_in_flight())[-1] == "waits"


@pytest.mark.parametrize(("token", "kind"), [(3, Completion), (10_000, EngineError)])
def test_a_cancelled_request_does_not_affect_others(engine: HFEngine, token: int, kind: type):
    """Also if the forward pass fails, here because the model has no such token. The last request is the next batch."""

    async def cancel_one() -> list[Completion | BaseException]:
        await engine.start()
        calls = [asyncio.ensure_future(engine.generate([id], Sampling(2), "r")) for id in (token, token, 3)]
        await asyncio.sleep(0)
        calls[0].cancel()
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)

    results = asyncio.run(cancel_one())
    assert [type(result) for result in results] == [asyncio.CancelledError, kind, Completion]


def test_kept_tokens_are_a_column_of_the_completion(engine: HFEngine):
    async def sample() -> Completion:
        await engine.start()
        return await engine.generate([5, 6, 7], Sampling(4, top_k=3, returns_kept_tokens=True), "one")

    completion = asyncio.run(sample())
    kept = completion.columns[KEPT_TOKENS]
    assert kept.sizes.tolist() == [0, 0, 3, 3, 3, 3]
    assert not len(kept[2:].find_outside(completion.token_ids))
    for sets, message in (([[1, 2]], "1 of 2"), ([[1, 2], [3]], r"rollout.name=hf.* token 8 at position 1.* 1 tokens")):
        with pytest.raises(EngineError, match=message):
            engine.spec.check_kept_tokens(sets, [2, 8])
