"""Read the action in the text of a turn, with env.action_format=tags. Text after the action is cut off.

    <think>...</think> <answer>42</answer> and more     ->  Action("answer", "42", kept_chars=...)

Tags inside thoughts are ignored. Parsing takes linear time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from alphaapollo.rewards.base import add_marks
from alphaapollo.types import Turn
from alphaapollo.utils.thoughts import OPENING, find_thoughts, read_thought

PUNCTUATION = ".,;:!?*'\"`()[]{}"


@dataclass(frozen=True, slots=True)
class Action:
    """Action in the text of a turn, or the error if the text has no readable action."""

    tag: str = ""  # tag name; "" for a bare word
    content: str = ""  # the stripped text inside the tag
    kept_chars: int | None = None  # end of the action in the text; None if only white space follows
    error: str = ""  # message to the model if the text has no action, or several kinds of action


def read_action(
    text: str, tags: Sequence[str] = ("answer",), allow_bare_word: bool = False, turns: Sequence[Turn] = ()
) -> Action:
    """Return the first complete action in the text of a turn, e.g. `<answer>42</answer>`. Thoughts are skipped. With
    `allow_bare_word`, the first word of a text without tags is the action. turns: turns of the episode so far
    (Services.turns); the last one has the text."""
    if turns and turns[-1].marks:
        action = read_action(add_marks(text, turns), tags, allow_bare_word)
        end, num_mark_chars = action.kept_chars, 0
        if end is None:
            return action
        for position, mark in turns[-1].marks:  # count the marks before the end of the action: `text` lacks them
            num_mark_chars += len(mark) if position + num_mark_chars < end else 0
        return replace(action, kept_chars=_count_kept_chars(text, end - num_mark_chars))
    tagged_actions = list(_find_tagged_actions(text, tags))
    kinds = list(dict.fromkeys(action.tag for action in tagged_actions))
    if len(kinds) > 1:
        return Action(error=f"several kinds of action at once ({', '.join(kinds)}); make one")
    if tagged_actions:
        return tagged_actions[0]
    word = _find_bare_word_action(text) if allow_bare_word else None
    return word or Action(error=f"no action; write {' or '.join(f'<{tag}>...</{tag}>' for tag in tags)}")


def _find_tagged_actions(text: str, tags: Sequence[str]) -> Iterator[Action]:
    openings = re.compile("|".join(f"<{re.escape(tag)}>" for tag in tags))
    never_closed: set[str] = set()
    thoughts = find_thoughts(text)
    prompt_opens_thought = bool(thoughts) and not OPENING.match(text, thoughts[0].start)
    position = thoughts[0].end if prompt_opens_thought else 0
    thought = OPENING.search(text, position)
    while opening := openings.search(text, position):
        if thought and thought.start() < opening.start():
            position = read_thought(text, thought).end
        else:
            kind, position = opening[0][1:-1], opening.end()
            end = -1 if kind in never_closed else text.find(f"</{kind}>", position)
            if end >= 0:
                content, position = text[position:end].strip(), end + len(f"</{kind}>")
                yield Action(kind, content, _count_kept_chars(text, position))
            else:
                never_closed.add(kind)
        if thought and thought.start() < position:
            thought = OPENING.search(text, position)


def _find_bare_word_action(text: str) -> Action | None:
    """Return the first word after thoughts, without surrounding punctuation, as an action; None without a word."""
    position = 0
    for thought in find_thoughts(text):
        if text[position : thought.start].strip():
            break
        position = thought.end
    word = re.compile(r"\S+").search(text, position)
    return Action("", word[0].strip(PUNCTUATION), _count_kept_chars(text, word.end())) if word else None


def _count_kept_chars(text: str, action_end: int) -> int | None:
    return action_end if text[action_end:].strip() else None
