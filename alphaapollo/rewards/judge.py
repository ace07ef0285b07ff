"""Grader that asks a language model (judge) on an OpenAI-compatible server for a score.

The openai client retries a request MAX_RETRIES times, with growing pauses, after status 408, 409, 429 or
5xx and after a broken connection. A reply without a score is a failure of the grader, never a reward of 0. After a
failure, the judge is asked a second time (grader_processes.client).
"""

from __future__ import annotations

import re

from alphaapollo.config.schema import Judge
from alphaapollo.rewards.base import RewardFunction, get_question, make_failed_score
from alphaapollo.rewards.openai_connection import MALFORMED_RESPONSE_ERRORS, make_connection_options
from alphaapollo.types import Prompt, Score

VERDICT = re.compile(r"^\W*SCORE\W*[:=]\W*?(-?\d+(?:\.\d+)?|-?\.\d+)\W*$", re.IGNORECASE | re.MULTILINE)
THOUGHTS = re.compile(r"^.*</think>", re.DOTALL)
MAX_RETRIES = 4  # retries of one request
MAX_SHOWN = 120  # characters of a reply in a failure reason


def make_judge_function(judge: Judge) -> RewardFunction:
    """Create the reward function that sends each completion to the model of `reward.judge`. Raises ValueError if no
    model is set, the openai package is missing, or no API key is set for OpenAI's own server."""
    if not judge.model:
        raise ValueError("reward.judge.model is empty. Set it to the name of the model that judges answers.")
    connection = make_connection_options("reward.judge", judge.base_url, judge.api_key_env)
    import openai

    client = openai.OpenAI(**connection, timeout=judge.timeout, max_retries=MAX_RETRIES)

    def grade(prompt: Prompt, completion: str) -> Score:
        """Return the judge's score, from 0 to 1. The component `accuracy` is 1 for scores of at least 0.5."""
        try:
            reply = client.chat.completions.create(
                model=judge.model,
                messages=[{"role": "user", "content": fill_template(judge.prompt, prompt, completion)}],
                temperature=judge.temperature,
                max_tokens=judge.max_tokens,
            )
            text = reply.choices[0].message.content
        except openai.APIError as error:
            return make_failed_score(f"the judge gave no answer: {type(error).__name__}: {error}")
        except MALFORMED_RESPONSE_ERRORS as error:
            return make_failed_score(f"the judge's server is not OpenAI-compatible: {type(error).__name__}: {error}")
        return read_verdict(text)

    return grade


def fill_template(template: str, prompt: Prompt, completion: str) -> str:
    """Replace {question}, {ground_truth} and {answer} in the judge's prompt template. The answer is the completion
    without its thoughts (the text before `</think>`)."""
    fields = {
        "question": get_question(prompt),
        "ground_truth": "none is given" if prompt.ground_truth is None else prompt.ground_truth,
        "answer": THOUGHTS.sub("", completion).strip(),
    }
    return re.sub(r"\{(question|ground_truth|answer)\}", lambda match: fields[match[1]], template)


def read_verdict(reply: str | None) -> Score:
    """Return the score x of the last line `SCORE: x` in the judge's reply. The score is failed if there is no such
    line, or if x is not between 0 and 1."""
    text = THOUGHTS.sub("", reply or "")
    scores = [float(number) for number in VERDICT.findall(text)]
    end = " ".join(text.split())[-MAX_SHOWN:]
    if not scores:
        return make_failed_score(f"the judge's answer has no line 'SCORE: ...': {end!r}")
    if not 0 <= scores[-1] <= 1:
        return make_failed_score(f"the judge's score {scores[-1]:g} is not between 0 and 1: {end!r}")
    return Score(scores[-1], {"accuracy": float(scores[-1] >= 0.5)})
