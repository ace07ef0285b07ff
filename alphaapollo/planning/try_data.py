"""Try the first rows of each data source before workers start: their length, and the grader on their ground truth."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median_low

from alphaapollo.config.schema import CustomRewardFunction, Reward
from alphaapollo.data.chats import CONTEXT_COLUMNS, shorten_repr
from alphaapollo.data.rendering import Renderer
from alphaapollo.rewards.grader_processes.client import RewardClient
from alphaapollo.rewards.judges import JUDGES
from alphaapollo.rewards.registry import get_grader
from alphaapollo.types import Prompt, Score

NUM_ROWS = 20  # rows of each data source
MAX_FAILURES = 3  # of a data source, each of which may take reward.timeout
MAX_SOURCES = 10  # data sources in the plan
READ_COLUMNS = {"ground_truth", "answer", "solution", "index", "rubric", "choices", "options", *CONTEXT_COLUMNS}


def try_ground_truths(prompts: Sequence[Prompt], reward: Reward) -> tuple[dict[str, str], list[str]]:
    """Grade the first rows of each file and data source with a built-in grader against their own ground truth.

    Returns {data source: how many of them score}, and notices about rows that do not. Raises ValueError if most rows of
    a file and data source do not score, so that no answer can be right.
    """
    counts, notices = defaultdict[str, Counter[bool]](Counter), list[str]()
    for scores in asyncio.run(_grade_ground_truths(prompts, reward)):
        failed = [(prompt, score) for prompt, score in scores if score.reward != 1]
        source = scores[0][0].data_source
        counts[source].update(score.reward == 1 for _, score in scores)
        if not failed:
            continue
        prompt, score = failed[0]
        message = (
            f"{prompt.location}: data_source {source!r} is graded by {get_grader(source)}, for which the row's "
            f"ground truth {shorten_repr(prompt.ground_truth)} is not right ({score.reason or 'it scores 0'}), as in "
            f"{len(failed)} of the {len(scores)} rows that were tried. Correct reward_model.ground_truth, use another "
            "data_source (docs/rewards.md), or set custom_reward_function.path."
        )
        if 2 * len(failed) > len(scores):
            raise ValueError(message)
        notices.append(message)
    return {name: f"ground truth right in {one[True]} of {one.total()} rows" for name, one in counts.items()}, notices


async def _grade_ground_truths(prompts: Sequence[Prompt], reward: Reward) -> list[list[tuple[Prompt, Score]]]:
    """Return the first rows of each file and data source with their scores."""
    groups: dict[tuple[str, str], list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        groups[prompt.data_source, prompt.location.rpartition(",")[0]].append(prompt)
    client = RewardClient(Reward(timeout=reward.timeout), CustomRewardFunction())
    found: list[list[tuple[Prompt, Score]]] = []
    try:
        for rows in (rows for (source, _), rows in groups.items() if get_grader(source) not in JUDGES):
            scores = list[tuple[Prompt, Score]]()
            for prompt in rows[:NUM_ROWS]:
                if sum(score.reward != 1 for _, score in scores) < MAX_FAILURES:
                    scores.append((prompt, await client.score_ground_truth(prompt)))
            found.append(scores)
    finally:
        await client.close()
    return found


def describe_sources(
    prompts: Sequence[Prompt], renderer: Renderer, truths: Mapping[str, str], reads_columns: bool
) -> dict[str, str]:
    """Return {data source: its rows, lengths of the first prompts, ground truths, columns that nothing reads}.

    truths: result of try_ground_truths. reads_columns: whether a function or environment of the user gets the columns.
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
        unread = sorted({name for one in first for name in one.extra_info} - READ_COLUMNS)
        parts += [f"not read: {', '.join(unread)}"] * bool(unread and not reads_columns)
        found[source or "no data_source"] = "; ".join(parts)
    more = len(sources) - len(found)
    return found | ({"more": f"{more} data sources"} if more > 0 else {})
