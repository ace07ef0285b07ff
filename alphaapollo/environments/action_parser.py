"""Read the action in the text of a turn, with env.action_format=tags. Text after the action is cut off.

    <think>...</think> <answer>42</answer> and more     ->  Action("answer", "42", kept_chars=...)

Tags inside thoughts are ignored. Parsing takes linear time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

THINK = "think"
PUNCTUATION = ".,;:!?*'\"`()[]{}"


@dataclass(frozen=True, slots=True)
class Action:
    """Action in the text of a turn, or the error if the text has no readable action."""

    tag: str = ""  # tag name; "" for a bare word
    content: str = ""  # the stripped text inside the tag
    kept_chars: int | None = None  # end of the action in the text; None if only white space follows
    error: str = ""  # message to the model if the text has no action, or several kinds of action


def read_action(text: str, tags: Sequence[str] = ("answer",), allow_bare_word: bool = False) -> Action:
    """Return the first complete action in the text of a turn, e.g. `<answer>42</answer>`. Thoughts are skipped. With
    `allow_bare_word`, the first word of a text without tags is the action."""
    start = _find_end_of_thought_opened_in_prompt(text)
    found = list(_find_tagged_actions(text, start, tags))
    kinds = list(dict.fromkeys(action.tag for action in found))
    if len(kinds) > 1:
        return Action(error=f"several kinds of action at once ({', '.join(kinds)}); make one")
    if found:
        return found[0]
    word = _find_bare_word_action(text, start) if allow_bare_word else None
    return word or Action(error=f"no action; write {' or '.join(f'<{tag}>...</{tag}>' for tag in tags)}")


def _find_end_of_thought_opened_in_prompt(text: str) -> int:
    """Return the position after the first `</think>` if no `<think>` precedes it (the prompt has it); else 0."""
    end, opened = text.find(f"</{THINK}>"), text.find(f"<{THINK}>")
    return end + len(f"</{THINK}>") if end >= 0 and (opened < 0 or end < opened) else 0


def _find_tagged_actions(text: str, position: int, tags: Sequence[str]) -> Iterator[Action]:
    openings = re.compile("|".join(f"<{re.escape(tag)}>" for tag in (THINK, *tags)))
    never_closed: set[str] = set()
    while opening := openings.search(text, position):
        kind, position = opening[0][1:-1], opening.end()
        end = -1 if kind in never_closed else text.find(f"</{kind}>", position)
        if end >= 0:
            content, position = text[position:end].strip(), end + len(f"</{kind}>")
            if kind != THINK:
                yield Action(kind, content, _count_kept_chars(text, position))
        elif kind == THINK:
            return  # the remaining text is an open thought
        else:
            never_closed.add(kind)


def _find_bare_word_action(text: str, position: int) -> Action | None:
    """Return the first word after thoughts, without surrounding punctuation, as an action; None if there is none."""
    while text.startswith(f"<{THINK}>", position := len(text) - len(text[position:].lstrip())):
        end = text.find(f"</{THINK}>", position)
        if end < 0:
            return None
        position = end + len(f"</{THINK}>")
    word = re.compile(r"\S+").match(text, position)
    return Action("", word[0].strip(PUNCTUATION), _count_kept_chars(text, word.end())) if word else None


def _count_kept_chars(text: str, action_end: int) -> int | None:
    return action_end if text[action_end:].strip() else None
