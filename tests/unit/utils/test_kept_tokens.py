"""Sampling masks: sets of kept tokens and their encoding."""

from __future__ import annotations

import numpy as np
import pytest

from alphaapollo.utils import kept_tokens
from alphaapollo.utils.kept_tokens import KeptTokens, TooManyTokensError

SETS = [[], [0], [3, 9], [*range(40)], [5, 300, 70_000], [], [0, 200_000], [7, 8, 9, 260], [1, 2, 3, 5, 6, 7, 8, 9]]


def sets_of(kept: KeptTokens) -> list[list[int]]:
    return [one.tolist() for one in np.split(kept.ids, np.cumsum(kept.sizes)[:-1])]


@pytest.mark.parametrize("sets", [SETS, [], [[]], [[], []], [[4]]])
def test_sets_survive_the_encoding(sets: list[list[int]]) -> None:
    kept = KeptTokens.decode(KeptTokens.of_sets(sets).encode())
    assert (sets_of(kept) if sets else []) == sets and kept.ids.dtype == np.int32


def test_random_sets_survive_the_encoding() -> None:
    draw = np.random.default_rng(0)
    sets = [np.unique(draw.integers(0, limit, size)) for limit in (9, 300, 150_000) for size in range(0, 400, 7)]
    assert sets_of(KeptTokens.decode(KeptTokens.of_sets(sets).encode())) == [one.tolist() for one in sets]


def test_the_encoding_is_compact() -> None:
    """Gaps below 256 have 1 byte, others 2 or 4; a dense set has 1 bit per id."""
    for one, size in ((range(0, 2000, 100), 20), (range(0, 20_000, 1000), 40), (range(8000), 1000)):
        assert size <= len(KeptTokens.of_sets([one]).encode()) <= size + 45


def test_parts_of_sequences_are_joined() -> None:
    kept = KeptTokens.of_sets(SETS)
    assert sets_of(kept[2:5]) == SETS[2:5] and len(kept[9:]) == 0
    assert sets_of(KeptTokens.concatenate([kept[:3], kept[3:], kept[-1:]])) == [*SETS, SETS[-1]]


def test_tokens_outside_their_sets_are_found() -> None:
    kept = KeptTokens.of_sets([[], [3, 9], [1], [2, 4]])
    assert kept.find_outside([7, 9, 1, 4]).tolist() == []
    assert kept.find_outside([7, 4, 1, 3]).tolist() == [1, 3]


def test_too_many_ids_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_tokens, "MAX_IDS", 4)
    KeptTokens.of_sets([[1, 2], [3, 4]])
    with pytest.raises(TooManyTokensError, match=r"5 tokens over 2 positions .* 4 .*rollout\.top_p.*sampling_mask"):
        KeptTokens.of_sets([[1, 2], [3, 4, 5]])
