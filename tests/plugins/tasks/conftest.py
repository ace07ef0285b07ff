"""Models and tokenizers, as for the tests of data, and the server of the tests of agents."""

from tests.unit.data.conftest import *  # noqa: F403
from tests.unit.rollout.agents.conftest import *  # noqa: F403
