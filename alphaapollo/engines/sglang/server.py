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

from alphaapollo.engines.process import find_last_error, set_up_engine_process
from alphaapollo.engines.protocol import Engine, EngineDied, EngineError, EngineSpec, HttpAnswer, HttpSampling
from alphaapollo.engines.remote import receive_spec, serve
from alphaapollo.engines.sglang import cpu_kernels
from alphaapollo.engines.sglang.settings import (
    BUCKET_LOADER,
    USES_CPU,
    WEIGHT_LOADER,
    build_completion,
    build_http_answer,
    build_server_arguments,
    make_sampling_params,
)
from alphaapollo.processes.allocator import keep_freed_memory
from alphaapollo.processes.watchdog import remove_paths
from alphaapollo.types import Completion, ImageInput, Sampling, WeightReceipt
from alphaapollo.utils.imports import pause_gc
from alphaapollo.weight_sync.transport import UpdateInfo

OPERATORS: list[object] = []  # libraries of torch operators, which exist as long as they are referenced


class SglangEngine(Engine):
    """Engine with one SGLang replica, in the server process."""

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self._engine: Any = None
        self._paused = False
        self._asleep: set[str] = set()  # parts without allocated memory: weights, kv_cache
        self._adapter: str | None = None  # name of the LoRA adapter used by all requests, with transport=adapter
        self._numbers = itertools.count()
        self._finished_tokens = 0

    async def start(self) -> None:
        """Start the scheduler, and load the model. Blocks the event loop: SGLang needs the main thread."""
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.entrypoints import engine as module
        from sglang.srt.managers.load_snapshot import shm_path_for

        from alphaapollo.engines.sglang.patches import patch_sglang

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
            kind = EngineDied if re.search(r"exit code: -\d+", str(error)) else EngineError
            last = find_last_error(spec.log_path)
            raise kind(
                f"{spec.name} did not start{last}. See its log {spec.log_path}. SGLang's error: {error}"
            ) from error
        remove_paths([Path(shm_path_for(self._engine.port_args.instance_id))])  # SGLang never removes it
        self._manager.signal_handler_class = ExitAtSignals
        self._manager.auto_create_handle_loop()

    @property
    def _manager(self) -> Any:
        """SGLang's tokenizer manager, which sends requests to the scheduler."""
        return self._engine.tokenizer_manager

    async def generate(
        self, token_ids: list[int], sampling: Sampling, request_id: str, images: Sequence[ImageInput] = ()
    ) -> Completion:
        return build_completion(await self._run_request(token_ids, make_sampling_params(sampling), request_id))

    async def answer_http(self, token_ids: list[int], request: HttpSampling, request_id: str) -> HttpAnswer:
        """Sample an answer to a request to the HTTP API, which runs in the owner's process."""
        params = make_sampling_params(request.sampling) | dict(request.penalties)
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
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
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
            raise EngineError(f"{self.spec.name} aborted a request: {finish}. See its log {self.spec.log_path}.")
        self._finished_tokens += len(answer["output_ids"])
        return answer

    # In-flight weight updates: a pause returns running requests to the queue with their tokens.

    async def pause(self) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        if not self._paused:
            await self._manager.pause_generation(PauseGenerationReqInput(mode="retract"))
            self._paused = True

    async def resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        if self._paused:
            await self._manager.continue_generation(ContinueGenerationReqInput())
            self._paused = False

    async def receive_weights(self, folder: str) -> None:
        if self.spec.transport == "adapter":
            await self._replace_adapter(folder)
            return
        await self.start_weight_update()
        await self._run_weight_loader(WEIGHT_LOADER, folder)
        await self.finish_weight_update()

    async def _run_weight_loader(self, loader: str, argument: str) -> None:
        """Run a function of patches.py in the scheduler of each rank."""
        import torch
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        tensors = MultiprocessingSerializer.serialize([(argument, torch.zeros(1))])
        num_ranks = self.spec.rollout.tensor_model_parallel_size
        update = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[tensors] * num_ranks, load_format=loader, flush_cache=False
        )
        self._check(await self._manager.update_weights_from_tensor(update))

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join a process group with the trainer. rank_offset: rank of the first engine's first process."""
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

        offset = init_info["rank_offset"] + self.spec.index * self.spec.rollout.tensor_model_parallel_size
        join = InitWeightsUpdateGroupReqInput(**init_info | {"rank_offset": offset})
        self._check(await self._manager.init_weights_update_group(join))

    async def start_weight_update(self) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        if self._manager.rid_to_state and not self._paused:  # would mix old and new weights
            raise EngineError(f"{self.spec.name} cannot load weights while requests are running. Call pause() first.")
        assert "weights" not in self._asleep, "call wake_weights first: a weight update needs allocated memory"
        self._check(await self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None))

    async def update_weights(self, update_info: UpdateInfo) -> None:
        """Load a bucket: from the GPU memory of the trainer, or from a broadcast in the process group."""
        assert isinstance(update_info, dict)
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput

        if "handles" in update_info:
            await self._run_weight_loader(BUCKET_LOADER, base64.b64encode(pickle.dumps(update_info)).decode())
            return
        update = UpdateWeightsFromDistributedReqInput(**update_info, load_format="flattened_bucket", flush_cache=False)
        self._check(await self._manager.update_weights_from_distributed(update))

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        self._check(await self._manager.end_weight_update(EndWeightUpdateReqInput(), None))

    # GPU memory shared with the trainer. Paused requests are in the queue, without a KV cache.

    async def sleep(self) -> None:
        if self.spec.is_colocated and "weights" not in self._asleep:
            await self._release_memory([part for part in ("kv_cache", "weights") if part not in self._asleep])

    async def release_cache(self) -> None:
        if self.spec.is_colocated and not self._asleep:
            await self._release_memory(["kv_cache"])

    async def _release_memory(self, parts: list[str]) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput, ReleaseMemoryOccupationReqInput

        if not self._paused and not self._asleep:
            await self._manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=parts))
        self._asleep.update(parts)

    async def wake_weights(self) -> None:
        await self._resume_memory("weights")

    async def wake_cache(self) -> None:
        assert "weights" not in self._asleep, "call wake_weights first"
        await self._resume_memory("kv_cache")

    async def _resume_memory(self, part: str) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, ResumeMemoryOccupationReqInput

        if part not in self._asleep:
            return
        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=[part]))
        self._asleep.remove(part)
        if not self._asleep and not self._paused:
            await self._manager.continue_generation(ContinueGenerationReqInput())

    async def _replace_adapter(self, folder: str) -> None:
        """Replace the LoRA adapter by the one in `folder`."""
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, UnloadLoRAAdapterReqInput

        if self._manager.rid_to_state:  # a running request keeps its adapter
            raise EngineError(
                f"{self.spec.name} cannot replace its LoRA adapter while requests run. Wait until they end."
            )
        last, self._adapter = self._adapter, f"adapter_{next(self._numbers)}"
        if last is not None:
            result = await self._manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=last))
            self._check((result.success, result.error_message))
        load = LoadLoRAAdapterReqInput(lora_name=self._adapter, lora_path=folder)
        result = await self._manager.load_lora_adapter(load)
        self._check((result.success, result.error_message))

    async def confirm_weights(self, version: int) -> WeightReceipt:
        from sglang.srt.managers import io_struct

        from alphaapollo.engines.sglang.patches import DIGEST
        from alphaapollo.weight_sync.digest import format_digest

        success, message, ranks, _ = await self._manager.check_weights(io_struct.CheckWeightsReqInput(action=DIGEST))
        self._check((success, message))
        if not (await self._manager.flush_cache()).success:
            raise EngineError(f"{self.spec.name} cannot reset its prefix cache while requests run. Call pause() first.")
        new_version = io_struct.UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        await self._manager.update_weight_version(new_version)
        parts = [int(rank["checksums"][DIGEST], 16) for rank in ranks]  # of the tensor-parallel ranks
        return WeightReceipt(version, format_digest(sum(parts)))

    def _check(self, result: tuple[Any, ...]) -> None:
        """Raise EngineError if a result of SGLang, (success, message), is a failure."""
        success, message = result[:2]
        if not success:
            raise EngineError(f"{self.spec.name} failed. See its log {self.spec.log_path}. SGLang's error: {message}")

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
    from alphaapollo.engines.sglang.patches import run_patched

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


async def run_server(fd: int) -> None:
    spec, reader, writer = await receive_spec(fd)
    await serve(SglangEngine(spec), reader, writer)


def main(fd: int) -> None:
    """Import SGLang, and serve the engine to the owner, at the other end of the socket `fd`."""
    set_up_engine_process()
    keep_freed_memory()
    signal.signal(signal.SIGQUIT, ignore_signal)
    if USES_CPU in os.environ:
        sys.modules["sgl_kernel"] = cpu_kernels  # the package has no build for a CPU
        OPERATORS.append(cpu_kernels.register_operators())
    with pause_gc():
        importlib.import_module("sglang.srt.entrypoints.engine")
    gc.freeze()  # a collection over these objects takes half a second in the scheduler, and would copy their memory
    asyncio.run(run_server(fd))
    os._exit(0)
