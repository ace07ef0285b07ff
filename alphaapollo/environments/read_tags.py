"""env.action_format=tags: from a model's text to its one action.

    <think>...</think> <answer>42</answer> and more     ->  Action("answer", "42", end)     what follows is cut

Thoughts are not looked into. Linear in the length of the text, whatever a model writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

THINK = "think"
PUNCTUATION = ".,;:!?*'\"`()[]{}"


@dataclass(frozen=True, slots=True)
class Action:
    """What the model chose to do."""

    kind: str  # the tag; "" for a bare word
    content: str  # what stands in the tag, without the space around it
    kept_chars: int | None  # the text up to its end; None where only space follows: nothing is to be cut


@dataclass(frozen=True, slots=True)
class Unreadable:
    """No action, or several kinds at once; `problem` says so to the model."""

    problem: str


def read_action(text: str, tags: Sequence[str] = ("answer",), bare_word: bool = False) -> Action | Unreadable:
    """The first complete action in the text. With `bare_word`, a text without one acts by its first word.

    Several actions of one kind: the first counts, the others are what is cut. An unreadable text is left whole, so
    that what a penalty is for stays in it.
    """
    start = _after_open_thought(text)
    found = list(_actions(text, start, tags))
    kinds = list(dict.fromkeys(action.kind for action in found))
    if len(kinds) > 1:
        return Unreadable(f"several kinds of action at once ({', '.join(kinds)}); make one")
    if found:
        return found[0]
    word = _first_word(text, start) if bare_word else None
    return word or Unreadable(f"no action; write {' or '.join(f'<{tag}>...</{tag}>' for tag in tags)}")


def _after_open_thought(text: str) -> int:
    """Where to begin: after a thought that was opened by the prompt, if there is one."""
    end, opened = text.find(f"</{THINK}>"), text.find(f"<{THINK}>")
    return end + len(f"</{THINK}>") if end >= 0 and (opened < 0 or end < opened) else 0


def _actions(text: str, position: int, tags: Sequence[str]) -> Iterator[Action]:
    openings = re.compile("|".join(f"<{re.escape(tag)}>" for tag in (THINK, *tags)))
    never_closed: set[str] = set()
    while opening := openings.search(text, position):
        kind, position = opening[0][1:-1], opening.end()
        if kind in never_closed:
            continue
        end = text.find(f"</{kind}>", position)
        if end < 0 and kind == THINK:
            return  # all that follows is thought
        if end < 0:
            never_closed.add(kind)
            continue
        content, position = text[position:end].strip(), end + len(f"</{kind}>")
        if kind != THINK:
            yield Action(kind, content, _kept(text, position))


def _first_word(text: str, position: int) -> Action | None:
    """Outside of thoughts, without the punctuation around it."""
    while text.startswith(f"<{THINK}>", position := _skip_space(text, position)):
        end = text.find(f"</{THINK}>", position)
        if end < 0:
            return None
        position = end + len(f"</{THINK}>")
    word = re.compile(r"\S+").match(text, position)
    return Action("", word[0].strip(PUNCTUATION), _kept(text, word.end())) if word else None


def _skip_space(text: str, position: int) -> int:
    return len(text) - len(text[position:].lstrip())


def _kept(text: str, end: int) -> int | None:
    return end if text[end:].strip() else None
