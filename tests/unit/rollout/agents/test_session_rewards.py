"""Rewards of single requests of a session: conserved, once for all retries, on the right branch."""

import numpy as np
import pytest

from alphaapollo.engines.http_api import Answer, Request
from alphaapollo.rollout.agents.runner import build_turns_and_rows
from tests.builders import make_completion
from tests.unit.rollout.agents.test_session import Talk


def rewards_of(talk: Talk) -> dict[str, float]:
    return {one.content: one.reward for one in talk.session.answers if one.reward is not None}


def test_a_reward_of_several_answers_is_shared():
    talk = Talk()
    talk.ask("q", n=4)
    talk.session.give_reward("id10", 1.0)
    assert rewards_of(talk) == {"a11": 0.25, "a12": 0.25, "a13": 0.25, "a14": 0.25}


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


def test_a_path_of_3000_answers():
    session, answer = Talk().session, None
    for number in range(3000):
        answer = Answer(Request(session, "", parent=answer), make_completion([number]), "", "")
    assert len(answer.path) == 3000 and answer.path[-1] is answer


@pytest.mark.parametrize("n", [1, 3])
def test_limit_counts_answers(n):
    talk = Talk(max_requests=6)
    for number in range(6 // n):
        talk.ask(f"q{number}", n=n)
    with pytest.raises(ValueError, match=r"env\.agent\.max_requests=6"):
        talk.ask("one more")
    assert talk.session.reached_limit
