"""Models and tokenizers, as for the tests of data."""

from tests.unit.data.conftest import *  # noqa: F403
