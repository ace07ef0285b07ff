"""Parts of the reward that keys name: does the reward function give them? Tried before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.config.schema import Config
from alphaapollo.launch.try_environment import try_grades
from alphaapollo.rewards.components import TASK
from alphaapollo.trainer.step import trained_reward
from alphaapollo.types import Prompt, Score

ALWAYS = {"accuracy", "reward"}  # what every trajectory has for algorithm.filter_groups.metric


async def check_named_rewards(config: Config, prompt: Prompt, tried: Sequence[Score]) -> None:
    """ValueError: a key names a part that none of the tried answers has. Parts that come of elsewhere than the reward
    function (an environment of the user's own) are not known before the run.

    tried: scores of answers to the prompt; empty: it is tried here.
    """
    wanted = dict(_wanted(config))
    if not wanted or config.env.custom_module:
        return
    tried = tried or await try_grades(prompt, config.reward, config.custom_reward_function)
    scores = [score for score in tried if not score.outcome.failed]
    given = {name for score in scores for name in score.components}
    if not given and not any(score.reward for score in scores):
        return  # a 0 without parts has 0 of each
    if config.reward_model.enable:
        given |= {trained_reward.NAME, TASK, "accuracy"}
    for name, key in wanted.items():
        if name not in given:
            raise ValueError(
                f"{key} names {name!r}; the reward function, tried on row {prompt.id}, gives "
                f"{', '.join(sorted(given)) or 'one number without parts'}. Return it in the function's dict, or mend "
                "the key."
            )


def _wanted(config: Config) -> Iterator[tuple[str, str]]:
    """Name of a part, and the key that names it."""
    algorithm = config.algorithm
    if "components" in get_estimator(algorithm.adv_estimator).needs:
        yield from ((name, "algorithm.gdpo_rewards") for name in algorithm.gdpo_rewards)
        for name, (other, _) in algorithm.gdpo_conditions.items():
            yield from ((part, "algorithm.gdpo_conditions") for part in (name, other))
    if algorithm.filter_groups.enable and algorithm.filter_groups.metric not in ALWAYS:
        yield algorithm.filter_groups.metric, "algorithm.filter_groups.metric"
