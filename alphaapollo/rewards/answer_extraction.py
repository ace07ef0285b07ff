r"""Find the final answer that a text marks: `<answer>...</answer>`, `\boxed{...}`, `#### ...`.

Models write the texts, so every search takes time linear in the length of the text.
"""

from __future__ import annotations

import re

BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|(?<!\\)[{}]")
BETWEEN_BOXES = r"(?:[\s,$}]|\\text\{|\band\b|\bor\b|\b[a-z]\s*=)*"
SEVERAL_BOXES = re.compile(rf"\\boxed\{{[^{{}}]*\}}(?:{BETWEEN_BOXES}\\boxed\{{[^{{}}]*\}})+")
BOX = re.compile(r"\\boxed\{([^{}]*)\}")
BARE_BOX = re.compile(r"\\boxed\s+([^{$\n][^$\n]*)")


def find_marked_answer(text: str) -> str | None:
    r"""Return the answer marked with `<answer>` (or a `\boxed` inside this tag), else with `\boxed`, else with `####`.
    Returns None for a text without these marks."""
    tag = find_answer_tag(text)
    boxed = find_boxed(text if tag is None else tag)
    if boxed is not None:
        return boxed
    return find_text_after_hash_marks(text) if tag is None else tag


def find_answer_tag(text: str) -> str | None:
    """Return the content of the last `<answer>...</answer>`; None if there is none."""
    for part in reversed(text.split("</answer>")[:-1]):
        if "<answer>" in part:
            return part.partition("<answer>")[2].strip()
    return None


def find_boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` (or `\fbox`), the innermost of nested boxes. Without such
    a box, return what follows the last `\boxed` without braces, up to a dollar sign (`$\boxed 7$`)."""
    opened: list[int | None] = []  # per open brace: start of the content if the brace opens a box
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


def find_adjacent_boxes(text: str) -> str | None:
    r"""Return the contents of the last boxes if they are adjacent: `2, 3` for `\boxed{2} and \boxed{3}`; else None."""
    boxed_part = find_answer_tag(text) or text
    rows = list(SEVERAL_BOXES.finditer(boxed_part))
    if rows and find_boxed(boxed_part) == (boxes := BOX.findall(rows[-1][0]))[-1].strip():
        return ", ".join(dict.fromkeys(box.strip() for box in boxes))
    return None


def find_text_after_hash_marks(text: str) -> str | None:
    """Return the rest of the line after the last `####`; None if there is none."""
    if "####" not in text:
        return None
    return text.rpartition("####")[2].strip().partition("\n")[0].strip()
