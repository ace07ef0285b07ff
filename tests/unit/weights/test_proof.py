import pytest

from alphaapollo.types import WeightUpdate
from alphaapollo.weights.proof import WeightSyncError, agreed


def test_ranks_that_write_have_sent_the_same():
    update = WeightUpdate(4, "ab", "v4")
    assert agreed([None, update, None, WeightUpdate(4, "ab", "v4")]) == update
    with pytest.raises(WeightSyncError, match="different weights as version 4: digests ab and cd"):
        agreed([update, None, WeightUpdate(4, "cd", "v4")])
