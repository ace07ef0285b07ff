"""Inputs of policy losses in a loop of one's own: weights of rows, and what is refused before anything runs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.config.schema import Config, Rollout
from alphaapollo.own_loop.policy_columns import check_loss, compute_row_weights
from alphaapollo.own_loop.rows import RowReader, make_row
from alphaapollo.own_loop.sampled_rows import check_sampling
from alphaapollo.own_loop.setup import check_settings
from alphaapollo.planning.memory_fit import replace_values
from alphaapollo.types import Row, Sampling
from alphaapollo.utils.kept_tokens import KEPT_TOKENS, KeptTokens

ROLE = "actor_rollout_ref"
ACTOR, CORRECTION = f"{ROLE}.actor", "algorithm.rollout_correction"
TRPO = {f"{ACTOR}.optim.name": "trpo"}
FULL_KL = {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "full"}
SAMPLED = Row([1, 2, 3, 4], [0, 0, 1, 1], [0.0, 0.0, -2.0, -3.0], [3], columns={"advantages": 1.0}, temperature=1.0)


def configure(keys: dict[str, Any]) -> Config:
    return replace_values(Config(), keys)


@pytest.mark.parametrize(
    ("keys", "loss", "columns", "problem"),
    [
        ({}, "ppo", {}, None),
        (TRPO, "surrogate", {}, None),
        (TRPO, "ppo", {}, 'needs loss="surrogate"'),
        (TRPO, None, {}, 'needs loss="surrogate"'),
        ({f"{CORRECTION}.method": "tis"}, None, {}, None),
        ({f"{CORRECTION}.method": "tis"}, "ppo", {}, r"method=tis .* old_logprobs=log_probs\(rows\)"),
        ({f"{CORRECTION}.method": "tis"}, "ppo", {"old_logprobs": -1.0}, None),
        (
            {f"{CORRECTION}.method": "tis"},
            "ppo",
            {"old_logprobs": -1.0, "targets": [1, 2, 3, 9]},
            "no engine sampled 1",
        ),
        ({f"{CORRECTION}.method": "tis"}, "gspo", {"old_logprobs": -1.0}, "level=token"),
        ({f"{CORRECTION}.method": "tis"}, "dppo_tv", {}, "includes a correction"),
        ({f"{CORRECTION}.method": "tis"}, "reinforce", {}, None),
        ({}, "gspo", {"weights": 0.5}, "gspo is a loss of rows"),
        (
            {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "unbiased"},
            "gpg",
            {"targets": [1, 2, 9, 4]},
            "row 0",
        ),
    ],
)
def test_losses_that_cannot_be_computed_are_refused(keys: Any, loss: Any, columns: Any, problem: str | None) -> None:
    (row,) = RowReader(None, 10).read([SAMPLED], {name: [value] for name, value in columns.items()})
    with pytest.raises(ValueError, match=problem) if problem else nullcontext():
        check_loss(configure(keys), loss and get_policy_loss(loss), [row])


@pytest.mark.parametrize(
    ("kept", "problem"),
    [
        (KeptTokens.of_sets([[], [3, 5], [4], [7]]), None),
        (KeptTokens.of_sets([[9], [3, 5], [4]]).encode(), None),  # position 1 is not trained
        (KeptTokens.of_sets([[3, 5], [4]]), "row 0.* kept_tokens has 2 sets for 4 tokens"),
        ([[], [3], [4], []], "kept_tokens has a list"),
        (KeptTokens.of_sets([[], [3, 12], [4]]), "the kept token 12 is outside .* 10 tokens"),
        (KeptTokens.of_sets([[], [3], [5, 6]]), "the token 4 at position 3 is not among the 2 tokens"),
    ],
)
def test_kept_tokens_of_another_row_are_refused(kept: object, problem: str | None) -> None:
    with pytest.raises(ValueError, match=problem) if problem else nullcontext():
        (row,) = RowReader(None, 10).read([SAMPLED], {KEPT_TOKENS: [kept]})
        sets = KeptTokens.decode(row.columns[KEPT_TOKENS])
        assert (len(sets), sets[1:].ids.tolist()) == (4, [3, 5, 4])


def test_kept_tokens_need_an_engine_with_masks() -> None:
    sampling = [Sampling(4), Sampling(4, top_p=0.9, returns_kept_tokens=True)]
    check_sampling(Rollout(top_p=0.8), sampling)
    for rollout in (Rollout(), Rollout(top_p=0.8, sampling_mask=False)):
        check_sampling(rollout, sampling[:1])
        with pytest.raises(ValueError, match=r"returns_kept_tokens=True .* sampling_mask="):
            check_sampling(rollout, sampling)


@pytest.mark.parametrize("keys", [FULL_KL, {"teacher.divergence": "jsd"}])
def test_trpo_compares_with_one_distribution(keys: dict[str, Any]) -> None:
    check_settings(configure(TRPO))
    with pytest.raises(ValueError, match=r"optim\.name=trpo"):
        check_settings(configure(TRPO | keys))


@pytest.mark.parametrize(
    ("mode", "loss", "denominator", "per_token", "per_row"),
    [
        ("token-mean", "ppo", None, [1 / 4] * 2, [1 / 2] * 2),
        ("seq-mean-token-mean", "ppo", None, [1 / 2, 1 / 6], [1 / 2] * 2),
        ("seq-mean-token-mean", "ppo", 8.0, [1 / 8] * 2, [1 / 8] * 2),
        ("token-mean", "gspo", 8.0, [1 / 8, 1 / 24], [1 / 8] * 2),
    ],
)
def test_the_denominator_is_the_weight_of_the_rows(
    mode: str, loss: str, denominator: float | None, per_token: list[float], per_row: list[float]
) -> None:
    rows, config = [make_row([5, 6]), make_row([5, 6, 7, 8])], configure({f"{ACTOR}.loss_agg_mode": mode})
    weights = compute_row_weights(rows, get_policy_loss(loss), config, denominator, None)
    np.testing.assert_allclose(weights, [per_token, per_row])
