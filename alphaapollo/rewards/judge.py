"""A language model as judge, behind an OpenAI-compatible server (OpenAI's, or vLLM's).

What it answers is read strictly: a reply without a verdict is a failure of the grader, never a 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from alphaapollo.config.schema import Judge
from alphaapollo.rewards.base import RewardFunction, failure
from alphaapollo.rewards.openai_client import NOT_AS_OPENAI, client_options
from alphaapollo.types import Prompt, Score

VERDICT = re.compile(r"^\W*SCORE\W*[:=]\W*?(-?\d+(?:\.\d+)?|-?\.\d+)\W*$", re.IGNORECASE | re.MULTILINE)
THOUGHTS = re.compile(r"^.*</think>", re.DOTALL)
SHOWN = 120  # characters of a reply in a reason


def make(settings: Mapping[str, Any]) -> RewardFunction:
    """The reward function of `reward.judge`.

    Raises:
        ValueError: no model is named, the openai package is missing, or no key where the server is OpenAI's own.
    """
    judge = Judge(**settings)
    if not judge.model:
        raise ValueError("reward.judge.model is empty: name the model that judges.")
    options = client_options("reward.judge", judge.base_url, judge.api_key_env, judge.timeout, judge.max_retries)
    import openai

    client = openai.OpenAI(**options)

    def grade(prompt: Prompt, completion: str) -> Score:
        """The judge's score, from 0 to 1; `accuracy` is 1 from 0.5 on."""
        try:
            reply = client.chat.completions.create(
                model=judge.model,
                messages=[{"role": "user", "content": question(judge.prompt, prompt, completion)}],
                temperature=judge.temperature,
                max_tokens=judge.max_tokens,
            )
            said = reply.choices[0].message.content
        except openai.APIError as error:
            return failure(f"the judge gave no answer: {type(error).__name__}: {error}")
        except NOT_AS_OPENAI as error:
            return failure(f"the judge's server does not answer as OpenAI's does: {type(error).__name__}: {error}")
        return read_verdict(said)

    return grade


def question(template: str, prompt: Prompt, completion: str) -> str:
    """What the judge is asked: the template with {question}, {ground_truth} and {answer} filled in, once each.

    Thoughts before `</think>` are left out of the answer.
    """
    asked = prompt.content
    if not isinstance(asked, str):
        asked = "\n\n".join(message["content"] for message in asked if message["role"] == "user")
    fields = {
        "question": asked,
        "ground_truth": "none is given" if prompt.ground_truth is None else prompt.ground_truth,
        "answer": THOUGHTS.sub("", completion).strip(),
    }
    return re.sub(r"\{(question|ground_truth|answer)\}", lambda match: fields[match[1]], template)


def read_verdict(reply: str | None) -> Score:
    """The last line `SCORE: x` of a reply, 0 <= x <= 1; a failure where there is none."""
    text = THOUGHTS.sub("", reply or "")
    scores = [float(number) for number in VERDICT.findall(text)]
    end = " ".join(text.split())[-SHOWN:]
    if not scores:
        return failure(f"the judge's answer has no line 'SCORE: ...': {end!r}")
    if not 0 <= scores[-1] <= 1:
        return failure(f"the judge's score {scores[-1]:g} is not between 0 and 1: {end!r}")
    return Score(scores[-1], {"accuracy": float(scores[-1] >= 0.5)})
