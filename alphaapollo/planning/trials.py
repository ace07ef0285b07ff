"""Try the environment's `reset`, the reward functions and the first rows of each data source, before models are
loaded."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median_low
from typing import Never

from alphaapollo.config.schema import CustomRewardFunction, Env, Reward
from alphaapollo.data.chats import CONTEXT_COLUMNS, shorten_repr
from alphaapollo.data.findings import TRUTH_COLUMNS
from alphaapollo.data.rendering import Renderer
from alphaapollo.environments.base import EnvironmentFailure, Services, get_environment_spec, wrap_environment_errors
from alphaapollo.environments.environment_tools import open_toolbox
from alphaapollo.processes.time_limit import TimeLimit
from alphaapollo.rewards.completion_group import CompletionGroup
from alphaapollo.rewards.custom import TRUTHS
from alphaapollo.rewards.grader_processes.client import RewardClient
from alphaapollo.rewards.judges import JUDGES
from alphaapollo.rewards.registry import get_grader
from alphaapollo.rollout.environment_replies import check_reset_reply, check_step_reply
from alphaapollo.rollout.episode import EnvironmentCaller
from alphaapollo.types import JsonObject, Message, Prompt, Score

TRIAL_ANSWERS = ("<answer>TRUTH</answer>", r"The answer is \boxed{TRUTH}.", "TRUTH", "I do not know.", "")
TRIAL_TRUTH = "42"  # ground truth for a row without one
NUM_ROWS = 20  # rows of each data source
MAX_FAILURES = 3  # failed rows after which a data source is left; each may take reward.timeout
MAX_SOURCES = 10  # data sources in the plan
READ_COLUMNS = {"ground_truth", "answer", "dataset", "index", "rubric", "choices", "options", *CONTEXT_COLUMNS}
READ_COLUMNS |= {*TRUTH_COLUMNS}
PLACEHOLDER = re.compile(r"(?<![\w\\}])\{([a-z_]+)\}")  # excludes LaTeX such as \boxed{n}


def try_environment(env: Env, prompts: Sequence[Prompt], needs_accuracy: Sequence[str] = ()) -> list[str]:
    """Start the environment once for each prompt. Returns notices. Raises ValueError if it cannot be used, or a setting
    in `needs_accuracy` is used, but the accuracy is unknown."""
    return [] if env.env_name == "agent" else asyncio.run(try_environment_resets(env, prompts, needs_accuracy))


async def try_environment_resets(
    config: Env, prompts: Sequence[Prompt], needs_accuracy: Sequence[str] = ()
) -> list[str]:
    """Create, reset and close the environment once for each prompt, and play an episode if it proposes actions. Returns
    notices about env.prompt and the accuracy."""
    tools, shown, scores = await open_toolbox(config), "", list[Score | None]()
    try:
        for prompt in prompts:
            services = Services(_deny_in_reset, config, tools, _deny_in_reset)
            first, score = await _start_environment(config, services, prompt)
            shown += first if isinstance(first, str) else "".join(message["content"] for message in first)
            scores.append(score)
    finally:
        if tools is not None:
            await tools.close()
    names = [name for name in dict.fromkeys(PLACEHOLDER.findall(config.prompt)) if f"{{{name}}}" in shown]
    notices = [f"env.prompt: {{{name}}} is not filled in, because the environment has no such value." for name in names]
    if any(score and score.accuracy is None for score in scores):
        text = (
            f"env.env_name={config.env_name}: it is unknown which episodes are right, because the last info of an "
            "episode of random actions has none of accuracy, is_success and success. Return one of them"
        )
        if needs_accuracy:
            raise ValueError(f"{needs_accuracy[0]}: {text}, or change the key.")
        notices.append(f"{text}; without it, accuracy, pass@k and groups/mixed are left out.")
    return notices


async def try_reward_function(
    prompts: Sequence[Prompt], reward: Reward, custom: CustomRewardFunction, needs_accuracy: Sequence[str] = ()
) -> list[str]:
    """Grade TRIAL_ANSWERS to the first prompt with the user's reward function, in a grader process. Returns notices.
    Raises ValueError if a column is missing, the function fails on most answers or on two answers together, or a
    setting in `needs_accuracy` is used, but the accuracy is unknown."""
    prompt, (scores, columns, together) = prompts[0], await grade_trial_answers(prompts[0], reward, custom)
    for column in columns:
        is_truth = column in TRUTHS
        if not any((row.ground_truth is not None) if is_truth else (column in row.extra_info) for row in prompts):
            other_columns = ", ".join(prompt.extra_info) or "those of every row"
            missing, hint = "the data has no such column", "Rename the column or the parameter"
            if is_truth:
                missing = "no row has a ground truth"
                hint = "Rename the column to ground_truth, or give the parameter a default"
            needs = f"{custom.path}: {', '.join(custom.names)} needs {column!r}"
            raise ValueError(f"{needs}, but {missing} (others: {other_columns}). {hint}.")
    failed = {answer: score.reason for answer, score in scores.items() if score.outcome.failed}
    function = f"{custom.path}: {', '.join(custom.names)}" if custom.path else f"{reward.custom_module}: a component"
    notices = list[str]()
    if failed:
        answer, reason = next(iter(failed.items()))
        notices.append(
            f"{function} fails on {len(failed)} of {len(scores)} trial answers to row {prompt.id}, e.g. {answer!r}: "
            f"{reason}. Return a reward for every answer."
        )
    if 2 * len(failed) > len(scores):
        raise ValueError(notices[0])
    graded = [score for score in scores.values() if not score.outcome.failed]
    if any(score.accuracy is None for score in graded):
        names = ", ".join(sorted({name for score in graded for name in score.components})) or "those that you return"
        key = needs_accuracy[0] if needs_accuracy else "accuracy, pass@k and groups/mixed"
        text = (
            f"{key}: it is unknown which answers are right, because the reward of {function} is a sum or not always 0 "
            "or 1, and no component is named accuracy. Set custom_reward_function.accuracy to the component that is 1 "
            f"for a right answer, else 0 ({names})"
        )
        if needs_accuracy:
            raise ValueError(f"{text}, or change the key.")
        notices.append(f"{text}. Without it, they are left out.")
    graded_twice = [answer for answer in together if answer not in failed and not together[answer].outcome.failed]
    rewards = {answer: [round(by_text[answer].reward, 6) for by_text in (together, scores)] for answer in graded_twice}
    if any(reward_of_two != reward_alone for reward_of_two, reward_alone in rewards.values()):
        notices.append(
            f"{function} compares the answers of a list. Rewards of two together, and of each alone: {rewards}. In the "
            "run, a list has all answers to a prompt."
        )
    if reasons := [score.reason for answer, score in together.items() if score.outcome.failed and answer not in failed]:
        raise ValueError(f"{function} fails on a list of two answers, but not on each alone: {reasons[0]}")
    groups = _group_by_place(prompts).values() if custom.path else ()
    without_truth = [rows[0] for rows in groups if all(row.ground_truth is None for row in rows)]
    for row in await _find_truth_readers(without_truth[:MAX_SOURCES], reward, custom):
        where = row.location.rpartition(",")[0] or f"data source {row.data_source!r}"
        notices.append(
            f"{where}: {function} grades with the ground truth, but no row has one (other columns: "
            f"{', '.join(row.extra_info) or 'none'}). Set data.ground_truth_key to its column."
        )
    return notices


async def _find_truth_readers(prompts: Sequence[Prompt], reward: Reward, custom: CustomRewardFunction) -> list[Prompt]:
    """Return the prompts for which the user's function gives other rewards if they have a ground truth."""
    if not prompts:
        return []
    client = RewardClient(reward.model_copy(update={"num_workers": 1, "components": {}, "required": []}), custom)
    answers, found = [answer.replace("TRUTH", TRIAL_TRUTH) for answer in TRIAL_ANSWERS], list[Prompt]()
    try:
        await client.start()
        for prompt in prompts:
            scores = [
                [await client.score(replace(prompt, ground_truth=truth), answer) for answer in answers]
                for truth in (None, TRIAL_TRUTH, None)
            ]
            results = ([(score.reward, score.outcome.failed) for score in answer_scores] for answer_scores in scores)
            without, with_truth, repeated = results
            if without == repeated != with_truth:  # without != repeated: the rewards are random
                found.append(prompt)
        return found
    finally:
        await client.close()


def _group_by_place(prompts: Sequence[Prompt]) -> Mapping[tuple[str, str], list[Prompt]]:
    """Return {(data source, file): prompts}."""
    groups: dict[tuple[str, str], list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        groups[prompt.data_source, prompt.location.rpartition(",")[0]].append(prompt)
    return groups


async def grade_trial_answers(
    prompt: Prompt, reward: Reward, custom: CustomRewardFunction
) -> tuple[dict[str, Score], Sequence[str], dict[str, Score]]:
    """Grade TRIAL_ANSWERS to a prompt in a grader process. Returns {answer: score}, the columns that the user's
    function requires, and the scores of two answers together. The components of a policy that judges itself are left
    out, because no engine runs yet."""
    changes: JsonObject = {"num_workers": 1}
    if reward.judge.backend == "policy":
        changes["components"] = {name: weight for name, weight in reward.components.items() if name not in JUDGES}
        changes["required"] = [name for name in reward.required if name not in JUDGES]
    client = RewardClient(reward.model_copy(update=changes), custom)
    try:
        await client.start()
        answers = [answer.replace("TRUTH", prompt.ground_truth_text or "") for answer in TRIAL_ANSWERS]
        scores = {answer: await client.score(prompt, answer) for answer in answers}
        pair = [answers[0], answers[3]] if client.loaded.takes_groups else []  # right, wrong
        group = CompletionGroup(2)
        pair_scores = await asyncio.gather(*(group.run(client.score, prompt, answer) for answer in pair))
        return scores, client.loaded.columns, dict(zip(pair, pair_scores, strict=True))
    finally:
        await client.close()


async def _start_environment(
    config: Env, services: Services, prompt: Prompt
) -> tuple[list[Message] | str, Score | None]:
    """Create, reset and close the environment once. Returns its first observation, and the score of an episode of the
    actions that it proposes; None if it proposes none, or the episode does not end."""
    caller, seconds = EnvironmentCaller(), config.episode_timeout
    try:
        with wrap_environment_errors("creation"):
            environment = get_environment_spec(config.env_name).factory(services)
        try:
            call = partial(caller.call, TimeLimit(seconds), environment)
            first = check_reset_reply(await call("reset", prompt))
            max_steps = config.max_steps if hasattr(environment, "propose_action") else 0
            for _ in range(max_steps):
                if (action := await call("propose_action")) is None:
                    break
                result = check_step_reply(await call("step", action))
                if result.done:
                    return first, result.score
            return first, None
        finally:
            await caller.call(TimeLimit(seconds), environment, "close")
    except (TimeoutError, EnvironmentFailure) as error:
        late = f"within env.episode_timeout={seconds:g} s" if isinstance(error, TimeoutError) else f"({error})"
        fix = "Fix the environment, its settings (env.*), or the row."
        raise ValueError(f"env.env_name={config.env_name}, row {prompt.id}: it did not start {late}. {fix}") from error


def _deny_in_reset(*_: object) -> Never:
    raise RuntimeError("reset() uses services.parse_calls or services.score. Move this code to step().")


def try_ground_truths(prompts: Sequence[Prompt], reward: Reward) -> tuple[dict[str, str], list[str]]:
    """Grade the first rows of each file and data source with a built-in grader against their own ground truth.

    Returns {data source: how many of its rows score}, and notices. Raises ValueError if most of a file's rows do not.
    """
    counts, notices = defaultdict[str, Counter[bool]](Counter), list[str]()
    for graded_rows in asyncio.run(_grade_ground_truths(prompts, reward)):
        failed = [(prompt, score) for prompt, score in graded_rows if score.reward != 1]
        source = graded_rows[0][0].data_source
        counts[source].update(score.reward == 1 for _, score in graded_rows)
        if not failed:
            continue
        prompt, score = failed[0]
        message = (
            f"{prompt.location}: data_source {source!r} is graded by {get_grader(source)}, for which the row's "
            f"ground truth {shorten_repr(prompt.ground_truth)} is not right ({score.reason or 'it scores 0'}), as in "
            f"{len(failed)} of the {len(graded_rows)} rows that were tried. Correct reward_model.ground_truth, use "
            "another data_source (docs/rewards.md), or set custom_reward_function.path."
        )
        if 2 * len(failed) > len(graded_rows):
            raise ValueError(message)
        notices.append(message)
    results = {name: f"ground truth right in {count[True]} of {count.total()} rows" for name, count in counts.items()}
    return results, notices


async def _grade_ground_truths(prompts: Sequence[Prompt], reward: Reward) -> list[list[tuple[Prompt, Score]]]:
    """Return the first rows of each file and data source with their scores."""
    groups = [rows for (source, _), rows in _group_by_place(prompts).items() if get_grader(source) not in JUDGES]
    client = RewardClient(Reward(timeout=reward.timeout), CustomRewardFunction())
    found: list[list[tuple[Prompt, Score]]] = []
    try:
        for rows in groups:
            graded_rows = list[tuple[Prompt, Score]]()
            for prompt in rows[:NUM_ROWS]:
                if sum(score.reward != 1 for _, score in graded_rows) < MAX_FAILURES:
                    graded_rows.append((prompt, await client.score_ground_truth(prompt)))
            found.append(graded_rows)
    finally:
        await client.close()
    return found


def describe_sources(
    prompts: Sequence[Prompt], renderer: Renderer, truths: Mapping[str, str], reads_columns: bool, truth_key: str = ""
) -> dict[str, str]:
    """Describe each data source: its rows, lengths of the first prompts, ground truths, and columns that nothing reads.

    truths: result of try_ground_truths. reads_columns: whether a function or environment of the user gets the columns.
    truth_key: data.ground_truth_key.
    """
    sources: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        sources[prompt.data_source].append(prompt)
    found: dict[str, str] = {}
    for source, rows in [*sources.items()][:MAX_SOURCES]:
        first = rows[:NUM_ROWS]
        lengths = renderer.count_prompt_tokens(first)
        sizes = f"{min(lengths)} to {max(lengths)} tokens (median {median_low(lengths)} of {len(lengths)} rows)"
        parts = [f"{len(rows)} rows, prompts of {sizes}", truths.get(source, "ground truth not tried")]
        unread = sorted({name for prompt in first for name in prompt.extra_info} - READ_COLUMNS - {truth_key})
        parts += [f"not read: {', '.join(unread)}"] if unread and not reads_columns else []
        found[source or "no data_source"] = "; ".join(parts)
    num_left_out = len(sources) - len(found)
    return found | ({"more": f"{num_left_out} data sources"} if num_left_out > 0 else {})
