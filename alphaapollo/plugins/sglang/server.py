"""Server process of an SGLang engine: `main` runs in SGLang's environment (engines/remote.py).

    owner --- this process: SGLang's tokenizer manager --- scheduler with the model, forked from this process

The scheduler is forked after all imports, which take half a minute in a process of their own. If it dies, this process
ends, and the owner's calls fail.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import importlib
import itertools
import multiprocessing
import os
import pickle
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from alphaapollo.engines.process import make_start_error, set_up_engine_process
from alphaapollo.engines.protocol import Engine, MemoryPart
from alphaapollo.engines.remote import receive_spec, serve
from alphaapollo.engines.types import EngineError, EngineSpec, HttpAnswer, HttpSampling
from alphaapollo.engines.weight_sync.transport import UpdateInfo, WeightReceipt
from alphaapollo.plugins.sglang import cpu_kernels
from alphaapollo.plugins.sglang.server_arguments import (
    BUCKET_LOADER,
    USES_CPU,
    WEIGHT_LOADER,
    build_completion,
    build_http_answer,
    build_server_arguments,
    make_http_params,
    make_sampling_params,
)
from alphaapollo.processes.allocator import keep_freed_memory
from alphaapollo.processes.host import reserve_stdin_and_stdout
from alphaapollo.processes.watchdog import remove_paths
from alphaapollo.types import Adapter, Completion, ImageInput, JsonObject, Sampling
from alphaapollo.utils.imports import pause_gc

OPERATORS: list[object] = []  # libraries of torch operators, which exist as long as they are referenced


class SglangEngine(Engine):
    """Engine with one SGLang replica, in the server process."""

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        self._engine: Any = None
        self._adapter: str | None = None  # name of the LoRA adapter used by all requests, with transport=adapter
        self._io: Any = None  # SGLang's module of requests to the tokenizer manager
        self._numbers = itertools.count()
        self._finished_tokens = 0

    async def start(self) -> None:
        """Start the scheduler, and load the model. Blocks the event loop: SGLang needs the main thread."""
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.entrypoints import engine as module
        from sglang.srt.managers import io_struct
        from sglang.srt.managers.load_snapshot import shm_path_for

        from alphaapollo.plugins.sglang.patches import patch_sglang

        os.umask(os.umask(0o077) | 0o077)  # of the sockets over which its processes send pickles
        spec, name = self.spec, f"SGLang cannot serve {self.spec.model_path}"
        patches = spec.find_excluded_ids() if spec.tokenizer_path else (), spec.transport == "adapter", spec.device
        patch_sglang(*patches)
        # A forked process cannot use CUDA.
        module.mp = make_forking_multiprocessing() if spec.device == "cpu" else make_spawning_multiprocessing(patches)
        try:
            model = ModelConfig(spec.model_path, trust_remote_code=spec.trust_remote_code, dtype=spec.dtype)
            elements = model.num_hidden_layers * model.get_num_kv_heads(1) * (model.head_dim + model.v_head_dim)
            arguments = build_server_arguments(spec, elements * {"float32": 4, "bfloat16": 2}[spec.dtype])
            server = module.ServerArgs(**arguments, custom_sigquit_handler=ignore_signal)
        except (ValueError, OSError, TypeError, AttributeError) as error:  # TypeError: an unknown argument
            raise ValueError(f"{name}: {error}") from error

        class EngineWithoutDetokenizer(module.Engine):
            """Answers are token ids. SGLang would start the process in any case."""

            @classmethod
            def _launch_detokenizer_subprocesses(cls, *arguments: Any, **options: Any) -> Any:
                if server.skip_tokenizer_init:
                    return [], []
                return super()._launch_detokenizer_subprocesses(*arguments, **options)

        try:
            self._engine = EngineWithoutDetokenizer(server_args=server)
        except (RuntimeError, ValueError, OSError) as error:
            is_killed = bool(re.search(r"exit code: -\d+", str(error)))
            raise make_start_error(spec, f"SGLang's error: {error}", is_killed) from error
        remove_paths([Path(shm_path_for(self._engine.port_args.instance_id))])  # SGLang never removes it
        self._io = io_struct
        self._manager.signal_handler_class = ExitAtSignals
        self._manager.auto_create_handle_loop()

    @property
    def _manager(self) -> Any:
        """SGLang's tokenizer manager, which sends requests to the scheduler."""
        return self._engine.tokenizer_manager

    async def generate(
        self, token_ids: list[int], sampling: Sampling, request_id: str, images: Sequence[ImageInput] = ()
    ) -> Completion:
        self.check_has_weights()
        return build_completion(await self._run_request(token_ids, make_sampling_params(sampling), request_id))

    async def answer_http(self, token_ids: list[int], request: HttpSampling, request_id: str) -> HttpAnswer:
        self.check_has_weights()
        params = make_http_params(request)
        options = {"top_logprobs_num": request.num_top}
        options |= {"logprob_start_len": 0} if request.scores_prompt else {}
        return build_http_answer(await self._run_request(token_ids, params, request_id, **options))

    async def log_probs(self, token_ids: list[int], images: Sequence[ImageInput] = ()) -> list[float]:
        params: dict[str, object] = {"max_new_tokens": 0, "temperature": 1.0}
        answer = await self._run_request(token_ids, params, "log_probs", logprob_start_len=0)
        return [logprob for logprob, _, _ in answer["meta_info"]["input_token_logprobs"][1:]]

    async def _run_request(
        self, token_ids: list[int], params: dict[str, object], request_id: str, **options: Any
    ) -> dict[str, Any]:
        request = self._io.GenerateReqInput(
            rid=f"{request_id}-{next(self._numbers)}",  # two requests may have one id
            input_ids=token_ids,
            sampling_params=params,
            return_logprob=True,
            lora_path=self._adapter,
            **options,
        )
        async with aclosing(self._manager.generate_request(request)) as answers:  # SGLang aborts a closed request
            answer: dict[str, Any] = await anext(answers)
        finish = answer["meta_info"]["finish_reason"]
        if finish["type"] not in ("stop", "length"):
            raise EngineError(f"{self.name} aborted a request: {finish}. See its log {self.spec.log_path}.")
        self._finished_tokens += len(answer["output_ids"])
        return answer

    def has_running_requests(self) -> bool:
        return bool(self._manager.rid_to_state)

    # In-flight weight updates: a pause returns running requests to the queue with their tokens.

    async def hold_requests(self) -> None:
        await self._manager.pause_generation(self._io.PauseGenerationReqInput(mode="retract"))

    async def continue_requests(self) -> None:
        await self._manager.continue_generation(self._io.ContinueGenerationReqInput())

    async def load_folder(self, folder: str) -> None:
        await self._run_weight_loader(WEIGHT_LOADER, folder)

    async def _run_weight_loader(self, loader: str, argument: str) -> None:
        """Run a function of patches.py in the scheduler of each rank."""
        import torch
        from sglang.srt.utils import MultiprocessingSerializer

        tensors = MultiprocessingSerializer.serialize([(argument, torch.zeros(1))])
        num_ranks = self.spec.rollout.tensor_model_parallel_size
        update = self._io.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[tensors] * num_ranks, load_format=loader, flush_cache=False
        )
        self._check(await self._manager.update_weights_from_tensor(update))

    async def use_adapter(self, adapter: Adapter) -> None:
        last, self._adapter = self._adapter, f"adapter_{next(self._numbers)}"
        if last is not None:
            unload = self._io.UnloadLoRAAdapterReqInput(lora_name=last)
            result = await self._manager.unload_lora_adapter(unload)
            self._check((result.success, result.error_message))
        load = self._io.LoadLoRAAdapterReqInput(lora_name=self._adapter, lora_path=adapter.folder)
        result = await self._manager.load_lora_adapter(load)
        self._check((result.success, result.error_message))

    async def init_weight_transfer_engine(self, init_info: JsonObject) -> None:
        """Join a process group with the trainer."""
        offset = init_info["rank_offset"] + self.spec.index * self.spec.rollout.tensor_model_parallel_size
        join = self._io.InitWeightsUpdateGroupReqInput(**init_info | {"rank_offset": offset})
        self._check(await self._manager.init_weights_update_group(join))

    async def begin_loading(self) -> None:
        self._check(await self._manager.begin_weight_update(self._io.BeginWeightUpdateReqInput(), None))

    async def load_bucket(self, update_info: UpdateInfo) -> None:
        assert isinstance(update_info, dict)
        if "handles" in update_info:
            await self._run_weight_loader(BUCKET_LOADER, base64.b64encode(pickle.dumps(update_info)).decode())
            return
        update = self._io.UpdateWeightsFromDistributedReqInput(
            **update_info, load_format="flattened_bucket", flush_cache=False
        )
        self._check(await self._manager.update_weights_from_distributed(update))

    async def end_loading(self) -> None:
        self._check(await self._manager.end_weight_update(self._io.EndWeightUpdateReqInput(), None))

    # GPU memory shared with the trainer. Paused requests are in the queue, without a KV cache.

    async def free_memory(self, parts: frozenset[MemoryPart]) -> None:
        if not self.is_paused and not self.freed_parts:
            await self._manager.pause_generation(self._io.PauseGenerationReqInput(mode="retract"))
        await self._manager.release_memory_occupation(self._io.ReleaseMemoryOccupationReqInput(tags=sorted(parts)))

    async def allocate_memory(self, part: MemoryPart) -> None:
        await self._manager.resume_memory_occupation(self._io.ResumeMemoryOccupationReqInput(tags=[part]))
        if self.freed_parts == {part} and not self.is_paused:
            await self._manager.continue_generation(self._io.ContinueGenerationReqInput())

    async def apply_weights(self, version: int) -> WeightReceipt:
        from alphaapollo.engines.weight_sync.digest import format_digest
        from alphaapollo.plugins.sglang.patches import DIGEST

        success, message, ranks, _ = await self._manager.check_weights(self._io.CheckWeightsReqInput(action=DIGEST))
        self._check((success, message))
        if not (await self._manager.flush_cache()).success:
            raise EngineError(f"{self.name} did not reset its prefix cache. See its log {self.spec.log_path}.")
        new_version = self._io.UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        await self._manager.update_weight_version(new_version)
        parts = [int(rank["checksums"][DIGEST], 16) for rank in ranks]  # of the tensor-parallel ranks
        return WeightReceipt(version, format_digest(sum(parts)))

    def _check(self, result: tuple[Any, ...]) -> None:
        """Raise EngineError if a result of SGLang, (success, message), is a failure."""
        success, message = result[:2]
        if not success:
            raise EngineError(f"{self.name} failed. See its log {self.spec.log_path}. SGLang's error: {message}")

    def get_progress_counter(self) -> int:
        """Return the number of sampled tokens; SGLang reports those of a running request about every 50 tokens."""
        if self._engine is None:
            return 0
        return self._finished_tokens + sum(len(state.output_ids) for state in self._manager.rid_to_state.values())

    async def close(self) -> None:
        """End SGLang's processes."""
        if self._engine is not None:
            self._engine.shutdown()


def make_forking_multiprocessing() -> Any:
    """Return the part of `multiprocessing` that SGLang's engine uses, with forked processes instead of spawned ones."""
    context = multiprocessing.get_context("fork")
    return SimpleNamespace(Process=context.Process, Pipe=context.Pipe, set_start_method=lambda *_, **__: None)


def make_spawning_multiprocessing(patches: tuple[Any, ...]) -> Any:
    """Return the part of `multiprocessing` that SGLang's engine uses. Its processes are patched before they run.

    patches: arguments of patch_sglang.
    """
    from alphaapollo.plugins.sglang.patches import run_patched

    context = multiprocessing.get_context("spawn")

    def make_process(target: Any, args: tuple[Any, ...] = (), **options: Any) -> Any:
        return context.Process(target=run_patched, args=(patches, target, *args), **options)

    return SimpleNamespace(Process=make_process, Pipe=context.Pipe, set_start_method=lambda *_, **__: None)


def ignore_signal(*_: object) -> None:
    """Handle SIGQUIT of a scheduler that does not start: SGLang would kill this process before it has an error."""


class ExitAtSignals:
    """Handlers of SGLang's signals: SIGQUIT means that the scheduler died, so this process ends, too."""

    def __init__(self, manager: Any):
        pass

    def sigterm_handler(self, *_: object) -> None:
        os._exit(1)

    def running_phase_sigquit_handler(self, *_: object) -> None:
        os._exit(1)


def main() -> None:
    """Import SGLang, and serve the engine to the owner."""
    pipes = reserve_stdin_and_stdout()
    set_up_engine_process()
    keep_freed_memory()
    signal.signal(signal.SIGQUIT, ignore_signal)
    if USES_CPU in os.environ:
        sys.modules["sgl_kernel"] = cpu_kernels  # the package has no build for a CPU
        OPERATORS.append(cpu_kernels.register_operators())
    with pause_gc():
        importlib.import_module("sglang.srt.entrypoints.engine")
    gc.freeze()  # a collection over these objects takes half a second in the scheduler, and would copy their memory
    asyncio.run(serve(SglangEngine(receive_spec()), *pipes))
    os._exit(0)
