"""Asynchronous training: the next groups are played while this iteration learns. One iteration reads in `train`.

                carry                                           separate
    take        a batch of whole groups; the rest stays ...     ... and plays on
    pause       what is unfinished keeps its tokens             -
    learn       the engines rest                                the engines play
    publish     what was paused goes on with the new weights    pause, receive, go on

What is ahead, and how old it may become: in_flight.py. Everything else is the synchronous loop's (loop.py), and with
trainer.max_staleness=0 the numbers are, too. docs/async.md says which to choose.
"""

from __future__ import annotations

import time

from alphaapollo.observability.timing import Timer
from alphaapollo.trainer.loop import on_schedule, run_metrics
from alphaapollo.trainer.metrics.rollout_metrics import rollout_metrics
from alphaapollo.trainer.replay.record import learn_recorded
from alphaapollo.trainer.run_state import Run
from alphaapollo.trainer.step.in_flight import InFlight, staleness_metrics
from alphaapollo.utils.schedule import due


async def train_async(run: Run) -> None:
    """Run the iterations that remain. On any error the last whole checkpoint stands."""
    in_flight = InFlight(run)
    try:
        await train(run, in_flight)
    finally:
        await in_flight.close()


async def train(run: Run, in_flight: InFlight) -> None:
    config, crew, progress = run.config, run.crew, run.progress
    timer, taken = Timer(), time.perf_counter()
    while not run.goal.reached(progress):
        step = progress.step + 1
        await run.profiler.turn_to(step, timer)
        collected = await in_flight.take(step, timer)
        since, taken = taken, time.perf_counter()
        is_last = run.goal.reached(progress, step)
        run.saving.moves()
        if config.trainer.async_mode == "carry":
            with timer("pause"):
                await crew.engines.pause(config.trainer.keep_kv_cache)
                await crew.engines.sleep()
        metrics = rollout_metrics(collected.generated, collected.groups, collected.rounds, taken - since)
        metrics |= staleness_metrics(collected.groups, step - 1)
        metrics |= collected.recovery
        metrics |= run.trained_reward.figures() if run.trained_reward else {}
        run.rollout_log.write(step, collected.generated)
        learned = await learn_recorded(run, step, collected.groups, timer)
        metrics |= learned.metrics
        progress.kl_coef = learned.kl_coef
        progress.note_rewards(collected.generated)
        with timer("publish"):
            metrics |= await run.weights.publish(step)
        in_flight.start(step)
        metrics |= await on_schedule(run, step, is_last, timer)
        progress.step = step
        metrics |= in_flight.metrics() | await run.saving.figures() | await run_metrics(run, timer, learned.tokens)
        run.tracker.log(step, metrics)
        run.console.step(step, metrics)
        run.saving.stands(progress)
        timer = Timer()
        if due(step, config.trainer.save_freq, is_last):
            with timer("checkpoint"):
                await run.saving.save(progress)
    await run.profiler.turn_to(None, timer)
