"""vLLM as an engine: AsyncLLM here, its core (scheduler and model) in a process of its own.

generate  token ids -> [core] -> token ids, log-probs        receive_weights  folder -> [core] load
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
from collections.abc import Coroutine
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from alphaapollo.engines.protocol import EngineDied, EngineError
from alphaapollo.engines.spec import EngineSpec
from alphaapollo.engines.vllm.interpreted import interpret_triton
from alphaapollo.engines.vllm.process import EngineContext, log_to_file, process_environment, start_fork_server
from alphaapollo.engines.vllm.settings import engine_arguments, environment, sockets_folder
from alphaapollo.types import Completion, Sampling, StopReason, WeightReceipt

if TYPE_CHECKING:
    import numpy as np
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")


class VllmEngine:
    """One vLLM replica. Its processes die with this one; everything they print goes to `spec.log_path`."""

    holds_weights = True

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self.version = 0
        self._engine: AsyncLLM | None = None
        self._core_death: asyncio.Future[None] | None = None
        self._context: EngineContext | None = None  # how the core is started, on a CPU
        self._prepared = False
        self._asleep: set[str] = set()  # what gave up its memory: weights, kv_cache
        self._stale = False  # the weights were given up and not received again
        self._paused = False
        self._keeps_cache = False  # while it is paused, of what runs
        self._adapter: LoRARequest | None = None  # that all requests run with, where adapters are served

    # start and end

    async def prepare(self) -> None:
        """Settings, log and imports: what needs no GPU."""
        if self._prepared:
            return
        self._prepared = True
        Path(self.spec.log_path).parent.mkdir(parents=True, exist_ok=True)
        if self.spec.cleanup:
            Path(sockets_folder(self.spec)).mkdir(parents=True, exist_ok=True)
        os.environ.update(environment(self.spec) | process_environment(self.spec.log_path, self.spec.cleanup))
        log_to_file("vllm", self.spec.log_path)
        interpret_triton()
        if self.spec.device == "cpu":
            self._context = start_fork_server()
        await asyncio.to_thread(importlib.import_module, "vllm.v1.engine.async_llm")

    async def start(self) -> None:
        """Raises ValueError for a model that vLLM cannot serve, EngineError when its core does not start, EngineDied
        when a signal ended that."""
        await self.prepare()
        await asyncio.to_thread(self._build)
        self._watch_core()
        await self._answered(self._llm.update_weight_version(str(self.version)))
        if self.spec.device == "cpu" and self.spec.rollout.tensor_model_parallel_size > 1:
            await self._on_workers("alphaapollo_unlink_shared_memory")

    def _build(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.model_executor.models import registry
        from vllm.v1.engine import utils
        from vllm.v1.engine.async_llm import AsyncLLM

        if self._context is not None:  # on a CPU
            utils.get_mp_context = lambda: self._context
            registry._run_in_subprocess = lambda inspect: inspect()  # no CUDA to protect: import the model here
        try:
            config = AsyncEngineArgs(**engine_arguments(self.spec)).create_engine_config()
        except (ValueError, OSError) as error:
            raise ValueError(f"vLLM cannot serve {self.spec.model_path}: {error}") from error
        try:
            self._engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        except (RuntimeError, ValueError, TimeoutError, OSError) as error:
            kind = EngineDied if core_was_killed(str(error)) else EngineError
            raise kind(f"{self.spec.name} did not start: {error} Its log: {self.spec.log_path}") from error

    async def close(self) -> None:
        """Ends the core and its workers; a second call does nothing."""
        for process in self._cores():
            asyncio.get_running_loop().remove_reader(process.sentinel)
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)

    def pids(self) -> list[int]:
        """The core, and with tensor parallelism its workers."""
        cores = [process.pid for process in self._cores() if process.pid is not None]
        return cores + [child for pid in cores for child in children_of(pid)]

    def progress(self) -> int:
        """Tokens of what runs: the core tells each as it is sampled, also where whole answers are asked for."""
        if self._engine is None:
            return 0
        running = list(self._engine.output_processor.request_states.values())
        return sum(len(state.detokenizer.output_token_ids) for state in running if state.detokenizer)

    def _cores(self) -> list[BaseProcess]:
        return [] if self._engine is None else list(self._engine.engine_core.resources.engine_manager.processes)

    @property
    def _llm(self) -> AsyncLLM:
        if self._engine is None:
            raise EngineError(f"{self.spec.name} is not running")
        if self._core_death is not None and self._core_death.done():
            raise self._dead()
        return self._engine

    # a dead core is an error, never a wait

    def _watch_core(self) -> None:
        loop = asyncio.get_running_loop()
        self._core_death = loop.create_future()
        for process in self._cores():
            loop.add_reader(process.sentinel, self._core_died, process.sentinel)

    def _core_died(self, sentinel: int) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        asyncio.get_running_loop().remove_reader(sentinel)
        assert self._core_death is not None and self._engine is not None
        if not self._core_death.done():
            self._core_death.set_result(None)
            self._engine.output_processor.propagate_error(EngineDeadError())

    def _dead(self) -> EngineDied:
        return EngineDied(f"{self.spec.name}: its core process died. Its log says why: {self.spec.log_path}")

    async def _answered(self, call: Coroutine[Any, Any, T]) -> T:
        """The answer of the core to `call`, or EngineError when it fails or dies over it."""
        assert self._core_death is not None
        task = asyncio.ensure_future(call)
        await asyncio.wait((task, self._core_death), return_when=asyncio.FIRST_COMPLETED)
        if self._core_death.done():
            task.cancel()
            raise self._dead()
        if error := task.exception():  # vLLM gives the core's words alone, without their kind
            raise EngineError(f"{self.spec.name}: {error} Its log: {self.spec.log_path}") from error
        return task.result()

    async def _on_workers(self, method: str, *arguments: Any) -> list[Any]:
        return await self._answered(self._llm.collective_rpc(method, args=arguments))

    # tokens

    async def generate(self, token_ids: list[int], sampling: Sampling, request_id: str) -> Completion:
        if self._stale and not self._paused:
            raise EngineError(f"{self.spec.name} gave its weights up when it went to sleep; publish weights first")
        self.spec.check_fits(len(token_ids), sampling.max_tokens)
        output = await self._request(token_ids, _sampling_params(sampling), request_id)
        answer = output.outputs[0]
        *earlier, (version, _) = [(int(span.version), span.end - span.start) for span in answer.weight_versions]
        return Completion(
            token_ids=list(answer.token_ids),
            logprobs=[entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)],
            stop_reason=StopReason(answer.finish_reason),
            weight_version=version,
            num_cached_tokens=output.num_cached_tokens or 0,
            earlier_versions=tuple(earlier),
            routed_experts=self._experts(answer.routed_experts, len(token_ids) + len(answer.token_ids) - 1),
        )

    def _experts(self, returned: np.ndarray | None, num_tokens: int) -> np.ndarray | None:
        """Those of every token that was computed, where they are asked for."""
        if not self.spec.rollout.router_replay:
            return None
        if returned is None or len(returned) != num_tokens:
            found = "none" if returned is None else str(len(returned))
            raise EngineError(f"{self.spec.name} returned the experts of {found} of {num_tokens} tokens")
        return returned

    async def log_probs(self, token_ids: list[int]) -> list[float]:
        from vllm.sampling_params import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        output = await self._request(token_ids, params, "log_probs")
        scored = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return [entry[token].logprob for token, entry in scored]

    async def _request(self, token_ids: list[int], params: SamplingParams, request_id: str) -> Any:
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        params.output_kind = RequestOutputKind.FINAL_ONLY
        params.skip_clone = True
        try:
            # The salt keeps what was cached under other weights from what is asked from now on.
            prompt = tokens_input(token_ids, cache_salt=str(self.version))
            answers = self._llm.generate(prompt, params, request_id, lora_request=self._adapter)
            outputs = [output async for output in answers]
        except EngineDeadError as error:
            raise self._dead() from error
        return outputs[-1]

    # weights

    async def receive_weights(self, folder: str) -> None:
        if self.spec.transport == "adapter":
            await self._receive_adapter(folder)
            return
        await self.start_weight_update()
        await self.update_weights({"folder": folder})
        await self.finish_weight_update()

    async def confirm_weights(self, version: int) -> WeightReceipt:
        from alphaapollo.weight_sync.digest import format_digest  # torch: not before the fork server is on its way

        adapter = self.spec.transport == "adapter"
        parts = await self._on_workers("alphaapollo_confirm_adapter" if adapter else "alphaapollo_confirm")
        if not self._keeps_cache and not await self._answered(self._llm.reset_prefix_cache()):
            raise EngineError(f"{self.spec.name} received weights while requests were running")
        await self._answered(self._llm.update_weight_version(str(version)))
        self._stale = False
        self.version = version
        return WeightReceipt(version, format_digest(sum(parts)))

    async def _receive_adapter(self, folder: str) -> None:
        """In the place of the last one; its number is one that no cache has seen."""
        from vllm.lora.request import LoRARequest

        if self._llm.get_num_unfinished_requests():  # each keeps the adapter that it began with
            raise EngineError(f"{self.spec.name} was to receive adapters while requests were running")
        number = 1
        if self._adapter is not None:
            number += self._adapter.lora_int_id
            await self._answered(self._llm.remove_lora(self._adapter.lora_int_id))
        adapter = LoRARequest(f"adapter_{number}", number, folder)
        if not await self._answered(self._llm.add_lora(adapter)):
            raise EngineError(f"{self.spec.name} did not take the adapter in {folder}. Its log: {self.spec.log_path}")
        self._adapter = adapter

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """This and the next three: the phases of vLLM's weight transfer. CUDA IPC and NCCL are driven by the trainer's
        side of them; shared memory by receive_weights."""
        if "rank_offset" in init_info:  # of the first engine; the others come after it
            ranks_before = self.spec.index * self.spec.rollout.tensor_model_parallel_size
            init_info = init_info | {"rank_offset": init_info["rank_offset"] + ranks_before}
        await self._on_workers("init_weight_transfer_engine", init_info)

    async def start_weight_update(self) -> None:
        if self._llm.get_num_unfinished_requests() and not self._paused:  # they would compute with half of each
            raise EngineError(f"{self.spec.name} was to receive weights while requests were running")
        assert "weights" not in self._asleep, "wake_weights comes first: they are written to memory that is there"
        await self._on_workers("start_weight_update")

    async def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        await self._on_workers("update_weights", update_info)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await self._on_workers("finish_weight_update")

    # weights that change in flight: vLLM keeps what runs in its queue, with its tokens

    async def pause(self, keep_cache: bool = False) -> None:
        if not self._paused:
            await self._answered(self._llm.pause_generation(mode="keep", clear_cache=not keep_cache))
            self._paused, self._keeps_cache = True, keep_cache

    async def resume(self) -> None:
        if self._paused:
            await self._answered(self._llm.resume_generation())
            self._paused = self._keeps_cache = False

    # GPU memory, handed over between engine and trainer; what runs is kept, and its cache computed anew

    async def sleep(self) -> None:
        if self.spec.shares_gpu and "weights" not in self._asleep:
            keeps_weights = self.spec.transport == "adapter"  # in host memory: adapters alone come anew
            await self._answered(self._llm.sleep(level=1 if keeps_weights else 2, mode="keep"))
            self._asleep, self._stale = {"weights", "kv_cache"}, True

    async def wake_weights(self) -> None:
        await self._wake("weights")

    async def release_cache(self) -> None:
        if self.spec.shares_gpu and not self._asleep:
            await self._answered(self._llm.pause_generation(mode="keep"))
            await self._answered(self._llm.release_kv_cache_memory())
            self._asleep = {"kv_cache"}

    async def wake_cache(self) -> None:
        assert "weights" not in self._asleep, "wake_weights comes first"
        await self._wake("kv_cache")

    async def _wake(self, part: str) -> None:
        if part in self._asleep:
            await self._answered(self._llm.wake_up([part]))
            self._asleep.remove(part)


def _sampling_params(sampling: Sampling) -> SamplingParams:
    from vllm.sampling_params import SamplingParams

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop_token_ids=list(sampling.stop_token_ids),
        logprobs=0,
        detokenize=False,
    )


def children_of(pid: int) -> list[int]:
    """The children of a process; none of one that is gone."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def core_was_killed(message: str) -> bool:
    """What vLLM says of a start that failed: {'EngineCore': -9}, the exit code of a process that a signal ended."""
    return re.search(r"core proc\(s\): \{.*: -\d+", message) is not None
