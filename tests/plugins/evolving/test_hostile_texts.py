"""The time of reading a reply is linear in its length, also for hostile texts."""

import pytest

from alphaapollo.plugins.evolving.roles import VERDICT, is_last_choice, strip_markup
from tests.unit.rewards.test_hostile_texts import READERS, TEXTS, is_linear


@pytest.mark.parametrize(
    "read", [strip_markup, lambda reply: is_last_choice(VERDICT, reply, "right")], ids=["markup", "verdict"]
)
def test_time_is_linear_in_the_length(read, monkeypatch):
    monkeypatch.setitem(READERS, "reply", read)
    assert [text for text in (*TEXTS, ("VERDICT", ":", "x")) if not is_linear("reply", text)] == []
