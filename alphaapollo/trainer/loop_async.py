"""The asynchronous loop: groups of rollouts for later iterations are generated while an iteration trains.

                trainer.async_mode=carry                           trainer.async_mode=separate
    take        a batch; the other groups are paused               a batch; the other groups continue
    learn       the engines sleep; requests keep their tokens      the engines generate
    publish     paused requests continue with the new weights      pause, load weights, continue

step/in_flight.py tracks the groups in flight and limits how many weight versions old they may be. All other code is
shared with the synchronous loop (loop.py). With trainer.max_staleness=0, both loops compute the same numbers.
docs/async.md compares the modes.
"""

from __future__ import annotations

import time

from alphaapollo.observability.timing import Timer
from alphaapollo.trainer.loop import finish_iteration
from alphaapollo.trainer.run_state import TrainingRun
from alphaapollo.trainer.step.in_flight import InFlightGroups


async def train_async(run: TrainingRun) -> None:
    """Train until the run's goal is reached. After an error, the last complete checkpoint remains valid."""
    in_flight = InFlightGroups(run)
    timer, taken = Timer(), time.perf_counter()
    try:
        while not run.goal.is_reached(run.progress):
            step = run.progress.step + 1
            await run.profiler.start_step(step, timer)
            collected = await in_flight.take_batch(step, timer)
            since, taken = taken, time.perf_counter()
            run.saving.mark_models_inconsistent()
            if run.config.trainer.async_mode == "carry":
                with timer("pause"):
                    await run.workers.engines.sleep(pauses_requests=True)
            timer = await finish_iteration(run, collected, taken - since, timer, in_flight)
        await run.profiler.start_step(None, timer)
    finally:
        await in_flight.close()
