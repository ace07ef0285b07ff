"""vLLM engine: AsyncLLM in this process, the engine core (scheduler and model) in a separate process."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from alphaapollo.engines.process import (
    build_process_environment,
    log_library_to_file,
    make_death_error,
    make_start_error,
)
from alphaapollo.engines.protocol import WEIGHTS, Engine, MemoryPart
from alphaapollo.engines.types import EngineDied, EngineError, EngineSpec, HttpAnswer, HttpApiSettings, HttpSampling
from alphaapollo.engines.vllm import settings
from alphaapollo.engines.vllm.process import EngineContext, start_engine_fork_server
from alphaapollo.engines.vllm.settings import (
    build_completion,
    build_cpu_environment,
    build_engine_arguments,
    build_http_answer,
    build_vllm_environment,
    get_sockets_folder,
    make_lora_request,
    make_sampling_params,
    raise_value_errors,
    read_flat_logprobs,
    register_triton_interpreter,
)
from alphaapollo.engines.weight_sync.transport import UpdateInfo, WeightReceipt
from alphaapollo.engines.weight_sync.vllm_import import import_vllm
from alphaapollo.processes.watchdog import list_child_pids
from alphaapollo.types import BASE_MODEL, Adapter, Completion, ImageInput, JsonObject, Sampling

if TYPE_CHECKING:
    from vllm.inputs.engine import MultiModalInput, TokensInput
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from alphaapollo.engines.vllm.images import ImagePromptBuilder

T = TypeVar("T")
NO_ADAPTER = Sampling(1)  # for requests that name neither an adapter nor an owner of cached prefixes
LOG_SECONDS = 10.0  # time in which a failed core may write its log and exit


class VllmEngine(Engine):
    """Engine with one vLLM replica. vLLM's processes exit with this process and write to `spec.log_path`."""

    keeps_adapters = reads_quantized = returns_kept_tokens = True
    without_mixed_windows = settings.WITHOUT_MIXED_WINDOWS
    weight_sender = "alphaapollo.engines.weight_sync.vllm_transfer:VllmTransferSender"
    argument_files, reserved_arguments = settings.ARGUMENT_FILES, settings.RESERVED_ARGUMENTS

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        self.version = 0
        self._engine: AsyncLLM | None = None
        self._image_prompts: ImagePromptBuilder | None = None  # None: a text model
        self._core_death: asyncio.Future[None] | None = None
        self._context: EngineContext | None = None  # multiprocessing context that starts the core on a CPU
        self._prepared = False
        self._adapter = BASE_MODEL  # LoRA adapter of requests that name none
        self._adapter_digest = ""
        self._loads: dict[int, int] = {}  # adapter version -> number of its last load; the latest 1024 are kept
        self._load_numbers = count(1)

    # Start and shutdown.

    @property
    def _environment(self) -> dict[str, str]:
        spec = self.spec
        return build_vllm_environment(spec) | build_process_environment(spec.log_path, spec.cleanup_folders)

    def start_other_imports(self) -> None:
        Path(self.spec.log_path).parent.mkdir(parents=True, exist_ok=True)
        if self.spec.device == "cpu" and self._context is None:
            before = dict(os.environ)
            os.environ.update(self._environment)
            self._context = start_engine_fork_server(build_cpu_environment(self.spec.rollout, self.spec.model_path))
            os.environ.clear()
            os.environ.update(before)

    async def preload_libraries(self) -> None:
        if self._prepared:
            return
        self._prepared = True
        if self.spec.cleanup_folders:
            sockets = Path(get_sockets_folder(self.spec))
            sockets.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # not for other users of the machine
            sockets.mkdir(exist_ok=True)
        self.start_other_imports()
        os.environ.update(self._environment)
        log_library_to_file("vllm", self.spec.log_path)
        register_triton_interpreter()
        await asyncio.to_thread(import_vllm)
        await asyncio.to_thread(importlib.import_module, "vllm.v1.engine.async_llm")

    async def start(self) -> None:
        """Start the engine core and load the model. Raises like Engine.start, or EngineDied if a signal kills it."""
        await self.preload_libraries()
        await asyncio.to_thread(self._start_core)
        self._watch_core()
        await self._await_core(self._running_llm.update_weight_version(str(self.version)))
        if self.spec.device == "cpu" and self.spec.rollout.tensor_model_parallel_size > 1:
            await self._call_workers("alphaapollo_unlink_shared_memory")
        if self.spec.tokenizer_path or self._image_prompts is not None:
            excluded = await asyncio.to_thread(self.spec.find_excluded_ids)
            await self._call_workers("alphaapollo_exclude_from_sampling", excluded)

    def _start_core(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.model_executor.models import registry
        from vllm.v1.engine import utils
        from vllm.v1.engine.async_llm import AsyncLLM

        if self._context is not None:  # on a CPU
            utils.get_mp_context = lambda: self._context
            registry._run_in_subprocess = lambda inspect: inspect()  # without CUDA the model class can be imported here
        try:
            config = AsyncEngineArgs(**build_engine_arguments(self.spec)).create_engine_config()
        except (ValueError, OSError, TypeError) as error:  # TypeError: an unknown argument in engine_kwargs
            raise ValueError(f"vLLM cannot serve {self.spec.model_path}: {error}") from error
        if self.spec.device == "cpu":
            self._check_head_size(config.model_config)
        if is_vision_model := config.model_config.is_multimodal_model:
            config.model_config.skip_tokenizer_init = False  # vLLM's multimodal processors need a tokenizer
        try:
            self._engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        except (RuntimeError, ValueError, TimeoutError, OSError) as error:
            is_killed = bool(re.search(r"core proc\(s\): \{.*: -\d+", str(error)))  # e.g. {'EngineCore': -9}
            raise make_start_error(self.spec, f"vLLM's error: {error}", is_killed) from error
        config.model_config.return_sampling_mask = False  # here, it would refuse requests without top_k
        if is_vision_model:
            from alphaapollo.engines.vllm.images import ImagePromptBuilder  # imports torch

            assert self._engine.renderer.mm_processor is not None
            self._image_prompts = ImagePromptBuilder(self._engine.renderer.mm_processor)

    def _check_head_size(self, model_config: Any) -> None:
        """Raise ValueError if vLLM's attention on a CPU does not support the model's head size."""
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        size, supported = model_config.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
        if not model_config.use_mla and size not in supported:
            raise ValueError(
                f"vLLM cannot serve {self.spec.model_path} on a CPU: its heads have the size {size}, but only "
                f"{', '.join(map(str, supported))} are supported. Use a GPU, another model, or rollout.name=hf."
            )

    async def close(self) -> None:
        for process in self._list_core_processes():
            asyncio.get_running_loop().remove_reader(process.sentinel)
        engine, self._engine = self._engine, None
        if engine is not None:
            try:
                await asyncio.to_thread(engine.shutdown)
            except psutil.NoSuchProcess:  # vLLM kills a core after 5 seconds, and this one had just ended by itself
                engine.engine_core.resources()  # frees what the interrupted shutdown did not

    def list_pids(self) -> list[int]:
        """Return the pids of the engine core and, with tensor parallelism, of its workers."""
        cores = [process.pid for process in self._list_core_processes() if process.pid is not None]
        return cores + [child for pid in cores for child in list_child_pids(pid)]

    def get_progress_counter(self) -> int:
        """Return the number of tokens that running requests have sampled."""
        if self._engine is None:
            return 0
        running = list(self._engine.output_processor.request_states.values())
        return sum(len(state.detokenizer.output_token_ids) for state in running if state.detokenizer)

    def _list_core_processes(self) -> list[BaseProcess]:
        return [] if self._engine is None else list(self._engine.engine_core.resources.engine_manager.processes)

    @property
    def _running_llm(self) -> AsyncLLM:
        if self._engine is None:
            error_class = EngineDied if self.awaits_weights_after_restart else EngineError
            raise error_class(f"{self.name} is not running. Call start() first.")
        if self._core_death is not None and self._core_death.done():
            raise make_death_error(self.spec)
        return self._engine

    # Death of the core: pending calls fail immediately instead of waiting forever.

    @property
    def is_dead(self) -> bool:
        return self._core_death is not None and self._core_death.done()

    def _watch_core(self) -> None:
        loop = asyncio.get_running_loop()
        self._core_death = loop.create_future()
        for process in self._list_core_processes():
            loop.add_reader(process.sentinel, self._handle_core_death, process.sentinel)

    def _handle_core_death(self, sentinel: int) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        asyncio.get_running_loop().remove_reader(sentinel)
        assert self._core_death is not None and self._engine is not None
        if not self._core_death.done():
            self._core_death.set_result(None)
            self._engine.output_processor.propagate_error(EngineDeadError())

    async def _await_core(self, call: Coroutine[object, object, T]) -> T:
        """Await a call to the engine core. Raises EngineError if the call fails, EngineDied if the core dies."""
        assert self._core_death is not None
        task = asyncio.ensure_future(call)
        await asyncio.wait((task, self._core_death), return_when=asyncio.FIRST_COMPLETED)
        if self._core_death.done():
            task.cancel()
            raise make_death_error(self.spec)
        if error := task.exception():  # vLLM keeps the message but not the exception type
            message = f"{self.name} failed. See its log {self.spec.log_path}. vLLM's error: {error}"
            raise EngineError(message) from error
        return task.result()

    async def _call_workers(self, method: str, *arguments: object) -> list[Any]:
        return await self._await_core(self._running_llm.collective_rpc(method, args=arguments))

    # Generation.

    @raise_value_errors
    async def generate(
        self, token_ids: list[int], sampling: Sampling, request_id: str, images: Sequence[ImageInput] = ()
    ) -> Completion:
        self.spec.check_request_length(len(token_ids), sampling.max_tokens)
        params = make_sampling_params(sampling, ignore_eos=True)  # sampling.stop_token_ids has all stop tokens
        output = await self._run_request(token_ids, params, request_id, images, sampling)
        return build_completion(output.outputs[0], output)

    async def log_probs(self, token_ids: list[int], images: Sequence[ImageInput] = ()) -> list[float]:
        from vllm.sampling_params import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        output = await self._run_request(token_ids, params, "log_probs", images, is_probe=True)
        return read_flat_logprobs(output.prompt_logprobs, token_ids[1:])

    @raise_value_errors
    async def answer_http(self, token_ids: list[int], request: HttpSampling, request_id: str) -> HttpAnswer:
        sampling, top = request.sampling, request.num_top
        self.spec.check_request_length(len(token_ids), sampling.max_tokens)
        prompt_option = {"prompt_logprobs": top} if request.scores_prompt else {}
        changes = {"logprobs": top, "flat_logprobs": False, "ignore_eos": True, **prompt_option, **request.penalties}
        params = make_sampling_params(sampling, **changes)
        return build_http_answer(await self._run_request(token_ids, params, request_id, (), sampling))

    async def _run_request(
        self,
        token_ids: list[int],
        params: SamplingParams,
        request_id: str,
        images: Sequence[ImageInput],
        sampling: Sampling = NO_ADAPTER,
        is_probe: bool = False,
    ) -> RequestOutput:
        from vllm.sampling_params import RequestOutputKind

        params.output_kind = RequestOutputKind.FINAL_ONLY
        stream = self._stream_outputs(token_ids, params, request_id, is_probe, images, sampling)
        output = [output async for output in stream][-1]
        assert output.prompt_token_ids == token_ids, "vLLM changed the prompt"
        return output

    async def _stream_outputs(
        self,
        token_ids: list[int],
        params: SamplingParams,
        request_id: str,
        is_probe: bool = False,
        images: Sequence[ImageInput] = (),
        sampling: Sampling = NO_ADAPTER,
    ) -> AsyncIterator[RequestOutput]:
        """Run a request and yield vLLM's outputs. is_probe: the request computes log-probs of its prompt."""
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        if not is_probe:
            self.check_has_weights()
        params.skip_clone = True
        core_death = self._core_death  # a restart replaces it
        try:
            adapter = sampling.adapter or self._adapter
            load_id = f"{adapter.version}.{self._loads.get(adapter.version, 0)}"
            salt = f"{load_id if self.serves_adapter else self.version} {sampling.cache_owner}"  # of cached prefixes
            prompt = self._build_prompt(token_ids, images, salt)
            answers = self._running_llm.generate(prompt, params, request_id, lora_request=make_lora_request(adapter))
            is_delta = params.output_kind == RequestOutputKind.DELTA
            lengths: Counter[int] = Counter()  # tokens of each answer; a delta has only the new tokens
            async for output in answers:
                for answer in output.outputs:
                    lengths[answer.index] = len(answer.token_ids) + (lengths[answer.index] if is_delta else 0)
                    needed = len(token_ids) + lengths[answer.index] - 1
                    settings.check_columns(self.spec, answer, None if is_probe else needed)
                yield output
        except EngineDeadError as error:
            if core_death is not None:  # the log is complete when the process has ended
                await asyncio.wait((core_death,), timeout=LOG_SECONDS)
                if not core_death.done():  # a core that failed and does not exit
                    core_death.set_result(None)
            raise make_death_error(self.spec) from error

    def _build_prompt(
        self, token_ids: list[int], images: Sequence[ImageInput], salt: str
    ) -> TokensInput | MultiModalInput:
        from vllm.inputs.engine import tokens_input

        if not images:
            return tokens_input(token_ids, cache_salt=salt)
        assert self._image_prompts is not None, "images are refused for text models before workers start"
        return self._image_prompts.build_prompt(token_ids, images, salt)

    def build_http_app(self, settings: HttpApiSettings) -> Any:
        from alphaapollo.engines.vllm.http_api import build_http_app  # imports FastAPI

        return build_http_app(self._running_llm, self._stream_outputs, settings)

    # Weight sync.

    async def load_folder(self, folder: str) -> None:
        await self.load_bucket({"folder": folder})

    async def apply_weights(self, version: int) -> WeightReceipt:
        from alphaapollo.engines.weight_sync.digest import format_digest  # imports torch, so not at the top

        if self.serves_adapter:  # caches are separate for each version
            self.version = version
            return WeightReceipt(version, self._adapter_digest)
        parts = await self._call_workers("alphaapollo_compute_weight_digest")
        if not await self._await_core(self._running_llm.reset_prefix_cache()):
            raise EngineError(f"{self.name} did not reset its prefix cache. See its log {self.spec.log_path}.")
        if self._image_prompts is not None:
            await self._await_core(self._running_llm.reset_encoder_cache())  # features computed with old weights
        await self._await_core(self._running_llm.update_weight_version(str(version)))
        self.version = version
        return WeightReceipt(version, format_digest(sum(parts)))

    async def load_adapter(self, adapter: Adapter) -> str:
        from alphaapollo.engines.weight_sync.digest import format_digest

        self._loads = dict([*self._loads.items()][-1024:]) | {adapter.version: next(self._load_numbers)}
        (digest,) = await self._call_workers("alphaapollo_load_adapter", adapter.folder, adapter.version)
        return format_digest(digest)

    async def use_adapter(self, adapter: Adapter) -> None:
        self._adapter_digest = await self.load_adapter(adapter)
        self._adapter = adapter

    async def init_weight_transfer_engine(self, init_info: JsonObject) -> None:
        if "rank_offset" in init_info:  # the offset of the first engine
            ranks_before = self.spec.index * self.spec.rollout.tensor_model_parallel_size
            init_info = init_info | {"rank_offset": init_info["rank_offset"] + ranks_before}
        await self._call_workers("init_weight_transfer_engine", init_info)

    async def begin_loading(self) -> None:
        await self._call_workers("start_weight_update")

    async def load_bucket(self, update_info: UpdateInfo) -> None:
        await self._call_workers("update_weights", update_info)

    async def end_loading(self) -> None:
        await self._call_workers("finish_weight_update")

    # In-flight weight updates: during a pause vLLM keeps running requests and their tokens in its queue.

    def has_running_requests(self) -> bool:
        return bool(self._running_llm.get_num_unfinished_requests())

    async def hold_requests(self) -> None:
        await self._await_core(self._running_llm.pause_generation(mode="keep", clear_cache=True))

    async def continue_requests(self) -> None:
        await self._await_core(self._running_llm.resume_generation())

    # GPU memory shared with the trainer: running requests continue later with a recomputed KV cache.

    async def free_memory(self, parts: frozenset[MemoryPart]) -> None:
        if WEIGHTS in parts:  # level 1 moves the base model to host memory
            await self._await_core(self._running_llm.sleep(level=1 if self.serves_adapter else 2, mode="keep"))
        else:
            await self._await_core(self._running_llm.pause_generation(mode="keep"))
            await self._await_core(self._running_llm.release_kv_cache_memory())

    async def allocate_memory(self, part: MemoryPart) -> None:
        await self._await_core(self._running_llm.wake_up([part]))
        if part == WEIGHTS and self._image_prompts is not None:
            await self._call_workers("alphaapollo_clear_deepstack_features")
