"""The worker with a real tokenizer, real graders and the fake engine."""

import asyncio
from dataclasses import replace

import pytest

import alphaapollo.rollout.worker as rollout_worker
from alphaapollo.config.schema import Judge, Reward
from alphaapollo.data.rendering import Renderer, load_tokenizer
from alphaapollo.engines.fake import FakeEngine
from alphaapollo.processes.time_limit import TimeLimit
from alphaapollo.types import (
    EpisodeEnd,
    GroupRequest,
    Message,
    Outcome,
    Prompt,
    Sampling,
    Score,
    TrajectoryGroup,
)
from tests.unit import virtual_time
from tests.unit.rollout.test_images import SMALL
from tests.unit.rollout.worker_kit import generate, make_worker, write_model
from tests.vision.models import make as make_vision_model

CHAT = [Message(role="user", content="2+2=?")]
PROMPT = Prompt(3, "exact", CHAT, ground_truth="4")


LIMITS = {"max_prompt_length": 64, "max_response_length": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def test_the_policy_judges_itself_with_its_current_weights(folder):
    tokenizer = load_tokenizer(str(folder))
    judged = []

    def script(token_ids: list[int], sampling: Sampling) -> list[int]:
        text = tokenizer.decode(token_ids)
        if "Judge an answer" in text:
            judged.append((text, sampling))
        answer = "SCORE: 0.75" if "Judge an answer" in text else "4"
        return [*tokenizer.encode(answer, add_special_tokens=False), *sampling.stop_token_ids]

    reward = Reward(judge=Judge(backend="policy", max_tokens=20))
    worker = make_worker(folder, FakeEngine(272, script=script), reward=reward, **LIMITS)
    request = GroupRequest(replace(PROMPT, data_source="judge"), 2, Sampling(16, seed=1), stream_position=0)

    async def play() -> list[TrajectoryGroup]:
        await worker.start()
        try:
            groups = [await worker.generate(request)]
            await worker.confirm_weights(1, "")  # the weights have changed, so the verdicts are requested again
            return [*groups, await worker.generate(request)]
        finally:
            await worker.close()

    for group in asyncio.run(play()):
        assert [one.score for one in group.trajectories] == [Score(0.75, {"accuracy": 1.0})] * 2
        assert sum(one.score.judge_usage.cached for one in group.trajectories) == 1
    assert len(judged) == 2 and judged[0] == judged[1]
    text, sampling = judged[0]
    assert "<answer>\n4\n</answer>" in text and sampling.max_tokens == 20 and sampling.temperature == 0


def test_a_chat_is_rendered_answered_and_graded(folder):
    asked = []

    def script(token_ids: list[int], sampling: Sampling) -> list[int]:
        asked.append((token_ids, sampling))
        return [*four, *sampling.stop_token_ids]

    worker = make_worker(folder, FakeEngine(272, script=script), **LIMITS)
    renderer = Renderer(load_tokenizer(str(folder)))
    four = renderer.encode(["4"])[0]
    (group,) = generate(worker, GroupRequest(PROMPT, 2, Sampling(16, seed=1), stream_position=0))
    assert [trajectory.score for trajectory in group.trajectories] == [Score(1.0, {"accuracy": 1.0})] * 2
    (turn,) = group.trajectories[0].turns
    assert turn.text == "4" and turn.context_ids == renderer.encode_prompt(CHAT) == asked[0][0]
    assert asked[0][1].stop_token_ids == renderer.eos_token_ids
    assert worker.get_memory_metrics()["memory/rollout_gib"] > 0.01


def test_fake_engine_is_selected_by_name_and_has_no_weights(folder):
    worker = make_worker(folder, **LIMITS)
    assert isinstance(worker.engine, FakeEngine)
    assert asyncio.run(worker.confirm_weights(2, "")) is None


def test_long_prompt_is_truncated_or_masked(folder):
    request = GroupRequest(PROMPT, 1, Sampling(16), stream_position=0)
    (group,) = generate(make_worker(folder, **LIMITS | {"max_prompt_length": 5}, truncation="left"), request)
    assert len(group.trajectories[0].turns[0].context_ids) == 5
    (group,) = generate(make_worker(folder, **LIMITS | {"max_prompt_length": 5}), request)
    (trajectory,) = group.trajectories
    assert trajectory.end is EpisodeEnd.PROMPT_LIMIT and trajectory.score.outcome is Outcome.ENVIRONMENT_FAILED
    assert "data.max_prompt_length=5" in trajectory.score.reason


def test_a_missing_tokenizer_is_named(tmp_path):
    worker = make_worker(tmp_path, FakeEngine(10))
    with pytest.raises(ValueError, match="has no tokenizer"):
        generate(worker)


def test_the_engine_imports_its_libraries_before_the_tokenizer_is_loaded(folder, monkeypatch):
    events = []

    class Noting(FakeEngine):
        async def preload_libraries(self) -> None:
            events.append("imports")

        async def start(self) -> None:
            events.append("engine")

    def noting(path: str, trust_remote_code: bool):
        events.append("tokenizer")
        return load_tokenizer(path, trust_remote_code)

    monkeypatch.setattr(rollout_worker, "load_tokenizer", noting)
    generate(make_worker(folder, Noting(272)))
    assert events[0] == "imports" and sorted(events[1:]) == ["engine", "tokenizer"]


def test_pause_does_not_count_in_environment_time_limits(folder):
    worker = make_worker(folder, FakeEngine(10))

    async def play() -> float:
        clock = TimeLimit(10.0)
        async with clock.count_time():
            await asyncio.sleep(4)
            await worker.pause()
            await asyncio.sleep(100)
            await worker.resume()
            await asyncio.sleep(1)
        return clock.seconds_left

    assert virtual_time.run(play()) == 5.0


def test_worker_of_a_vision_language_model_prepares_images(tmp_path):
    make_vision_model("qwen3_vl", tmp_path / "model")
    content = [Message(role="user", content="<image> How many?", images=[SMALL])]
    engine = FakeEngine(256, max_tokens=4)
    worker = make_worker(tmp_path / "model", engine, **LIMITS)
    (group,) = generate(worker, GroupRequest(Prompt(3, "exact", content, "4"), 2, Sampling(8), stream_position=0))
    first, second = (trajectory.rows[0].images for trajectory in group.trajectories)
    assert first == second and first[0].num_placeholders == 4  # 32 x 32 pixels
    assert worker._services.sees_images
