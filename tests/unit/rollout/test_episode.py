"""Episodes with a scripted engine. Token ids are small numbers, and text is these numbers separated by spaces."""

import asyncio
import math
from collections.abc import Sequence

import pytest

from alphaapollo.engines.fake import FakeEngine
from alphaapollo.engines.protocol import EngineError
from alphaapollo.environments.base import Observation, StepResult
from alphaapollo.rollout.context import AppendContext
from alphaapollo.rollout.episode import EpisodeLimits, EpisodeRunner, EpisodeTask
from alphaapollo.runs.rollout_log import make_trajectory_record
from alphaapollo.types import EpisodeEnd, Message, Outcome, Prompt, Sampling, Score, StopReason, Trajectory, Turn

STOP = 9
PROMPT = Prompt(3, "exact", "1 2")


class Numbers:
    """Renderer for numbers: "1 2" has the tokens [1, 2]. A delta ends an open turn with STOP."""

    def encode_prompt(self, content: list[Message] | str) -> list[int]:
        text = content if isinstance(content, str) else content[-1]["content"]
        return [int(word) for word in text.split()]

    def encode_observation(self, messages: list[Message], last_sampled_token: int | None = None) -> list[int]:
        return [STOP] * (last_sampled_token != STOP) + self.encode_prompt(messages)

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(str(token) for token in token_ids if token != STOP)


class Environment:
    """Environment that answers each action with the next of `replies`, or raises it if it is an exception."""

    def __init__(self, *replies: object, first: object = "1 2"):
        self.replies = list(replies)
        self.first = first
        self.actions: list[str] = []
        self.closed = False

    async def reset(self, prompt: Prompt) -> object:
        return self._say(self.first)

    async def step(self, action: str) -> object:
        self.actions.append(action)
        return self._say(self.replies.pop(0))

    async def close(self) -> None:
        self.closed = True

    def _say(self, reply: object) -> object:
        if isinstance(reply, Exception):
            raise reply
        return reply


def answers(*scripted: list[int]):
    """Engine that gives these answers in turn and records its requests."""
    asked: list[tuple[list[int], Sampling]] = []

    def script(token_ids: list[int], sampling: Sampling) -> list[int]:
        asked.append((list(token_ids), sampling))
        return scripted[len(asked) - 1]

    return FakeEngine(10, script=script), asked


def show(text: str, **others: object) -> StepResult:
    return StepResult(Observation([Message(role="user", content=text)]), **others)


def done(reward: float) -> StepResult:
    return StepResult(done=True, score=Score(reward))


def make_runner(engine, limits: EpisodeLimits, grade=None) -> EpisodeRunner:
    renderer = Numbers()
    return EpisodeRunner(
        engine,
        renderer.decode,
        lambda *_: AppendContext(renderer.encode_prompt, renderer.encode_observation, lambda content: ()),
        limits,
        grade,
        decode_raw=lambda ids: "".join(f"<{token}>" for token in ids),
    )


def play(
    engine,
    *environments,
    max_tokens: int = 20,
    turns: int = 5,
    seconds: float = 5.0,
    per_turn: int | None = None,
    limit_reward: float | None = None,
    grade=None,
    runner=asyncio.run,
) -> Trajectory:
    left = list(environments)
    task = EpisodeTask(
        PROMPT,
        sample_index=1,
        make_environment=lambda _: left.pop(0),
        sampling=Sampling(max_tokens, stop_token_ids=(STOP,)),
        derive_turn_seed=lambda turn: 100 + turn,
        name="t",
    )
    return runner(make_runner(engine, EpisodeLimits(turns, seconds, per_turn, limit_reward), grade).run(task))


def test_one_turn():
    engine, asked = answers([5, STOP])
    first = [Message(role="user", content="1 2")]
    environment = Environment(done(0.5), first=Observation(first))
    trajectory = play(engine, environment)
    assert trajectory.first_observation == first
    assert (trajectory.end, trajectory.score) == (EpisodeEnd.DONE, Score(0.5))
    assert (trajectory.prompt_id, trajectory.sample, trajectory.num_tokens) == (3, 1, 2)
    assert environment.actions == ["5"] and environment.closed
    assert asked == [([1, 2], Sampling(20, seed=100, stop_token_ids=(STOP,)))]
    (row,) = trajectory.rows
    assert row.token_ids == [1, 2, 5, STOP]
    assert row.action_mask == [0, 0, 1, 1]
    assert row.logprobs == [0.0, 0.0, -1.0, -1.0]
    assert row.turn_ends == [3] and row.response_start == 2


def test_second_turn_appends_the_observation():
    engine, asked = answers([5, STOP], [6])
    trajectory = play(engine, Environment(show("7 8", reward=0.25, valid=False, info={"tool": "x"}), done(1.0)))
    # the second request: prompt 2 + action 2 + delta 2 tokens; 20 - 2 - 2 are left for its answer; a seed of its own
    assert asked[1] == ([1, 2, 5, STOP, 7, 8], Sampling(16, seed=101, stop_token_ids=(STOP,)))
    first, second = trajectory.turns
    assert (first.context_ids, first.text, first.reward, first.valid) == ([1, 2], "5", 0.25, False)
    assert first.info == {"tool": "x"}
    assert (first.observation, second.observation) == ([{"role": "user", "content": "7 8"}], None)
    assert (second.context_ids, second.text) == ([7, 8], "6")
    (row,) = trajectory.rows
    assert row.token_ids == [1, 2, 5, STOP, 7, 8, 6]
    assert row.action_mask == [0, 0, 1, 1, 0, 0, 1]
    assert row.logprobs == [0.0, 0.0, -1.0, -1.0, 0.0, 0.0, -1.0]
    assert row.turn_ends == [3, 6]


@pytest.mark.parametrize(
    ("answer", "limits", "kept_chars", "sampled", "truncated"),
    [
        ([5, 6, 7, 8], {"max_tokens": 3}, None, [5, 6, 7], True),
        ([5, 6, STOP], {"max_tokens": 3}, None, [5, 6, STOP], False),
        ([5, 6, 7], {"per_turn": 2}, None, [5, 6], True),
        ([5, 6, 7], {"per_turn": 2}, 1, [5], False),
    ],
    ids=["over the limit", "fits", "over the turn's limit", "action before the turn's limit"],
)
def test_truncated_answer_is_scored(answer, limits, kept_chars, sampled, truncated):
    engine, _ = answers(answer)
    trajectory = play(engine, Environment(StepResult(done=True, score=Score(1.0), kept_chars=kept_chars)), **limits)
    assert trajectory.end is (EpisodeEnd.TOKEN_LIMIT if truncated else EpisodeEnd.DONE)
    assert trajectory.truncated is truncated and trajectory.score == Score(1.0)
    completion = trajectory.turns[0].completion
    assert completion.token_ids == sampled
    assert not truncated or completion.stop_reason is StopReason.LENGTH


@pytest.mark.parametrize("max_tokens", [2, 3, 4])  # nothing left; no room for the delta; none for an answer after it
def test_budget_counts_observations(max_tokens):
    engine, asked = answers([5, STOP], [6])
    trajectory = play(engine, Environment(show("7 8"), done(1.0)), max_tokens=max_tokens)
    assert trajectory.end is EpisodeEnd.TOKEN_LIMIT and len(asked) == 1
    assert trajectory.rows[0].token_ids == [1, 2, 5, STOP]
    assert trajectory.score == Score(0.0, reason="no answer before the token limit")


def test_turn_limit():
    engine, asked = answers([5], [6], [7])
    trajectory = play(engine, Environment(show("1"), show("1"), show("1")), turns=2)
    assert trajectory.end is EpisodeEnd.TURN_LIMIT and len(asked) == 2
    assert trajectory.score == Score(0.0, reason="no answer before the turn limit")


@pytest.mark.parametrize(
    ("limits", "end"),
    [({"turns": 1}, EpisodeEnd.TURN_LIMIT), ({"max_tokens": 2}, EpisodeEnd.TOKEN_LIMIT)],
)
def test_a_graded_episode_without_an_answer_is_graded_as_an_empty_one(limits, end):
    """The empty text is graded, so that the score has all reward components."""
    graded = []

    async def grade(prompt: Prompt, text: str, turns: Sequence[Turn]) -> Score:
        graded.append((prompt, text, [(turn.text, turn.observation) for turn in turns]))
        return Score(-1.0, {"accuracy": 0.0, "format": -1.0}, Outcome.WRONG_FORMAT, "nothing there")

    engine, _ = answers([5, STOP])
    trajectory = play(engine, Environment(show("7 8")), grade=grade, **limits)
    reason = f"no answer before the {end.replace('_', ' ')}: nothing there"
    assert trajectory.end is end
    assert graded == [(PROMPT, "", [("5", [{"role": "user", "content": "7 8"}])])]
    assert trajectory.score == Score(-1.0, {"accuracy": 0.0, "format": -1.0}, Outcome.WRONG_FORMAT, reason)


@pytest.mark.parametrize("is_graded", [False, True])
def test_a_limit_has_the_configured_reward(is_graded):
    async def grade(prompt: Prompt, text: str, turns: Sequence[Turn]) -> Score:
        raise AssertionError("an episode without an answer is not graded")

    engine, _ = answers([5, STOP])
    trajectory = play(engine, Environment(show("7 8")), turns=1, limit_reward=-1.0, grade=grade if is_graded else None)
    score = trajectory.score
    assert (score.reward, score.accuracy, score.component("format")) == (-1.0, 0.0, 0.0)


def test_done_without_a_score_has_only_turn_rewards():
    engine, _ = answers([5])
    trajectory = play(engine, Environment(StepResult(done=True, reward=0.5)))
    assert trajectory.score == Score(0.0, reason="the environment returned no score")
    assert trajectory.turns[0].reward == 0.5


def test_failing_environment_is_replaced_once_with_the_same_seeds():
    engine, asked = answers([5], [6], [5], [6])
    broken = Environment(show("7"), RuntimeError("socket closed"))
    trajectory = play(engine, broken, Environment(show("7"), done(1.0)))
    assert trajectory.end is EpisodeEnd.DONE and trajectory.score == Score(1.0)
    assert len(trajectory.turns) == 2 and broken.closed
    assert asked[0] == asked[2] and asked[1] == asked[3]  # same contexts, same seeds


@pytest.mark.parametrize(
    ("reply", "facts"),
    [
        (RuntimeError("socket closed"), ["Environment.step", "RuntimeError: socket closed"]),
        (TimeoutError("tool"), ["Environment.step", "TimeoutError: tool"]),
        (None, ["the result of step", "NoneType"]),
        (StepResult(), ["step returned neither", "done=True"]),
        (StepResult("7"), ["observation must be", "str"]),
        (StepResult(Observation("7")), ["messages", "not '7'"]),
        (StepResult(Observation([])), ["messages", "not []"]),
        (StepResult(Observation([{"role": "user", "content": None}])), ["message {'role': 'user', 'content': None}"]),
        (StepResult(done=True, score=1.0), ["score must be a Score", "float"]),
        (StepResult(done=True, reward="1"), ["reward is str"]),
        (StepResult(done=True, reward=math.nan), ["reward is nan"]),
        (done(-1e30), ["score.reward is -1e+30", "-1e+09 to 1e+09"]),
        (done(10**400), [f"score.reward is 1{'0' * 29}."]),
        (done(math.inf), ["score.reward is inf"]),
        (StepResult(done=True, score=Score(1.0, {"a": None})), ["score.components['a'] is NoneType"]),
        (StepResult(done=True, kept_chars=1.5), ["kept_chars", "float"]),
        (StepResult(done=True, info=None), ["info=None"]),
        (StepResult(done=True, info={"tool_calls": [{"tool": "x"}]}), ["info['tool_calls']", "status"]),
        (StepResult(done=True, info={"tool_calls": [{"status": "ok"}]}), ["info['tool_calls']: seconds is NoneType"]),
        (StepResult(done=True, info={("a", 1): 2}), ["info={('a', 1): 2}"]),
    ],
    ids=str,
)
def test_an_environment_that_fails_twice_is_masked_with_a_reason(reply, facts):
    engine, _ = answers([5], [5])
    trajectory = play(engine, Environment(reply), Environment(reply))
    assert trajectory.end is EpisodeEnd.ENVIRONMENT_FAILED
    assert trajectory.score.outcome is Outcome.ENVIRONMENT_FAILED and math.isnan(trajectory.score.reward)
    assert all(fact in trajectory.score.reason for fact in [*facts, "attempt 2 of 2"]), trajectory.score.reason
    assert trajectory.rows[0].token_ids == [1, 2, 5]  # what was sampled stays for the log


@pytest.mark.parametrize("first", [RuntimeError("no tool"), 7, Observation(["1 2"]), Observation("1 2")])
def test_environment_that_cannot_reset(first):
    engine, asked = answers()
    trajectory = play(engine, Environment(first=first), Environment(first=first))
    assert trajectory.end is EpisodeEnd.ENVIRONMENT_FAILED and asked == []
    assert trajectory.turns == [] and trajectory.rows == [] and trajectory.first_observation is None


def test_an_environment_that_cannot_be_made():
    def make(turns):
        raise KeyError("game")

    engine, _ = answers()
    runner = make_runner(engine, EpisodeLimits(1, 5.0))
    task = EpisodeTask(PROMPT, 0, make, Sampling(4), lambda turn: 0, "t")
    trajectory = asyncio.run(runner.run(task))
    assert all(fact in trajectory.score.reason for fact in ("KeyError: 'game'", "attempt 2 of 2"))


class Sync:
    def __init__(self, error: BaseException):
        self.error = error

    def reset(self, prompt: Prompt) -> str:
        return "1 2"

    def step(self, action: str) -> StepResult:
        raise self.error

    def close(self) -> None:
        pass


@pytest.mark.parametrize("error", [KeyError("x"), StopIteration(), SystemExit(3)])
def test_exception_of_a_sync_environment_is_an_environment_failure(error):
    engine, _ = answers([5], [5])
    trajectory = play(engine, Sync(error), Sync(error))
    assert trajectory.end is EpisodeEnd.ENVIRONMENT_FAILED
    assert trajectory.score.reason.startswith("Sync.step: ")


@pytest.mark.parametrize(
    ("missing", "end"), [("reset", "environment_failed"), ("step", "environment_failed"), ("close", "done")]
)
def test_an_environment_without_a_method_does_not_end_the_run(monkeypatch, missing, end):
    monkeypatch.delattr(Environment, missing)
    engine, _ = answers([5], [5])
    trajectory = play(engine, Environment(done(1.0)), Environment(done(1.0)))
    assert trajectory.end == end
    if end == "environment_failed":
        assert f"no attribute '{missing}' (attempt 2 of 2)" in trajectory.score.reason


def test_engine_error_is_not_an_environment_failure():
    class Dead(FakeEngine):
        async def generate(self, token_ids, sampling, request_id, images=()):
            raise EngineError("rollout engine 0: its core process died")

    environment = Environment(done(1.0))
    with pytest.raises(EngineError, match="rollout engine 0"):
        play(Dead(10), environment)
    assert environment.closed


def test_result_is_kept_when_closing_fails():
    class Stubborn(Environment):
        async def close(self) -> None:
            raise OSError("busy")

    engine, _ = answers([5])
    assert play(engine, Stubborn(done(1.0))).score == Score(1.0)


@pytest.mark.parametrize(("kept_chars", "kept"), [(1, [5]), (3, [5, 6]), (2, [5, 6]), (0, [5]), (99, [5, 6, 7, STOP])])
def test_tokens_after_the_action_are_removed(kept_chars, kept):
    engine, asked = answers([5, 6, 7, STOP], [8])
    trajectory = play(engine, Environment(show("1", kept_chars=kept_chars), done(1.0)))
    turn = trajectory.turns[0]
    assert turn.completion.token_ids == kept and len(turn.completion.logprobs) == len(kept)
    assert turn.text == " ".join(str(token) for token in kept if token != STOP)
    closed = [] if kept[-1] == STOP else [STOP]
    assert asked[1][0] == [1, 2, *kept, *closed, 1]  # the next prompt has the kept tokens
    assert asked[1][1].max_tokens == 20 - len(kept) - len(closed) - 1


def test_turn_has_its_own_limit():
    engine, asked = answers([5, 6, 7], [8])
    trajectory = play(engine, Environment(show("1"), done(1.0)), per_turn=2)
    assert [sampling.max_tokens for _, sampling in asked] == [2, 2]
    assert trajectory.turns[0].completion.stop_reason is StopReason.LENGTH
    assert trajectory.end is EpisodeEnd.DONE and not trajectory.truncated


def test_a_truncated_turn_shows_special_tokens():
    engine, _ = answers([4, 4, 4, 4, 4, 4], [5, STOP])
    truncated = play(engine, Environment(show("7"), done(1.0)), per_turn=2)
    shown = [(turn.text, turn.raw_text) for turn in truncated.turns]
    assert shown == [("4 4", "<4><4>"), ("5", "")]
    record = make_trajectory_record(1, PROMPT, truncated)
    assert record["text"] == "<4><4>\n\n5"
    assert [turn.get("raw_text") for turn in record["turns"]] == ["<4><4>", None]
