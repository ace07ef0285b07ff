"""Prompts of a self-teacher: which context each trajectory of a group gets, and how it is rendered."""

from __future__ import annotations

import math
from typing import Any

import pytest

from alphaapollo.config.schema import SelfTeacher
from alphaapollo.rollout import self_teacher
from alphaapollo.types import LONGER_PROMPT, Message, Outcome, Prompt, Score, Trajectory, TrajectoryGroup
from tests.builders import make_group as group
from tests.unit.trainer.samples import trajectory

FEEDBACK = SelfTeacher(
    context="feedback", solution_template="{question}|{context}", feedback_template="F{question}{context}"
)


def attempt(sample: int, reward: float, text: str = "", reason: str = "", seen: str = "") -> Trajectory:
    made = trajectory(sample, reward, 3)
    made.turns[0].text = text or f"answer {sample}"
    made.turns[0].observation = [Message(role="user", content=seen)] if seen else None
    made.score = Score(reward, reason=reason, outcome=Outcome.GRADER_FAILED if math.isnan(reward) else Outcome.SCORED)
    made.first_observation = [Message(role="user", content="2+2=?")]
    return made


def contexts(of: TrajectoryGroup, config: SelfTeacher = FEEDBACK) -> list[str | None]:
    return [self_teacher.choose_context(of, one, config)[0] or None for one in of.trajectories]


def test_a_trajectory_reads_the_first_other_success() -> None:
    """Rewards 0, 1, .5, 0: the second is shown to all but itself, which reads the third."""
    samples = group(*(attempt(i, reward) for i, reward in enumerate([0.0, 1.0, 0.5, 0.0])))
    assert contexts(samples) == ["answer 1", "answer 2", "answer 1", "answer 1"]
    strict = FEEDBACK.model_copy(update={"min_reward": 1.0})
    assert contexts(group(attempt(0, 0.0), attempt(1, 1.0), attempt(2, 0.5)), strict) == ["answer 1", None, "answer 1"]


def test_feedback_is_for_failures_without_a_success_beside_them() -> None:
    """What the environment answered last comes before the score's reason. A failed grader's reason is no success."""
    samples = [
        attempt(0, 0.0, reason="the sum is wrong"),
        attempt(1, 0.0, reason="x", seen="3 is too low"),
        attempt(2, 0),
    ]
    assert contexts(group(*samples)) == ["the sum is wrong", "3 is too low", None]
    assert contexts(group(attempt(0, 1.0, reason="well done"), attempt(1, math.nan))) == [None, "answer 0"]


def test_thoughts_are_not_shown() -> None:
    assert contexts(group(attempt(0, 0.0), attempt(1, 1.0, "<think>2 and 2</think>\n4")))[0] == "4"
    thoughtful = attempt(1, 1.0, "<think>2 and 2</think>")  # without an answer there is nothing to show
    assert contexts(group(attempt(0, 0.0), thoughtful, attempt(2, 1.0)))[0] == "answer 2"


def test_the_demonstration_is_the_same_for_all_samples() -> None:
    config = SelfTeacher(context="demonstration", demonstration_key="worked")
    assert contexts(group(attempt(0, 0.0), attempt(1, 1.0), worked="2+2=4"), config) == ["2+2=4", "2+2=4"]


def test_templates_need_question_and_context() -> None:
    with pytest.raises(ValueError, match=r"would not see .*\{context\}"):
        SelfTeacher(context="feedback", solution_template="{question}")


def test_the_last_user_message_gets_the_context() -> None:
    chat = [Message(role=role, content=role[0]) for role in ("system", "query", "assistant")]
    chat[1] = Message(role="user", content="q")
    longer = self_teacher.add_context(chat, "c", "{question}+{context}")
    assert [message["content"] for message in longer] == ["s", "q+c", "a"]
    assert chat[1]["content"] == "q"
    assert self_teacher.add_context("text", "c", "{question}+{context}") == "text+c"


def test_rows_get_prompts_within_the_limit() -> None:
    """The prompt is rendered to one token per character: '2+2=?|answer 1' has 14."""

    def encode(content: Any, _: Any) -> list[int]:
        return [ord(letter) for letter in content[-1]["content"]]

    for limit, expected in ((14, "2+2=?|answer 1"), (13, "")):
        samples = group(attempt(0, 0.0), attempt(1, 1.0))
        self_teacher.TeacherPromptWriter(FEEDBACK, encode, limit).add_prompts(samples)
        rows = [one.rows[0] for one in samples.trajectories]
        assert "".join(map(chr, rows[0].columns.get(LONGER_PROMPT, []))) == expected
        assert not rows[1].columns  # no other success, and no feedback


def test_a_missing_demonstration_is_named() -> None:
    prompts = [Prompt(3, "test", "text", extra_info={"demonstration": "4"}), Prompt(5, "test", "text")]
    self_teacher.check_demonstrations(prompts[:1], "demonstration")
    with pytest.raises(ValueError, match=r"demonstration.* row 5 has None"):
        self_teacher.check_demonstrations(prompts, "demonstration")
