"""Functions that a test registers from a user's file are removed after the test."""

from collections.abc import Iterator

import pytest

from alphaapollo.algorithms.advantages.base import _estimators
from alphaapollo.environments.base import _ENVIRONMENTS
from alphaapollo.tools.base import tools


@pytest.fixture(autouse=True)
def names_of_one_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for registry in (_estimators, _ENVIRONMENTS, tools):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    yield
