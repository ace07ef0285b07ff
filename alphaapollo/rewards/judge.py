"""A language model as judge, behind an OpenAI-compatible server: its requests, retries and verdicts.

The openai client retries a request MAX_RETRIES times, with growing pauses, after status 408, 409, 429 or
5xx and after a broken connection. A reply without a verdict is a failure of the grader, never a reward of 0; as any
failed grade, it is requested once more (grader_processes.client).
"""

from __future__ import annotations

import re

from alphaapollo.config.schema import Judge
from alphaapollo.rewards.base import RewardFunction, failed_score, get_question
from alphaapollo.rewards.openai_connection import MALFORMED_RESPONSE_ERRORS, make_connection_options
from alphaapollo.types import Prompt, Score

VERDICT = re.compile(r"^\W*SCORE\W*[:=]\W*?(-?\d+(?:\.\d+)?|-?\.\d+)\W*$", re.IGNORECASE | re.MULTILINE)
THOUGHTS = re.compile(r"^.*</think>", re.DOTALL)
MAX_RETRIES = 4  # of a request
MAX_SHOWN = 120  # characters of a reply in a reason


def make_judge(judge: Judge) -> RewardFunction:
    """Make the reward function of `reward.judge`.

    Raises:
        ValueError: no model is set, the openai package is missing, or OpenAI's own server has no key.
    """
    if not judge.model:
        raise ValueError("reward.judge.model is empty. Set it to the model that judges.")
    connection = make_connection_options("reward.judge", judge.base_url, judge.api_key_env)
    import openai

    client = openai.OpenAI(**connection, timeout=judge.timeout, max_retries=MAX_RETRIES)

    def grade(prompt: Prompt, completion: str) -> Score:
        """The judge's score, from 0 to 1; `accuracy` is 1 from 0.5 on."""
        try:
            reply = client.chat.completions.create(
                model=judge.model,
                messages=[{"role": "user", "content": fill_template(judge.prompt, prompt, completion)}],
                temperature=judge.temperature,
                max_tokens=judge.max_tokens,
            )
            text = reply.choices[0].message.content
        except openai.APIError as error:
            return failed_score(f"the judge gave no answer: {type(error).__name__}: {error}")
        except MALFORMED_RESPONSE_ERRORS as error:
            return failed_score(f"the judge's server is not OpenAI-compatible: {type(error).__name__}: {error}")
        return read_verdict(text)

    return grade


def fill_template(template: str, prompt: Prompt, completion: str) -> str:
    """Fill {question}, {ground_truth} and {answer} into the template, once each.

    Thoughts before `</think>` are left out of the answer.
    """
    fields = {
        "question": get_question(prompt),
        "ground_truth": "none is given" if prompt.ground_truth is None else prompt.ground_truth,
        "answer": THOUGHTS.sub("", completion).strip(),
    }
    return re.sub(r"\{(question|ground_truth|answer)\}", lambda match: fields[match[1]], template)


def read_verdict(reply: str | None) -> Score:
    """Read the last line `SCORE: x` of a reply, 0 <= x <= 1; without one, the grade failed."""
    text = THOUGHTS.sub("", reply or "")
    scores = [float(number) for number in VERDICT.findall(text)]
    end = " ".join(text.split())[-MAX_SHOWN:]
    if not scores:
        return failed_score(f"the judge's answer has no line 'SCORE: ...': {end!r}")
    if not 0 <= scores[-1] <= 1:
        return failed_score(f"the judge's score {scores[-1]:g} is not between 0 and 1: {end!r}")
    return Score(scores[-1], {"accuracy": float(scores[-1] >= 0.5)})
