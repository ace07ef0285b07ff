"""Whether a stall would be told of before it ends the run."""

from __future__ import annotations

from collections.abc import Iterator

from alphaapollo.config.schema.trainer import WatchedRun


def check_stalls(trainer: WatchedRun) -> Iterator[str]:
    """One line a problem."""
    timeout, notice = trainer.stall_timeout, trainer.stall_notice
    if timeout is not None and timeout < notice:
        yield (
            f"trainer.stall_timeout={timeout:g}: the run would end before trainer.stall_notice={notice:g} tells of it. "
            "Set it to at least that, or to null."
        )
