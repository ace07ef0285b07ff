"""Find the thoughts of a completion: what a reasoning model writes between marks before its answer.

    <think>7 + 7</think>14    [THINK]7 + 7[/THINK]14    <|channel|>analysis<|message|>7 + 7<|end|>14    ->    14

All searches take time linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

TAGS = ("think", "thinking", "thought", "thoughts", "reasoning", "scratchpad", "seed:think")
PAIRS = {f"<{tag}>": f"</{tag}>" for tag in TAGS} | {
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "<|channel>thought": "<channel|>",
    "<unused94>thought": "<unused95>",
}
"""{opening mark: closing mark} of a thought. A completion has no opening mark if the prompt ends with it."""
FINAL_HEADER = r"(?:<\|start\|>assistant)?(?:<\|channel\|>final<\|message\|>)?"
CHANNELS = {  # {opening pattern: closing pattern} of gpt-oss; the second entry is for a text without special tokens
    r"<\|channel\|>analysis<\|message\|>": rf"(?:<\|end\|>|(?=<\|start\|>|<\|channel\|>)){FINAL_HEADER}",
    r"\Aanalysis(?=.*?assistantfinal)": "assistantfinal",
    r"\A(?:<\|start\|>assistant)?<\|channel\|>final<\|message\|>": "",
}
SPECIAL_TOKENS = re.compile(r"<\|(?:start|channel|message|end)\|>")  # special tokens in the texts of CHANNELS


def _make_pattern(mark: str) -> str:
    return re.escape(mark).replace(">", r"\s*>")


_PATTERNS = {_make_pattern(mark): _make_pattern(end) for mark, end in PAIRS.items()} | CHANNELS
OPENING = re.compile("|".join(f"({mark})" for mark in _PATTERNS), re.I | re.S)
CLOSING = re.compile("|".join(map(_make_pattern, PAIRS.values())), re.I)
_CLOSINGS = [re.compile(closing, re.I) for closing in _PATTERNS.values()]
_OPEN_AT_END = re.compile(rf"(?:{'|'.join(_PATTERNS)})\s*\Z", re.I | re.S)

Marks = Sequence[tuple[int, str]]
"""Marks that a text lacks, with the positions in it where they belong, in order."""


class Thought(NamedTuple):
    """Thought in a text, e.g. `Thought(0, 20, "7 + 7", True)` in `<think>7 + 7</think>14`."""

    start: int
    end: int  # after its closing mark
    content: str
    is_closed: bool


def find_thoughts(text: str) -> list[Thought]:
    """Return the thoughts of a text: what is between an opening and a closing mark, before a first closing mark that
    was not opened, and after an opening mark that is not closed."""
    opening = OPENING.search(text)
    closing = CLOSING.search(text, 0, opening.start() if opening else len(text))
    thoughts = [Thought(0, closing.end(), text[: closing.start()], is_closed=True)] if closing else []
    while opening:
        thoughts.append(read_thought(text, opening))
        opening = OPENING.search(text, thoughts[-1].end)
    return thoughts


def read_thought(text: str, opening: re.Match[str]) -> Thought:
    """Return the thought after a match of OPENING."""
    closing = _CLOSINGS[(opening.lastindex or 1) - 1].search(text, opening.end())
    start, end = closing.span() if closing else (len(text), len(text))
    return Thought(opening.start(), end, text[opening.end() : start], bool(closing))


def split_thoughts(text: str) -> tuple[str, str]:
    """Return the thoughts of a text without marks, and the rest."""
    thoughts = find_thoughts(text)
    starts, ends = [thought.start for thought in thoughts], [thought.end for thought in thoughts]
    rest = "".join(text[end:start] for end, start in zip([0, *ends], [*starts, len(text)], strict=True))
    return "".join(thought.content for thought in thoughts), rest


def remove_thoughts(text: str) -> str:
    """Remove the thoughts of a completion. A thought that is not closed ends before an `<answer>`."""
    thoughts = find_thoughts(text)
    open_thought = thoughts[-1].content if thoughts and not thoughts[-1].is_closed else ""
    _, tag, answer = open_thought.partition("<answer>")
    return split_thoughts(text)[1] + tag + answer


def split_open_mark(prompt: str) -> tuple[str, str]:
    """Split off the mark at the end of a prompt that opens the answer's thought; the mark is empty if there is none."""
    found = _OPEN_AT_END.search(prompt)
    return (prompt[: found.start()], found[0].rstrip()) if found else (prompt, "")


def insert_marks(text: str, marks: Marks) -> str:
    """Insert marks into a text. Marks after its end are left out, because the text may be cut.

    >>> insert_marks("7 + 714", [(0, "[THINK]"), (5, "[/THINK]")])
    '[THINK]7 + 7[/THINK]14'
    """
    marks = [(position, mark) for position, mark in marks if position < len(text)]
    ends = [*(position for position, _ in marks[1:]), len(text)]
    first = text[: marks[0][0]] if marks else text
    return first + "".join(mark + text[at:end] for (at, mark), end in zip(marks, ends, strict=False))
