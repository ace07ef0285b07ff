import pytest

from alphaapollo.engines.weight_sync.transport import WeightUpdate
from alphaapollo.engines.weight_sync.verification import WeightSyncError, check_probe_finite, merge_weight_updates


def test_writing_ranks_must_send_equal_updates():
    update = WeightUpdate(4, "ab", "v4")
    assert merge_weight_updates([None, update, None, WeightUpdate(4, "ab", "v4")]) == update
    with pytest.raises(WeightSyncError, match="version 4: digests ab and cd"):
        merge_weight_updates([update, None, WeightUpdate(4, "cd", "v4")])


def test_corrupt_weights_raise_floating_point_error():
    check_probe_finite([-1.0, -500.0], 3)
    with pytest.raises(FloatingPointError, match=r"log-prob nan\. Weight version 3"):
        check_probe_finite([-1.0, float("nan")], 3)
    with pytest.raises(FloatingPointError, match=r"log-prob -1e\+06"):
        check_probe_finite([-1.0, -1e6], 0)
