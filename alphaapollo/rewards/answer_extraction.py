r"""Where the final answer stands in a text: `<answer>...</answer>`, `\boxed{...}`, `#### ...`."""

from __future__ import annotations

import re

ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|(?<!\\)[{}]")
BARE_BOX = re.compile(r"\\boxed\s+([^{$\n][^$\n]*)")


def answer_tag(text: str) -> str | None:
    """The content of the last complete `<answer>` tag."""
    contents = ANSWER_TAG.findall(text)
    return contents[-1].strip() if contents else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` (or `\fbox`), braces balanced; of nested ones, the inner.

    Where there is none, what follows the last `\boxed` without braces, up to a dollar sign (`$\boxed 7$`).
    """
    opened: list[int | None] = []  # per open brace: where its content starts, if it is a box's
    last: tuple[int, int] | None = None
    for brace in BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(None if brace[0] == "{" else brace.end())
        elif opened and (start := opened.pop()) is not None:
            last = max(last or (0, 0), (start, brace.start()))
    if last:
        return text[last[0] : last[1]].strip()
    bare = BARE_BOX.findall(text)
    return bare[-1].strip() if bare else None


def after_hashes(text: str) -> str | None:
    """The rest of the line after the last `####`."""
    if "####" not in text:
        return None
    return text.rpartition("####")[2].strip().partition("\n")[0].strip()


def marked_answer(text: str) -> str | None:
    r"""The answer that the text marks as final: `<answer>` (and a `\boxed` in it), else `\boxed`, else `####`."""
    tag = answer_tag(text)
    if tag is not None:
        boxed = last_boxed(tag)
        return tag if boxed is None else boxed
    boxed = last_boxed(text)
    return after_hashes(text) if boxed is None else boxed
