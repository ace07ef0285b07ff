"""A start without an index is refused, with the command that builds one."""

from __future__ import annotations

from tests.loop.conftest import Runner


def test_a_missing_index_is_refused(ppo: Runner) -> None:
    keys = ["env.env_name=informal_math", "env.max_steps=2", "env.informal_math.enable_local_rag=True"]
    error = ppo.refuse(*keys, "env.tool_settings={local_rag: {index: /no/such/index}}")
    assert "/no/such/index" in error and "retrieval build" in error
