"""Prompts of a self-teacher: the prompt of an episode with more context (docs/algorithms/distill.md).

The response tokens of the policy follow the teacher's prompt unchanged; they are never encoded again."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from alphaapollo.config.schema import SelfTeacher
from alphaapollo.rewards.base import add_marks
from alphaapollo.types import LONGER_PROMPT, Message, Prompt, Trajectory, TrajectoryGroup
from alphaapollo.utils.text import fill_template
from alphaapollo.utils.thoughts import remove_thoughts


@dataclass(frozen=True)
class TeacherPromptWriter:
    """Adds the teacher's prompts to the rows of a group."""

    config: SelfTeacher
    encode: Callable[[list[Message] | str, Prompt], list[int]]  # with the tools of the prompt's row
    max_tokens: int  # longer prompts are left out

    def add_prompts(self, group: TrajectoryGroup) -> None:
        """Set the column LONGER_PROMPT of the rows for which the teacher has a context."""
        for trajectory in group.trajectories:
            text, template = choose_context(group, trajectory, self.config)
            if not text or trajectory.first_observation is None:
                continue
            token_ids = self.encode(add_context(trajectory.first_observation, text, template), group.prompt)
            if len(token_ids) <= self.max_tokens:
                for row in trajectory.rows:
                    row.columns[LONGER_PROMPT] = array("i", token_ids)


def choose_context(group: TrajectoryGroup, trajectory: Trajectory, config: SelfTeacher) -> tuple[str, str]:
    """Choose the text that the teacher reads about a trajectory of the group, and the template that joins the text with
    the prompt. The text is empty if nothing is available.

    With context=feedback, the text is the last answer, without its thoughts, of the first other sample of the group
    with a reward of at least min_reward. If there is no such sample, and the trajectory's own reward is lower, the text
    is the environment's reply to the last turn or, if that is empty, the reason of the score."""
    if config.context == "demonstration":
        return group.prompt.extra_info[config.demonstration_key], config.demonstration_template
    for other in group.trajectories:
        turn = other.last_turn if other is not trajectory and other.reward >= config.min_reward else None
        if turn and (solution := remove_thoughts(add_marks(turn.text, [turn])).strip()):
            return solution, config.solution_template
    if not trajectory.reward < config.min_reward:  # also if the reward is NaN
        return "", ""
    observation = (trajectory.last_turn.observation if trajectory.last_turn else None) or []
    feedback = "\n".join(message["content"] for message in observation).strip()
    return feedback or trajectory.score.reason, config.feedback_template


def add_context(content: list[Message] | str, context: str, template: str) -> list[Message] | str:
    """Replace the last user message of a chat, or a text, by the template with the question and the context."""
    if isinstance(content, str):
        return fill_template(template, question=content, context=context)
    user_indices = [index for index, message in enumerate(content) if message["role"] == "user"]
    last = user_indices[-1] if user_indices else len(content) - 1
    text = fill_template(template, question=content[last]["content"], context=context)
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
