"""`Trainer`: the verbs of verbs.py for a user's loop. A thread with an event loop controls the workers.

t.sample(...) in the caller's thread -> coroutine on the trainer's event loop -> workers -> result
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from alphaapollo.config.keys import Settings
from alphaapollo.launch.command import clean_up_processes, open_console
from alphaapollo.observability.timing import Timer
from alphaapollo.own_loop.setup import load_loop_config, prepare_loop
from alphaapollo.own_loop.verbs import Verbs
from alphaapollo.processes.allocator import share_main_arena
from alphaapollo.processes.entry_point import check_started_once, hide_main_script, run_in_temp_folder
from alphaapollo.processes.folder_lock import lock_folder
from alphaapollo.runs.command_history import record_in_history
from alphaapollo.session.publish import make_probe
from alphaapollo.session.start import open_policy_session
from alphaapollo.utils.heartbeat import HEARTBEAT
from alphaapollo.utils.json_types import JsonObject

P = ParamSpec("P")
T = TypeVar("T")
Verb = Callable[Concatenate[Verbs, P], Coroutine[object, None, T]]
PROBE_TEXT = "The engines compute with the weights of the trainer."
IDLE_SECONDS = 1.0  # between two checks whether the caller has closed the trainer


def _make_sync(verb: Verb[P, T]) -> Callable[Concatenate[Trainer, P], T]:
    """Make a method of Trainer that waits for a verb. If the workers end meanwhile, it raises the reason."""

    @wraps(verb)
    def wait_for_verb(self: Trainer, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return self._submit(verb, *args, **kwargs).result()
        except CancelledError as error:
            self._thread.join()
            raise (self._failure or error) from None

    return wait_for_verb


async def _call_verb(verb: Verb[P, T], verbs: Verbs, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a verb, and count its time, including the verbs that it calls."""
    with verbs.timer(verb.__name__):
        return await verb(verbs, *args, **kwargs)


class Trainer:
    """Workers, engines, run folder and checkpoints of main_ppo for a loop of one's own: `with Trainer(...) as t:`.

    If the run folder has checkpoints step_N, the trainer resumes from the newest one (trainer.resume_mode=auto).
    At the end of the block, the trained model is written to `folder`/model (trainer.export_hf).

    Args:
        settings: keys of main_ppo as a dict, or the path of a YAML file. The prefixes actor_rollout_ref.,
            actor_rollout_ref.model. and actor_rollout_ref.actor. may be left out.
        overrides: KEY=VALUE or presets.
        engines: number of rollout engines; 0: none. ranks: training ranks per node. None: as configured.
    """

    def __init__(self, settings: Settings, *overrides: str, engines: int | None = None, ranks: int | None = None):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle OpenMP threads sleep
        self.config, self._has_engines = load_loop_config(settings, overrides, engines, ranks), engines != 0
        self._verbs, self._stop = Future[Verbs](), threading.Event()
        self._failure: BaseException | None = None  # why the workers have ended
        self._loop_error: BaseException | None = None  # error that ended the caller's block
        self._environment: dict[str, str] = {}  # environment variables at the start of the block
        self._thread = threading.Thread(target=self._run, name="own-loop", daemon=True)

    sample = _make_sync(Verbs.sample)
    rollout = _make_sync(Verbs.rollout)
    forward_backward = _make_sync(Verbs.forward_backward)
    optim_step = _make_sync(Verbs.optim_step)
    publish = _make_sync(Verbs.publish)
    log_probs = _make_sync(Verbs.log_probs)
    save = _make_sync(Verbs.save)
    load = _make_sync(Verbs.load)
    evaluate = _make_sync(Verbs.evaluate)
    log = _make_sync(Verbs.log)
    add_adapter = _make_sync(Verbs.add_adapter)
    remove_adapter = _make_sync(Verbs.remove_adapter)
    save_adapter = _make_sync(Verbs.save_adapter)
    load_adapter = _make_sync(Verbs.load_adapter)
    sample_tokens = _make_sync(Verbs.sample_tokens)
    clear_gradients = _make_sync(Verbs.clear_gradients)
    list_adapted_layers = _make_sync(Verbs.list_adapted_layers)

    @property
    def step(self) -> int:
        """Last logged or loaded step."""
        return self._verbs.result().progress.step

    @property
    def state(self) -> JsonObject:
        """Your own values, e.g. `t.state["baseline"] = 0.5`: `save` writes them, and `load` and a trainer that resumes
        replace them by those of the checkpoint."""
        return self._verbs.result().state

    @property
    def folder(self) -> Path:
        """Run folder, with metrics.jsonl, checkpoints/ and at the end model/."""
        return self.config.trainer.folder

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters, without the trainer's own."""
        return self._verbs.result().adapters.names

    @property
    def is_running(self) -> bool:
        """Whether the workers run. If they have ended, the next verb and the end of the block raise the reason."""
        return self._thread.is_alive()

    @property
    def aio(self) -> AsyncVerbs:
        """The verbs as awaitables: `await t.aio.sample(...)`. Several may run at a time."""
        return AsyncVerbs(self)

    def __enter__(self) -> Self:
        share_main_arena()  # before the thread starts, in which a worker may compute
        with hide_main_script():  # the engines' processes would import the caller's script
            self._thread.start()
            try:
                self._verbs.result()
            except BaseException as error:
                self._close(error)
                raise
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self._close(error)
        if self._failure and error is None:
            raise self._failure

    def _close(self, error: BaseException | None) -> None:
        self._loop_error, environment = error, dict(os.environ)
        self._stop.set()
        self._thread.join()  # the thread restores the environment variables of its start
        os.environ.update(environment.items() - self._environment.items())  # keep the changes of the caller's block
        for name in self._environment.keys() - environment:
            os.environ.pop(name, None)

    def _submit(self, verb: Verb[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if not self._thread.is_alive():
            problem = f"has ended: {self._failure}" if self._failure else "is not running"
            raise RuntimeError(f"the trainer {problem}. Call its verbs inside `with alphaapollo.Trainer(...) as t:`.")
        call = _call_verb(verb, self._verbs.result(), *args, **kwargs)
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def _run(self) -> None:
        try:
            run_in_temp_folder(self._run_in_temp_folder)
        except BaseException as error:  # noqa: BLE001 the caller's thread raises it
            self._failure = error
            if not self._verbs.done():
                self._verbs.set_exception(error)

    def _run_in_temp_folder(self) -> int:
        check_started_once()
        trainer = self.config.trainer
        with lock_folder(self.folder), clean_up_processes(), open_console(trainer) as console:
            with HEARTBEAT.record_call("prepare"):
                prepared = prepare_loop(self.config, self._has_engines, console)
            console.status_folder = self.folder
            specs, timer = prepared.make_specs(), Timer()
            console.start(trainer.total_training_steps or 0, prepared.start.step)
            probe = make_probe(prepared.renderer, PROBE_TEXT, self.config.data.max_length - 1)
            session = open_policy_session(prepared, specs, timer, probe, pauses_requests=True)

            async def serve() -> None:
                """Start the workers, run verbs until the caller closes the trainer, and end the workers."""
                self._loop = asyncio.get_running_loop()
                async with session as policy_session:
                    verbs = Verbs(policy_session, prepared.plan, prepared.renderer, prepared.reader)
                    await verbs.begin(prepared.start)
                    self._environment = dict(os.environ)
                    console.end_live_view()
                    console.shows_status_lines = False  # the caller's loop has its own output
                    self._verbs.set_result(verbs)
                    while not self._stop.is_set():
                        if not HEARTBEAT.list_active_calls():
                            HEARTBEAT.tick()  # the time between two verbs is no stall
                        await asyncio.to_thread(self._stop.wait, IDLE_SECONDS)
                    console.shows_status_lines = True
                    if self._loop_error is None:
                        await verbs.finish()

            with record_in_history(self.folder):
                asyncio.run(serve())
                if self._loop_error:  # for the history; raising the caller's error here would change its traceback
                    is_interrupt = isinstance(self._loop_error, KeyboardInterrupt)
                    raise KeyboardInterrupt if is_interrupt else RuntimeError(str(self._loop_error))
        return 0


class AsyncVerbs:
    """The verbs of a trainer as awaitables."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer

    def __getattr__(self, name: str) -> Callable[..., asyncio.Future[Any]]:
        verb = getattr(Verbs, name)
        return wraps(verb)(lambda *a, **k: asyncio.wrap_future(self._trainer._submit(verb, *a, **k)))
