"""Prompts of a self-teacher: the prompt of an episode with more context (docs/algorithms/distill.md).

The response tokens of the policy follow the teacher's prompt unchanged; they are never encoded again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from alphaapollo.config.schema import SelfTeacher
from alphaapollo.types import LONGER_PROMPT, Message, Prompt, Trajectory, TrajectoryGroup
from alphaapollo.utils.text import fill_template


@dataclass(frozen=True)
class TeacherContext:
    """Text that the teacher reads in addition to the prompt, and the template that joins both."""

    text: str
    template: str


@dataclass(frozen=True)
class TeacherPromptWriter:
    """Adds the teacher's prompts to the rows of a group.

    encode: renders a chat or a text to tokens, with the tools of the prompt's row. max_tokens: longer prompts are left
    out.
    """

    config: SelfTeacher
    encode: Callable[[list[Message] | str, Prompt], list[int]]
    max_tokens: int

    def add_prompts(self, group: TrajectoryGroup) -> None:
        """Set the column LONGER_PROMPT of the rows for which the teacher has a context."""
        for trajectory in group.trajectories:
            context = choose_context(group, trajectory, self.config)
            if context is None or trajectory.first_observation is None:
                continue
            token_ids = self.encode(add_context(trajectory.first_observation, context), group.prompt)
            if len(token_ids) <= self.max_tokens:
                for row in trajectory.rows:
                    row.columns[LONGER_PROMPT] = array("i", token_ids)


def choose_context(group: TrajectoryGroup, trajectory: Trajectory, config: SelfTeacher) -> TeacherContext | None:
    """Choose what the teacher reads about a trajectory of the group. None: nothing is available.

    With context=feedback: the first other sample of the group with a reward of at least min_reward, or else the
    feedback, if the trajectory's own reward is lower.
    """
    if config.context == "demonstration":
        return TeacherContext(group.prompt.extra_info[config.demonstration_key], config.demonstration_template)
    others = (other for other in group.trajectories if other is not trajectory and other.reward >= config.min_reward)
    if solution := next(filter(None, map(get_answer_text, others)), ""):
        return TeacherContext(solution, config.solution_template)
    if trajectory.reward < config.min_reward and (feedback := get_feedback(trajectory)):
        return TeacherContext(feedback, config.feedback_template)
    return None


def get_answer_text(trajectory: Trajectory) -> str:
    """Return the text of the last answer without its thoughts, the text before `</think>`."""
    turn = trajectory.last_turn
    return turn.text.rpartition("</think>")[2].strip() if turn else ""


def get_feedback(trajectory: Trajectory) -> str:
    """Return what the environment answered to the last turn, or else the reason of the score; "" if there is none."""
    turn = trajectory.last_turn
    observation = turn.observation if turn and turn.observation else []
    return "\n".join(message["content"] for message in observation).strip() or trajectory.score.reason


def add_context(content: list[Message] | str, context: TeacherContext) -> list[Message] | str:
    """Replace the last user message of a chat, or a text, by the template with the question and the context."""
    if isinstance(content, str):
        return fill_template(context.template, question=content, context=context.text)
    users = [index for index, message in enumerate(content) if message["role"] == "user"]
    last = users[-1] if users else len(content) - 1
    text = fill_template(context.template, question=content[last]["content"], context=context.text)
    longer: Message = {**content[last], "content": text}
    return [*content[:last], longer, *content[last + 1 :]]


def check_demonstrations(prompts: Sequence[Prompt], key: str) -> None:
    """Raise ValueError for a prompt without a text at extra_info[key]."""
    for prompt in prompts:
        text = prompt.extra_info.get(key)
        if not isinstance(text, str) or not text:
            raise ValueError(
                f"teacher.self_teacher.demonstration_key={key} needs a text in extra_info.{key}, or in the column "
                f"{key}, of every row; row {prompt.id} has {text!r:.50}. Add the text, or set another key."
            )
