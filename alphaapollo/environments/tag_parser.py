"""Read the one action in a model's text, with env.action_format=tags.

    <think>...</think> <answer>42</answer> and more     ->  Action("answer", "42", end)     the rest is cut off

Tags inside thoughts are ignored. Takes linear time for any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

THINK = "think"
PUNCTUATION = ".,;:!?*'\"`()[]{}"


@dataclass(frozen=True, slots=True)
class Action:
    """The action that the model chose, or why there is none."""

    kind: str = ""  # the tag; "" for a bare word
    content: str = ""  # the stripped text inside the tag
    kept_chars: int | None = None  # the text up to its end; None if only whitespace follows, so that nothing is cut
    problem: str = ""  # message to the model: the text has no action, or several kinds of action


def read_action(text: str, tags: Sequence[str] = ("answer",), bare_word: bool = False) -> Action:
    """First complete action in the text. With `bare_word`, the first word of a text without tags is an action.

    Of several actions of one kind the first is used. An unreadable text is not cut, so that a penalty applies to what
    caused it.
    """
    start = _end_of_open_thought(text)
    found = list(_actions(text, start, tags))
    kinds = list(dict.fromkeys(action.kind for action in found))
    if len(kinds) > 1:
        return Action(problem=f"several kinds of action at once ({', '.join(kinds)}); make one")
    if found:
        return found[0]
    word = _first_word(text, start) if bare_word else None
    return word or Action(problem=f"no action; write {' or '.join(f'<{tag}>...</{tag}>' for tag in tags)}")


def _end_of_open_thought(text: str) -> int:
    """End of a thought that the prompt opened; 0 if there is none."""
    end, opened = text.find(f"</{THINK}>"), text.find(f"<{THINK}>")
    return end + len(f"</{THINK}>") if end >= 0 and (opened < 0 or end < opened) else 0


def _actions(text: str, position: int, tags: Sequence[str]) -> Iterator[Action]:
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
            return  # the rest is thought
        else:
            never_closed.add(kind)


def _first_word(text: str, position: int) -> Action | None:
    """First word outside of thoughts, without the punctuation around it."""
    while text.startswith(f"<{THINK}>", position := len(text) - len(text[position:].lstrip())):
        end = text.find(f"</{THINK}>", position)
        if end < 0:
            return None
        position = end + len(f"</{THINK}>")
    word = re.compile(r"\S+").match(text, position)
    return Action("", word[0].strip(PUNCTUATION), _count_kept_chars(text, word.end())) if word else None


def _count_kept_chars(text: str, end: int) -> int | None:
    return end if text[end:].strip() else None
