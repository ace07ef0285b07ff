"""Which messages are the same, what a request continues, and which rows and rewards a session gives."""

from itertools import compress

import numpy as np
import pytest

from alphaapollo.engines import agent_sessions
from alphaapollo.engines.agent_sessions import AgentSession, Answer, Request, SessionLimits
from alphaapollo.observability.sample_metrics import convert_to_sample_result, read_sample_result
from alphaapollo.rollout.agents.runner import build_turns_and_rows, find_branches
from alphaapollo.rollout.token_context import check_rows_match_turns
from alphaapollo.runs.rollout_log import make_trajectory_record
from alphaapollo.types import EpisodeEnd, Prompt, Sampling, Score, Trajectory
from tests.builders import make_completion

END = 9


def call(name, arguments):
    return {"id": "x", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("message", "is_same"),
    [
        ({"content": " 4 \n"}, True),
        ({"content": [{"type": "text", "text": "4"}]}, True),
        ({"content": "4", "reasoning_content": "dropped or not"}, True),
        ({"content": "4", "tool_calls": [call("add", "{}")]}, False),
    ],
)
def test_identity_of_an_answer(message, is_same):
    (key,), _ = agent_sessions.make_message_keys([{"role": "assistant", **message}])
    assert (key == agent_sessions.make_answer_key("4", [])) is is_same


def test_identity_of_tool_calls():
    def key(arguments):
        return agent_sessions.make_message_keys(
            [{"role": "assistant", "content": None, "tool_calls": [call("add", arguments)]}]
        )[0][0]

    assert key('{"a":1,"b":2}') == key('{ "b": 2, "a": 1 }') == key({"a": 1, "b": 2})
    assert key('{"a":1}') != key('{"a":"1"}') and key("{") == key("{") != key("{{")


def make_chat(*texts):
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]


class Talk:
    """Session whose tokens are numbers: each message and each answer is one token, followed by END."""

    def __init__(self, max_tokens=100, max_requests=10):
        self.session = AgentSession(
            Sampling(max_tokens), lambda number: number, SessionLimits(2 * max_tokens, max_requests)
        )
        self.count = 10

    def ask(self, *texts, n=1, role="", tools="", delivered=True, retry=False) -> Request:
        """Send a chat of user messages and answers in turn. The n answers are a11, a12, ..., counted over all requests;
        a retry gets those of the request that was not delivered."""
        messages = make_chat(*texts)
        request = Request(self.session, str(texts), role, retry)
        self.session.count_request(request, n)
        span = request.find_history(messages, tools)
        known = request.parent.token_ids if span else []
        new = texts[span[1] :] if span else texts
        request.check_prompt(known)
        prompt = [*known, *(hash(text) % 1000 + 1000 for text in new)]
        request.start_sampling(f"id{self.count}", prompt, 50)
        numbers = range(self.count + 1, self.count + n + 1) if request.earlier is None else request.earlier.outputs
        self.count += n * (request.earlier is None)
        answers = [Answer(request, make_completion([number, END]), "", f"a{number}") for number in numbers]
        request.record_answers(answers, numbers)
        request.finish(delivered)
        return request

    def rows(self, *options) -> list[list[int]]:
        turns, rows, *prompts = build_turns_and_rows(self.session, *(options or ("all", ())))
        check_rows_match_turns(rows, turns, *prompts)
        self.turns = turns
        return [list(compress(row.token_ids, row.action_mask)) for row in rows]


def test_a_chat_that_grows_is_one_row():
    talk = Talk()
    talk.ask("p")
    talk.ask("p", "a11", "q")
    assert talk.rows() == [[11, END, 12, END]]
    assert [turn.info.get("reused_tokens") for turn in talk.turns] == [None, 3]
    assert talk.turns[0].observation == [{"role": "user", "content": "q"}]


def test_the_longest_path_is_one_row_and_rows_are_in_the_order_of_their_last_answers():
    talk = Talk()
    talk.ask("p")
    talk.ask("p", "a11", "short")
    talk.ask("p", "a11", "long")
    talk.ask("p", "a11", "long", "a13", "on")
    talk.ask("other")
    branches = [[one.request.id for one in branch] for branch in find_branches(talk.session.answers)]
    assert branches == [["id10", "id12", "id13"], ["id14"], ["id11"]]
    assert talk.rows() == [[12, END], [11, END, 13, END, 14, END], [15, END]]
    assert [turn.answer_number for turn in talk.turns] == [1, 0, 2, 3, 4]
    assert talk.rows("main", ()) == [[11, END, 13, END, 14, END]] and talk.rows("last", ()) == [[15, END]]
    assert len(talk.turns) == 5


def test_last_answer_is_not_in_the_last_turn():
    talk = Talk()
    talk.ask("a")
    talk.ask("sub-agent", role="checker")
    talk.ask("a", "a11", "b")
    turns, rows, *_ = build_turns_and_rows(talk.session, "all", ["checker"])
    turns[1].text = "#### 42"
    one = Trajectory(0, 0, turns, rows, Score(1.0), EpisodeEnd.DONE)
    assert one.last_turn is turns[1] is not turns[-1]
    prompt = Prompt(0, "source", "a")
    assert convert_to_sample_result(prompt, one).answer == "42"
    assert read_sample_result(make_trajectory_record(0, prompt, one)).answer == "42"
    assert Trajectory(0, 0, [], [], Score(1.0), EpisodeEnd.DONE).last_turn is None


def test_untrained_turns_are_context():
    talk = Talk()
    talk.ask("p", role="planner")
    talk.ask("p", "a11", "q", role="checker")
    talk.ask("p", "a11", "q", "a12", "r", role="solver")
    assert talk.rows("all", ["checker"]) == [[11, END, 13, END]]
    assert talk.rows("all", ["checker", "planner"]) == [[13, END]]
    assert talk.rows("all", ["checker", "planner", "solver"]) == [] and len(talk.turns) == 3


def test_changed_tools_start_a_branch():
    talk = Talk()
    talk.ask("p", tools='["add"]')
    request = talk.ask("p", "a11", "q", tools='["add", "subtract"]')
    assert len(talk.rows()) == 2
    assert "tools" in request.difference


def test_difference_of_an_edited_message():
    talk = Talk()
    talk.ask("p")
    talk.ask("p", "a11", "q")
    request = talk.ask("p", "a11", "Q", "a12", "r")
    assert request.difference == "message 2: user: 'q' became user: 'Q'"
    assert request.answers[0].parent is talk.session.answers[0]  # the part before the edit is reused


def test_seeds_depend_on_the_prompt_and_its_repetitions():
    def seeds(*prompts):
        session = Talk().session
        return [session.count_sampling([prompt]) for prompt in prompts]

    first, second, other = seeds(1, 1, 2)
    assert len({first, second, other}) == 3 and seeds(2, 1, 1) == [other, first, second]


@pytest.mark.parametrize(
    ("options", "is_resent"),
    [
        ({"retry": True}, True),  # the first answer was received, because a request continues it
        ({"retry": True, "delivered": False}, True),
        ({}, False),  # the same question asked again
    ],
)
def test_retries(options, is_resent):
    talk = Talk()
    talk.ask("p")
    talk.ask("p", "a11", "q")
    talk.ask("p")
    talk.ask("p", **options)
    found = [request.id for request in talk.session.requests]
    assert found == ["id10", "id11", *([] if is_resent else ["id12"]), "id13"]
    assert talk.session.requests[1].answers[0].parent is talk.session.requests[0].answers[0]


def test_rewards_of_turns():
    talk = Talk()
    talk.ask("p")
    talk.ask("lost", delivered=False)
    talk.ask("p", "a11", "q").answers[0].add_reward(1.0)
    talk.session.give_turn_rewards([0.0, 0.5])
    assert [answer.reward for answer in talk.session.answers] == [0.0, 1.5]


def test_random_sessions_do_not_depend_on_retries():
    """300 forests: each request may be lost once or twice, may continue any answer, may have several answers."""
    for seed in range(300):
        rows, rewards = [], []
        for may_lose in (False, True):
            generator, losses = np.random.default_rng(seed), np.random.default_rng(seed + 1000)
            talk = Talk(max_requests=100)
            chats, given = [["q"]], 0.0
            for _ in range(int(generator.integers(1, 9))):
                chat = chats[int(generator.integers(len(chats)))]
                n, retry = int(generator.integers(1, 4)), False
                while may_lose and losses.random() < 0.3:
                    talk.ask(*chat, n=n, delivered=False, retry=retry)
                    retry = True
                request = talk.ask(*chat, n=n, retry=retry)
                if generator.random() < 0.5:
                    reward = float(generator.integers(1, 5)) / 4
                    request.id = f"request {len(chats)}"
                    talk.session.give_reward(request.id, reward)
                    given += reward
                for answer in request.answers:
                    chats.append([*chat, answer.content, f"more {len(chats)}"])
            turns, made, *_ = build_turns_and_rows(talk.session, "all", ())
            rows.append([(row.token_ids, row.action_mask, row.num_earlier_tokens) for row in made])
            rewards.append([(turn.answer_number, turn.reward) for turn in turns])
            assert sum(turn.reward for turn in turns) == pytest.approx(given)
        assert rows[0] == rows[1] and rewards[0] == rewards[1]


@pytest.mark.parametrize("n", [1, 3])
def test_limit_counts_answers(n):
    talk = Talk(max_requests=6)
    for number in range(6 // n):
        talk.ask(f"q{number}", n=n)
    with pytest.raises(ValueError, match=r"env\.agent\.max_requests=6"):
        talk.ask("one more")
    assert talk.session.reached_limit
