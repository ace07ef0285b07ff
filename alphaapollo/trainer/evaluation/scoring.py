"""Grade existing responses and compute metrics (main_eval). A row has a prompt and one or several responses.

Rows that are equal except for their responses form one problem, so a file may also have one row per response.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

from alphaapollo.config.check import check_config_and_get_notices
from alphaapollo.config.load import save_config
from alphaapollo.config.schema import EvalConfig
from alphaapollo.data.files import (
    HELD_OUT,
    DataRow,
    convert_rows,
    list_column_names,
    name_splits,
    read_rows,
    to_file_list,
)
from alphaapollo.data.findings import DataFinding
from alphaapollo.data.formats import RESULT_COLUMNS
from alphaapollo.data.prompts import load_prompts
from alphaapollo.launch.inputs import check_rewards
from alphaapollo.observability.console import Console
from alphaapollo.observability.sample_metrics import SampleResult, find_answer, make_sample_result
from alphaapollo.rewards.completion_group import CompletionGroup
from alphaapollo.rewards.grader_processes.client import RewardClient
from alphaapollo.rewards.registry import leave_out_missing_answers
from alphaapollo.runs.checkpoint_folder import write_format
from alphaapollo.runs.resume import check_folder_belongs_to_command
from alphaapollo.runs.rollout_log import compute_prompt_digest, describe_prompt, replace_images, save_image
from alphaapollo.trainer.evaluation.report import write_report
from alphaapollo.types import JsonObject, Outcome, Prompt, Score
from alphaapollo.utils.disk import explain_write_errors, replace_file
from alphaapollo.utils.json_types import finite_or_none

RESPONSE_COLUMNS = ("responses", "response")  # columns tried if data.response_key is empty
IN_FLIGHT = 64  # maximum number of problems in flight per grader process, besides one per connection to a judge
GradedResponse = tuple[SampleResult, Score]


@dataclass(frozen=True)
class PromptResponses:
    """Prompt with all its responses. `prompt.id` is the index of the problem."""

    prompt: Prompt
    responses: list[str | None]  # None: the data has no response, which is a failed sample


def prepare_problems(config: EvalConfig, console: Console) -> list[PromptResponses]:
    """Check the configuration and read the problems. Raises ValueError for invalid input."""
    notices = check_config_and_get_notices(config)
    check_folder_belongs_to_command(config)
    files = name_splits(config.data.path, HELD_OUT, notices)
    findings = list[DataFinding]()
    problems = read_problems(files, config.data.prompt_key, config.data.response_key, findings)
    prompts = [problem.prompt for problem in problems]
    notices += [finding.describe() for finding in findings]
    reward_notices, _ = check_rewards(prompts, config.reward, config.custom_reward_function)
    notices += reward_notices
    responses = [response for problem in problems for response in problem.responses]
    missing = responses.count(None)
    if missing == len(responses):
        raise ValueError(f"data.path={config.data.path}: all {missing} responses are missing. Use another file.")
    console.show_line(f"{config.trainer.folder}: {len(responses)} responses to {len(problems)} problems")
    if missing:
        notices.append(f"{missing} of {len(responses)} responses are missing. They are failed samples, not scored 0.")
    for notice in notices:
        console.notify(notice)
    return problems


def read_problems(
    files: str | list[str], prompt_key: str, response_key: str, findings: list[DataFinding]
) -> list[PromptResponses]:
    """Read the problems of data files, except those without an answer. Rows that are not read are reported in
    `findings`. Raises ValueError for missing files or columns, or invalid rows."""
    prompts = load_prompts(files, prompt_key, findings=findings)
    for prompt, column in product(prompts, [response_key] if response_key else RESPONSE_COLUMNS):
        prompt.extra_info.pop(column, None)  # otherwise rows with different responses would be different problems
    kept_ids = {prompt.id for prompt in leave_out_missing_answers(prompts, findings)}
    rows = [responses for path in to_file_list(files) for responses in _read_responses(path, response_key)]
    problems: dict[str, PromptResponses] = {}  # by digest of the prompt
    for prompt, responses in zip(prompts, rows, strict=True):
        if prompt.id in kept_ids:
            problem = PromptResponses(replace(prompt, id=len(problems)), [])
            problems.setdefault(compute_prompt_digest(prompt), problem).responses.extend(responses)
    counts = Counter(compute_prompt_digest(replace(problem.prompt, extra_info={})) for problem in problems.values())
    if num_equal := sum(count for count in counts.values() if count > 1):
        effect = "read as different problems. Remove columns that only describe the responses"
        findings.append(DataFinding("data.path", "equal prompts with other columns", effect, num_equal, len(problems)))
    return list(problems.values())


def _read_responses(path: str, response_key: str) -> list[list[str | None]]:
    rows = read_rows(path)
    columns = list_column_names(rows)
    if not response_key and {*RESULT_COLUMNS} <= {*columns}:  # results.jsonl, or a file of rollouts/
        return [[find_answer(row["turns"])] for row in rows]
    candidates = [response_key] if response_key else RESPONSE_COLUMNS
    column = next((name for name in candidates if name in columns), None)
    if column is None:
        raise ValueError(
            f"{path} has no column {' or '.join(map(repr, candidates))}; its columns are {', '.join(columns)}. Set "
            "data.response_key to the column with the responses."
        )

    def list_responses(row: DataRow) -> list[str | None]:
        value = row.get(column)
        values = (value or [None]) if isinstance(value, list) else [value]
        responses = [None if item != item else item for item in values]  # NaN: an empty cell of pandas
        if not all(isinstance(response, str | None) for response in responses):
            raise ValueError(f"{column!r} is {repr(value)[:80]}. It must be a string or a list of strings.")
        return responses

    return convert_rows(path, rows, list_responses)


async def grade_and_write_report(config: EvalConfig, problems: Sequence[PromptResponses], console: Console) -> None:
    """Grade all responses and write scores.jsonl, config.yaml and the summary. Raises ValueError if all failed."""
    folder = config.trainer.folder
    graded = await _grade_responses(config, problems, console)
    records = (_make_score_record(folder, problems, result, score) for result, score in graded)
    lines = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
    with explain_write_errors("the scores", folder):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "scores.jsonl", map(str.encode, lines))
        save_config(config, folder / "config.yaml")
        write_format(folder)
    console.end_live_view()
    write_report([result for result, _ in graded], [problem.prompt for problem in problems], folder, console.terminal)


async def _grade_responses(
    config: EvalConfig, problems: Sequence[PromptResponses], console: Console
) -> list[GradedResponse]:
    """Grade all responses in separate processes. The results are in the order of problems and responses."""
    custom, reward = config.custom_reward_function, config.reward
    client = RewardClient(reward, custom)
    slots = asyncio.Semaphore(IN_FLIGHT * reward.num_workers + reward.judge.max_connections)
    num_graded, count = 0, sum(len(problem.responses) for problem in problems)

    async def grade(prompt: Prompt, sample_index: int, response: str | None) -> GradedResponse:
        nonlocal num_graded
        if response is None:
            score = Score(math.nan, outcome=Outcome.ENVIRONMENT_FAILED, reason="the data has no response")
        else:
            score = await client.score(prompt, response)
        num_graded += 1
        console.show_phase("grade", num_graded, count)
        return make_sample_result(prompt, sample_index, response or "", score), score

    async def grade_problem(problem: PromptResponses) -> list[GradedResponse]:
        completions = CompletionGroup(len(problem.responses))
        async with slots:
            calls = (completions.run(grade, problem.prompt, n, text) for n, text in enumerate(problem.responses))
            return await asyncio.gather(*calls)

    await client.start()
    try:
        graded = await asyncio.gather(*map(grade_problem, problems))
        return [response for responses in graded for response in responses]
    finally:
        await client.close()


def _make_score_record(
    folder: Path, problems: Sequence[PromptResponses], result: SampleResult, score: Score
) -> JsonObject:
    """Create the line of scores.jsonl for one graded response, and save the images of its prompt to `folder`."""
    problem = problems[result.problem_id]
    return {
        "prompt_id": result.problem_id,
        "sample": result.sample_index,
        "prompt": replace_images(problem.prompt.content, partial(save_image, folder)),
        **describe_prompt(problem.prompt),
        "response": problem.responses[result.sample_index],
        "answer": result.answer,
        "reward": finite_or_none(score.reward),
        "components": score.components,
        "accuracy": score.accuracy,
        "outcome": score.outcome,
        "reason": score.reason,
    }
