"""An engine that has died while the run generates, replaced while everybody else stands.

generate -> a death -> what the others play ends -> a new engine -> publish -> what is missing, with the same draws

The synchronous loop, without GPUs: elsewhere, and where this fails, all of the run begins anew (restarts.py).
"""

from __future__ import annotations

import asyncio

from alphaapollo.controller.ranks import WorkerDied, WorkerFailed
from alphaapollo.engines.protocol import EngineError
from alphaapollo.trainer.run_state import Run


async def replace_engines(run: Run, death: WorkerDied, missing: int) -> dict[str, int]:
    """Others in the place of those that have died, with the weights of now; metrics. Raises `death` where that cannot
    be. missing: groups that are to be played again."""
    engines, trainer = run.crew.engines, run.config.trainer
    dead = sorted(engines.dead)
    if not dead or not run.crew.replaces_engines or run.engines_replaced + len(dead) > trainer.max_restarts:
        raise death
    run.engines_replaced += len(dead)
    run.console.notice(f"{death}; another one takes its place, and {missing} groups are played again")
    try:
        async with asyncio.timeout(trainer.start_timeout):
            for index in dead:
                await run.crew.replace_engine(index)
    except (TimeoutError, EngineError, WorkerFailed) as error:
        run.console.notice(f"it did not start: {str(error) or type(error).__name__}")
        raise death from None
    engines.dead.clear()
    await run.weights.publish(run.progress.step)
    return {"recovery/engine_restarts": len(dead), "recovery/groups_replayed": missing}
