"""The worker with a real tokenizer, real graders and the fake engine."""

import asyncio
from dataclasses import replace

import pytest

from alphaapollo.config.schema import Judge, Reward
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.engines.fake import FakeEngine
from alphaapollo.engines.types import EngineError
from alphaapollo.processes.time_limit import TimeLimit
from alphaapollo.types import GroupRequest, Message, Prompt, Sampling, Score, TrajectoryGroup
from tests.unit import virtual_time
from tests.unit.rollout.worker_kit import TextEngine, generate, make_worker, write_model

CHAT = [Message(role="user", content="2+2=?")]
PROMPT = Prompt(3, "exact", CHAT, ground_truth="4")
LIMITS = {"max_prompt_length": 64, "max_response_length": 16}


def test_the_policy_judges_itself_with_its_current_weights(folder):
    engine = TextEngine(folder, lambda text: "SCORE: 0.75" if "Judge an answer" in text else "4")
    worker = make_worker(folder, engine, reward=Reward(judge=Judge(backend="policy", max_tokens=20)), **LIMITS)
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
    first, second = (request for request in engine.requests if "Judge an answer" in request[0])
    assert first == second
    text, sampling = first
    assert "<answer>\n4\n</answer>" in text and sampling.max_tokens == 20 and sampling.temperature == 0


def test_a_chat_is_rendered_answered_and_graded(folder):
    engine = TextEngine(folder, lambda text: "4")
    worker = make_worker(folder, engine, **LIMITS)
    (group,) = generate(worker, GroupRequest(PROMPT, 2, Sampling(16, seed=1), stream_position=0))
    assert [trajectory.score for trajectory in group.trajectories] == [Score(1.0, {"accuracy": 1.0})] * 2
    (turn,) = group.trajectories[0].turns
    assert turn.text == "4" and turn.context_ids == engine.renderer.encode_prompt(CHAT)
    text, sampling = engine.requests[0]
    assert text == engine.renderer.decode(turn.context_ids)
    assert sampling.stop_token_ids == engine.renderer.eos_token_ids
    assert worker.get_memory_metrics()["memory/rollout_gib"] > 0.01


@pytest.mark.parametrize(("answer", "reward"), [("4", 0.0), ("5 or 6</think>4", 1.0)])
def test_a_thought_that_the_prompt_opens_is_graded_as_one(tmp_path, answer, reward):
    tokenizer = load_tokenizer(str(write_model(tmp_path)))
    tokenizer.chat_template += "{{ '<think>\\n' }}"
    tokenizer.save_pretrained(tmp_path)
    worker = make_worker(tmp_path, TextEngine(tmp_path, lambda text: answer), **LIMITS)
    (group,) = generate(worker, GroupRequest(PROMPT, 1, Sampling(16, seed=1), stream_position=0))
    (trajectory,) = group.trajectories
    assert trajectory.score.reward == reward and trajectory.turns[0].text == answer  # functions get the same text


def test_a_log_prob_that_is_not_finite_ends_the_generation(folder):
    class Broken(TextEngine):
        async def generate(self, *request):
            return replace(await super().generate(*request), logprobs=[float("nan")])

    with pytest.raises(EngineError, match="rollout engine 0 sampled a token with a non-finite log-prob"):
        generate(make_worker(folder, Broken(folder, lambda _: "")), GroupRequest(PROMPT, 1, Sampling(16), 0))


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
