"""Rewards of single requests of a session: conserved, once for all retries, on the right branch."""

import numpy as np
import pytest

from alphaapollo.engines.http_api import RequestedSampling, SampledAnswer
from alphaapollo.rollout.agents.rows import build_turns_and_rows
from alphaapollo.rollout.agents.session import Answer, Request, Session, SessionLimits
from alphaapollo.types import Sampling
from tests.builders import make_completion


class Talk:
    """Session in which each chat is a list of texts, and answer number k has the text `a{k}` and one token."""

    def __init__(self, max_requests=100):
        self.session = Session(Sampling(10**6), lambda number: number, SessionLimits(10**7, max_requests))
        self.count = 0

    def ask(self, *chat, n=1, delivered=True, retry=False, reward=None, role="") -> list[str]:
        """Return the texts of the answers."""
        request = Request(self.session, str((chat, reward)), role, retry, reward)
        self.session.count_request(request, n)
        roles = ("user", "assistant")
        history = request.find_history(
            [{"role": roles[index % 2], "content": text} for index, text in enumerate(chat)], ""
        )
        known = history.token_ids if history else []
        prompt = [*known, *(hash(text) % 1000 for text in chat[history.answer_end if history else 0 :])]
        request.start_sampling(f"id{self.count}", prompt, RequestedSampling(50, False))
        if (sampled := request.get_sampled_outputs()) is None:
            sampled = []
            for _ in range(n):
                self.count += 1
                sampled.append(SampledAnswer(make_completion([self.count]), "", f"a{self.count}", []))
        request.record_answers(sampled, sampled)
        request.finish(delivered)
        return [one.content for one in sampled]

    def rewards(self) -> dict[str, float]:
        return {one.sampled.content: one.reward for one in self.session.answers if one.reward is not None}


def test_a_retry_repeats_no_reward():
    talk = Talk()
    talk.ask("q")
    talk.ask("q", "a1", "next", reward=0.5, delivered=False)
    talk.ask("q", "a1", "next", reward=0.5, retry=True)
    assert talk.rewards() == {"a1": 0.5}
    assert talk.session.num_started == 2


def test_a_reward_of_several_answers_is_shared():
    talk = Talk()
    talk.ask("q", n=4)
    talk.session.give_reward("id0", 1.0)
    assert talk.rewards() == {"a1": 0.25, "a2": 0.25, "a3": 0.25, "a4": 0.25}


def test_header_of_a_new_chat_rewards_the_answer_of_its_role():
    talk = Talk()
    talk.ask("q", role="main")
    talk.ask("sub", role="helper")
    talk.ask("compacted", role="main", reward=0.5)
    assert talk.rewards() == {"a1": 0.5} and not talk.session.refused_reward
    talk.ask("another", role="main", reward=0.5)  # this role now has two paths
    assert talk.rewards() == {"a1": 0.5} and "x-reward" in talk.session.refused_reward


def test_random_sessions_do_not_depend_on_retries():
    """300 forests: each request may be lost once or twice, may continue any answer, may have several answers."""
    for seed in range(300):
        rows, rewards = [], []
        for may_lose in (False, True):
            generator, losses, talk = np.random.default_rng(seed), np.random.default_rng(seed + 1000), Talk()
            chats, given = [["q"]], {}
            for _ in range(int(generator.integers(1, 9))):
                chat = chats[int(generator.integers(len(chats)))]
                reward = float(generator.integers(1, 5)) / 4 if len(chat) > 1 and generator.random() < 0.5 else None
                n, retry = int(generator.integers(1, 4)), False
                while may_lose and losses.random() < 0.3:
                    talk.ask(*chat, n=n, reward=reward, delivered=False, retry=retry)
                    retry = True
                given[str((chat, reward))] = reward or 0.0
                for answer in talk.ask(*chat, n=n, reward=reward, retry=retry):
                    chats.append([*chat, answer, f"more {len(chats)}"])
            turns, made, *_ = build_turns_and_rows(talk.session, "all", ())
            rows.append([(row.token_ids, row.action_mask, row.num_earlier_tokens) for row in made])
            rewards.append([(turn.answer_number, turn.reward) for turn in turns])
            assert sum(turn.reward for turn in turns) == sum(given.values())
        assert rows[0] == rows[1] and rewards[0] == rewards[1]


def test_long_and_wide_chats():
    """A path of 3,000 answers, and the number of digests that a chat of as many messages needs."""
    talk, answer = Talk(10**6), None
    request = Request(talk.session, "")
    for number in range(3000):
        answer = Answer(request, SampledAnswer(make_completion([number]), "", "", []), answer)
    assert len(answer.path) == 3000 and answer.path[-1] is answer


@pytest.mark.parametrize("n", [1, 3])
def test_limit_counts_answers(n):
    talk = Talk(max_requests=6)
    for number in range(6 // n):
        talk.ask(f"q{number}", n=n)
    with pytest.raises(ValueError, match=r"env\.agent\.max_requests=6"):
        talk.ask("one more")
    assert talk.session.reached_limit
