from __future__ import annotations

import pytest

from alphaapollo.config.check_stalls import check_stalls
from alphaapollo.config.schema import Config, GenerationConfig


@pytest.mark.parametrize("config", [Config(), GenerationConfig()])
def test_nothing_ends_before_it_is_told_of(config: Config | GenerationConfig) -> None:
    def problems(notice: float, timeout: float | None) -> list[str]:
        return list(check_stalls(config.trainer.model_copy(update={"stall_notice": notice, "stall_timeout": timeout})))

    assert problems(60, 600) == problems(60, 60) == problems(60, None) == []
    (problem,) = problems(60, 30)
    assert problem == (
        "trainer.stall_timeout=30: the run would end before trainer.stall_notice=60 tells of it. Set it to at least "
        "that, or to null."
    )
