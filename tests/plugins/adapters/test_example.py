"""The teacher of examples/reasoning_gym matches the environment, and its configurations are valid."""

import pytest

from tests.unit.environments import test_examples

pytest.importorskip("reasoning_gym")


def test_configs_are_valid():
    test_examples.test_configs_are_valid("reasoning_gym")
