r"""Format rewards: `<think>...</think>` followed by one `<answer>...</answer>` or `\boxed{...}`."""

from __future__ import annotations

from alphaapollo.rewards.answer_extraction import find_answer_tag, find_boxed
from alphaapollo.types import Prompt


def split_thoughts(text: str) -> tuple[str, str]:
    """Split a completion at `</think>` into (thoughts, answer). Without `</think>`, a text that contains `<think>` is
    all thoughts, and any other text is all answer."""
    before, closed, after = text.partition("</think>")
    if not closed and "<think>" not in text:
        return "", text
    return before.replace("<think>", ""), after


def score_format(prompt: Prompt, completion: str) -> float:
    """Return 1 if a completion is one `<think>...</think>` followed by one answer, else 0.

    An answer is one non-empty `<answer>...</answer>`. In a text without answer tags, it is a boxed expression
    (arXiv 2506.10910, section 2.2.1).
    """
    text = completion.lstrip()
    return score_format_without_opening_tag(prompt, text.removeprefix("<think>")) if text.startswith("<think>") else 0.0


def score_format_without_opening_tag(prompt: Prompt, completion: str) -> float:
    """Return `score_format` of `<think>` + completion, for chat templates that end the prompt with `<think>`."""
    if "<think>" in completion or completion.count("</think>") != 1:
        return 0.0
    _, answer = split_thoughts(completion)
    tags = (answer.count("<answer>"), answer.count("</answer>"))
    if tags == (0, 0):
        return float(bool(find_boxed(answer)))
    return float(tags == (1, 1) and bool(find_answer_tag(answer)))
