"""Credit assignment in chunks of whole groups: equal results, and matrices of a limited size."""

import random

import numpy as np
import pytest

from alphaapollo.algorithms.advantages import AdvantageInputs, Advantages, Estimator, estimator_names, get_estimator
from alphaapollo.batching.batch import Columns
from alphaapollo.config.keys import replace_value
from alphaapollo.config.schema import Actor
from alphaapollo.trainer.step import credit
from alphaapollo.trainer.step.build_batch import build_batch
from alphaapollo.trainer.step.credit import AssignedCredit, assign_credit, split_into_chunks
from alphaapollo.types import Prompt, Score, Trajectory
from tests.builders import make_completion, make_trajectory, make_turn
from tests.unit.trainer.samples import build, credit_of, group, make_config, trajectory

OPTIONS = {"gdpo": {"gdpo_rewards": ["accuracy", "style"]}, "grpo_passk_analytic": {"passk_k": 2}}


def random_trajectory(draws: random.Random, prompt: int, sample: int) -> Trajectory:
    """One to three turns, in one row or (memory context) in one row each."""
    memory, turns = draws.random() < 0.3, []
    for _ in range(draws.randint(1, 3)):
        length = draws.randint(1, 20)
        completion = make_completion(length, [-draws.random() for _ in range(length)])
        turns.append(make_turn(completion, [7, prompt], info={"state": draws.randint(0, 1)}))
    reward = float(draws.randint(0, 1))
    score = Score(reward, {"accuracy": reward, "style": draws.random()})
    return make_trajectory(*turns, score=score, sample=sample, prompt_id=prompt, memory=memory)


def assign(name: str, use_kl: bool) -> AssignedCredit:
    draws, numbers = random.Random(3), np.random.default_rng(3)
    groups = [
        group(
            *(random_trajectory(draws, prompt, sample) for sample in range(3)),
            prompt=Prompt(prompt, "test", "text"),
            baseline=random_trajectory(draws, prompt, 9),
        )
        for prompt in range(8)
    ]
    actor = Actor(ppo_mini_batch_size=6)
    config = make_config(actor, adv_estimator=name, use_kl_in_reward=use_kl, **OPTIONS.get(name, {}))
    config = replace_value(config, "data.max_response_length", 100)
    batch = build_batch(groups, config, 1, 2, 16_384, False, False)
    names = ("old_logprobs", "ref_logprobs", "values")
    columns = {name: numbers.normal(size=len(batch.mask)).astype(np.float32) for name in names}
    return assign_credit(batch, Columns(**columns), config, kl_coef=0.1)


@pytest.mark.parametrize("name", estimator_names())
def test_chunks_do_not_change_a_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kl = not get_estimator(name).no_shaping_reason
    complete = assign(name, use_kl)
    monkeypatch.setattr(credit, "CHUNK_CELLS", 200)  # one to three groups
    chunked = assign(name, use_kl)
    assert chunked.metrics == complete.metrics
    for ours, theirs in zip(chunked.columns, complete.columns, strict=True):
        np.testing.assert_array_equal(ours.advantages, theirs.advantages)
        np.testing.assert_array_equal(ours.returns, theirs.returns)


def test_chunks_are_whole_groups_within_the_limit() -> None:
    ids, lengths = np.array([0, 0, 1, 1, 2, 3, 3]), np.array([2, 3, 1, 2, 9, 2, 2])
    assert split_into_chunks(ids, lengths, 12) == [(0, 4), (4, 5), (5, 7)]  # 4 x 3, 1 x 9, 2 x 2
    assert split_into_chunks(ids, lengths, 1) == [(0, 2), (2, 4), (4, 5), (5, 7)]
    assert split_into_chunks(ids, lengths, 63) == [(0, 7)]


@pytest.mark.parametrize(("scope", "shapes"), [("groups", [(2, 3), (2, 5)]), ("batch", [(4, 5)])])
def test_scope_decides_the_size_of_matrices(
    scope: str, shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def record_shape(inputs: AdvantageInputs, config: object) -> Advantages:
        found.append(tuple(inputs.mask.shape))
        return Advantages(inputs.mask, inputs.mask)

    estimator = Estimator("mine", record_shape, scope=scope)  # type: ignore[arg-type]
    monkeypatch.setattr(credit, "get_estimator", lambda name: estimator)
    monkeypatch.setattr(credit, "CHUNK_CELLS", 10)
    credit_of(build([group(*(trajectory(i, 1.0, n) for i in range(2))) for n in (3, 5)]), "grpo")
    assert found == shapes
