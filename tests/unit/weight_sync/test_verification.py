import pytest

from alphaapollo.types import WeightUpdate
from alphaapollo.weight_sync.verification import WeightSyncError, agreed, check_sound


def test_ranks_that_write_have_sent_the_same():
    update = WeightUpdate(4, "ab", "v4")
    assert agreed([None, update, None, WeightUpdate(4, "ab", "v4")]) == update
    with pytest.raises(WeightSyncError, match="different weights as version 4: digests ab and cd"):
        agreed([update, None, WeightUpdate(4, "cd", "v4")])


def test_ruined_weights_are_told_apart_from_an_engine_that_is_wrong():
    check_sound([-1.0, -500.0], 3)
    with pytest.raises(FloatingPointError, match=r"log-prob of nan \(before publish 3\): its weights are ruined"):
        check_sound([-1.0, float("nan")], 3)
    with pytest.raises(FloatingPointError, match=r"log-prob of -1e\+06"):
        check_sound([-1.0, -1e6], 0)
