"""One started stack for runs whose subject is not their start: a warm process that runs commands one after the other,
each complete and with its own run folder. Its vLLM engines keep running for later commands.

pytest --- stack: main_ppo.main(argv), main_generation.main(argv), ... --- engine core
"""

from __future__ import annotations

import asyncio
import atexit
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.loop.conftest import CANARY, DEADLINE, ROOT, FinishedRun, Runner
from tests.loop.warm import CONTEXT, KEPT, find_warm_process, prepare_forked_process, run_command

MAX_TOKENS = 512  # prompt and response of a kept engine, unless a command needs more
MAX_REQUESTS = 64  # that run at once on a kept engine


def serve(connection: Connection) -> None:
    """Run commands that arrive as the arguments of `run_command`, and answer with their exit codes."""
    prepare_forked_process()
    from alphaapollo.controller import launcher
    from alphaapollo.engines import factory
    from alphaapollo.launch import command
    from alphaapollo.rollout import worker

    engines = KeptEngines(factory.make_engine)
    factory.make_engine = worker.make_engine = engines.find_or_make
    command.run_coroutine = asyncio.Runner().run  # engines need the same event loop
    launcher.start_reaper = lambda run_id, folders: None  # one per command would stay as long as this process
    while True:
        try:
            engines.module, *arguments = connection.recv()
            code = run_command(engines.module, *arguments)
        except EOFError:  # the tests have ended
            return
        except BaseException:  # noqa: BLE001  # a program would end here
            traceback.print_exc()
            code = 1
        connection.send((code, engines.list_pids()))


class KeptEngines:
    """vLLM engines by their settings. Each starts once and is not stopped."""

    def __init__(self, make_engine: Callable[[Any], Any]) -> None:
        self._make_engine = make_engine
        self._engines: dict[tuple[str, str], Any] = {}
        self.module = ""  # of the command. Each has engines of its own, because only main_ppo changes their weights

    def find_or_make(self, spec: Any) -> Any:
        from alphaapollo.engines.vllm.engine import VllmEngine

        class KeptEngine(VllmEngine):
            async def start(self) -> None:
                if self._engine is None:
                    await super().start()
                    self.variables = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
                os.environ.update(self.variables)  # vLLM reads them also later, and each command resets them

            async def close(self) -> None:
                if self._engine is not None:
                    await self._engine.abort([*self._engine.output_processor.request_states])
                    await self.resume()

        if spec.rollout.name != "vllm":
            return self._make_engine(spec)
        rollout = spec.rollout.model_copy(update={"max_num_seqs": MAX_REQUESTS, "stop": None})
        sizes = {"max_model_len": max(MAX_TOKENS, spec.max_model_len), "chat_tokenizer": spec.tokenizer_path}
        spec = replace(spec, rollout=rollout, **sizes)
        key = self.module, repr(replace(spec, log_path="", cleanup_folders=()))
        return self._engines.setdefault(key, KeptEngine(spec))

    def list_pids(self) -> list[int]:
        return [pid for engine in self._engines.values() for pid in engine.list_pids()]


class Stack:
    """The process of `serve`. It starts with the first command, and again after one that hung, or after the end of the
    warm process, from which it forks engines."""

    def __init__(self) -> None:
        self._process: Any = None
        self._warm_process: int | None = None
        atexit.register(self.close)

    def run(
        self, module: str, words: Sequence[object], output: Path, environment: dict[str, str], folder: Path = ROOT
    ) -> int:
        if find_warm_process() != self._warm_process:
            self.close()
        if self._process is None:
            self._connection, there = CONTEXT.Pipe()
            self._process = CONTEXT.Process(target=serve, args=(there,))
            self._process.start()
            there.close()
            KEPT.add(self._process.pid)
            self._warm_process = find_warm_process()
        self._connection.send((module, [str(word) for word in words], output, environment, folder))
        try:
            code, pids = self._connection.recv() if self._connection.poll(DEADLINE) else (None, ())
        except EOFError:
            code, pids = None, ()
        if code is None:
            self.close()
            pytest.fail(
                f"the stack died, or the command is not done within {DEADLINE} s:\n{output.read_text()[-4000:]}"
            )
        KEPT.update(pids)
        return code

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


STACK = Stack()


class OnStack:
    """Mixin for a Runner whose commands run on the stack, with `trainer.controller=local`."""

    def start(self: Any, *overrides: str, name: str = "run", warm: bool = True) -> FinishedRun:
        """Run the command to its end."""
        return self.call(self.module, self.words(("trainer.controller=local", *overrides), name), name)

    def finish(self, done: FinishedRun, name: str = "run") -> FinishedRun:
        return done

    def call(self: Any, module: str, words: Sequence[object], name: str = "run") -> FinishedRun:
        output = self.out / "output.txt"
        code = STACK.run(module, words, output, os.environ | CANARY)
        return FinishedRun(code, output.read_text(), self.out / "test" / name)


class StackRunner(OnStack, Runner):
    """Runs main_ppo on the stack, with small sizes."""


@dataclass(frozen=True)
class Case:
    """Row of a table of runs: the overrides of the command and a check of the finished run. FOLDER stands for the
    test's folder, in which `prepare` makes files. core: the run is a core test."""

    check: Callable[[FinishedRun], None]
    overrides: tuple[str, ...]
    prepare: Callable[[Path], object] | None = None
    core: bool = False

    def run(self, runner: Runner) -> None:
        if self.prepare:
            self.prepare(runner.out)
        self.check(runner.run(*(word.replace("FOLDER", str(runner.out)) for word in self.overrides)))


def parametrize(cases: Mapping[str, Case]) -> pytest.MarkDecorator:
    rows = [pytest.param(case, id=name, marks=[pytest.mark.core] * case.core) for name, case in cases.items()]
    return pytest.mark.parametrize("case", rows)
