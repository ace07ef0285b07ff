"""The asynchronous loop: groups of rollouts for later iterations are generated while an iteration trains.

                trainer.async_mode=carry                           trainer.async_mode=separate
    take        a batch; the other groups are paused               a batch; the other groups continue
    learn       the engines sleep; requests keep their tokens      the engines generate
    publish     paused requests continue with the new weights      pause, load weights, continue

step/in_flight.py tracks the groups in flight and limits how many weight versions old they may be. All other code is
shared with the synchronous loop (loop.py), which also trains with trainer.max_staleness=0. docs/async.md compares the
modes.
"""

from __future__ import annotations

import time

from alphaapollo.observability.timing import Timer
from alphaapollo.trainer.loop import finish_iteration, log_groups, log_trained_rows
from alphaapollo.trainer.run_state import TrainingRun
from alphaapollo.trainer.step.in_flight import InFlightGroups


async def train_async(run: TrainingRun) -> None:
    """Train until the run's goal is reached. After an error, the last complete checkpoint remains valid."""
    in_flight = InFlightGroups(run)
    run.metric_sources.append(in_flight)
    timer, taken = Timer(), time.perf_counter()
    try:
        while not run.goal.is_reached(run.progress):
            iteration = run.progress.step + 1
            await run.profiler.start_step(iteration, timer)
            collected = await in_flight.take_batch(iteration, timer)
            since, taken = taken, time.perf_counter()
            run.checkpoint_writer.mark_models_inconsistent()
            if run.config.trainer.async_mode == "carry":
                with timer("pause"):
                    await run.workers.engines.sleep(pauses_requests=True)
            metrics = log_groups(run, iteration, collected, taken - since)
            learned = await run.learn(run, iteration, collected.trained, timer)
            learned = log_trained_rows(run, iteration, learned, collected)
            with timer("publish"):
                metrics |= await run.weights.publish(iteration)
            in_flight.start_groups(iteration)
            timer = await finish_iteration(run, collected, learned, metrics, timer)
        await run.profiler.start_step(None, timer)
    finally:
        await in_flight.close()
