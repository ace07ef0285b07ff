r"""Whether a text thinks first and answers then: `<think>...</think> ... \boxed{...}`, or `<answer>...</answer>`."""

from __future__ import annotations

from alphaapollo.rewards.answer_extraction import answer_tag, last_boxed
from alphaapollo.types import Prompt


def split_thoughts(text: str) -> tuple[str, str]:
    """(thoughts, answer): what stands before and after `</think>`; without that tag all is thoughts if `<think>` is
    there, else all is answer."""
    before, closed, after = text.partition("</think>")
    if not closed and "<think>" not in text:
        return "", text
    return before.replace("<think>", ""), after


def think_format(prompt: Prompt, completion: str) -> float:
    """1 if the text starts with `<think>`, has exactly one pair of these tags, and then exactly one answer, else 0
    (arXiv 2506.10910, section 2.2.1, for mathematics).

    An answer is one `<answer>...</answer>` that is not empty, or, where these tags are not used, a boxed expression.
    """
    text = completion.lstrip()
    return opened_think_format(prompt, text.removeprefix("<think>")) if text.startswith("<think>") else 0.0


def opened_think_format(prompt: Prompt, completion: str) -> float:
    """The same where the chat template has opened `<think>` already, so that the text starts with thoughts."""
    if "<think>" in completion or completion.count("</think>") != 1:
        return 0.0
    _, answer = split_thoughts(completion)
    tags = (answer.count("<answer>"), answer.count("</answer>"))
    if tags == (0, 0):
        return float(bool(last_boxed(answer)))
    return float(tags == (1, 1) and bool(answer_tag(answer)))
