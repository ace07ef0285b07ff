"""The task, the runner and the warm process of tests/loop."""

from tests.loop.conftest import *  # noqa: F403
