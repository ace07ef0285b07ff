"""Interface of an inference engine: token ids in, token ids out.

Implementations: vllm/engine.py for production, hf.py as a slow reference, fake.py without a model for tests, and those
of plug-ins and packages, in this process or through remote.py."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from alphaapollo.config.requirements import Requirement
from alphaapollo.engines.types import EngineDied, EngineError, EngineSpec, HttpAnswer, HttpApiSettings, HttpSampling
from alphaapollo.engines.weight_sync.transport import WeightReceipt
from alphaapollo.types import Adapter, Completion, ImageInput, JsonObject, Sampling

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from alphaapollo.engines.weight_sync.transport import UpdateInfo


DISTRIBUTION_CHANGING_ARGUMENTS = (
    *("speculative_*", "spec_*", "quantiz*", "*_quant", "*quant_profile", "*torchao_config", "kv_cache_dtype*"),
    *("logits_processors", "override_generation_config", "reasoning_config", "diffusion_config", "dllm_*"),
    *("watermark_*", "enable_watermark", "preferred_sampling_params", "enable_strict_thinking"),
)
"""Patterns of engine arguments that make an engine sample from another distribution than the trainer's."""


MemoryPart = Literal["weights", "kv_cache"]
WEIGHTS: MemoryPart = "weights"
KV_CACHE: MemoryPart = "kv_cache"
MEMORY_PARTS: frozenset[MemoryPart] = frozenset({WEIGHTS, KV_CACHE})


class Engine:
    """Interface of one engine replica, called from one event loop. Calls of generate and log_probs may overlap.

    An engine implements the methods of the first part. Those of the second part, from `check_has_weights` on, call them
    and check the order of the calls."""

    name = "engine"  # in errors
    is_colocated = False  # whether it frees its GPU memory between generation phases
    serves_adapter = False  # whether it has its own base weights, and receives LoRA adapters
    keeps_adapters = False  # whether running requests keep their adapter when a new one arrives

    is_paused = False
    freed_parts: frozenset[MemoryPart] = frozenset()  # parts without allocated memory
    is_stale = False  # after its weights were freed, until new ones are confirmed
    is_loading = False  # between start_weight_update and finish_weight_update
    awaits_weights_after_restart = False  # from a restart until new weights are confirmed

    # Properties of the class, which commands and trainers read.

    reads_images: ClassVar[bool] = True  # whether its prompts may have images
    returns_kept_tokens: ClassVar[bool] = False  # whether it implements Sampling.returns_kept_tokens
    reads_quantized: ClassVar[bool] = False  # whether it serves models with quantized weights
    without_mixed_windows: ClassVar[Collection[str]] = ()  # families with a window in some layers, which it gets wrong
    weight_sender: ClassVar[str] = ""  # TransferSender for weights on GPUs, as module:class; empty: files only
    argument_files: ClassVar[str] = ""  # glob of files below sys.prefix whose classes declare engine_kwargs
    reserved_arguments: ClassVar[frozenset[str]] = frozenset()  # refused in engine_kwargs, because other keys set them

    @classmethod
    def build(cls, spec: EngineSpec) -> Engine:
        """Build the engine of a rollout worker, without starting it."""
        return cls(spec)

    @classmethod
    def find_python(cls) -> Path | None:
        """Return the Python of the engine's own environment, which may not exist. None: it runs in this environment."""
        return None

    @classmethod
    def list_requirements(cls) -> list[Requirement]:
        """Return what the engine cannot do, as requirements on Rollout or ModelUse (config/requirements.py)."""
        return []

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self.name, self.is_colocated = spec.name, spec.is_colocated
        self.serves_adapter = spec.transport == "adapter"

    # Start and end.

    def start_other_imports(self) -> None:
        """Let other processes of the engine, if it has any, import libraries while this process does other work."""

    async def preload_libraries(self) -> None:
        """Do the part of `start` that needs no GPU, such as imports, while other processes use the GPU."""

    async def start(self) -> None:
        """Load the model. Raises ValueError if the model cannot be served, EngineError if the start fails."""

    async def close(self) -> None:
        """Stop the engine and its processes. Idempotent."""

    @property
    def is_dead(self) -> bool:
        """Whether a process of the engine died, so that its requests fail with EngineDied."""
        return False

    async def restart(self) -> None:
        """Restart an engine that died. Its requests raise EngineDied until `confirm_weights` is called."""
        self.awaits_weights_after_restart = True
        await self.close()
        self.is_paused, self.is_loading, self.freed_parts = False, False, frozenset()
        await self.start()

    def list_pids(self) -> list[int]:
        """Return the pids of the engine's separate processes, the engine core first."""
        return []

    def get_progress_counter(self) -> int:
        """Return a number that changes while running requests make progress, e.g. the number of sampled tokens."""
        return 0

    # Requests.

    async def generate(
        self, token_ids: list[int], sampling: Sampling, request_id: str, images: Sequence[ImageInput] = ()
    ) -> Completion:
        """Sample one completion of 1 to `sampling.max_tokens` tokens. `images`: images in the prompt, in order.

        The log-probs of the sampled tokens are computed from softmax(logits / temperature), before top-p, top-k and
        min-p. At temperature 0 they are computed from softmax(logits). With `sampling.returns_kept_tokens`, they are
        log-probs among the kept tokens, which are in the column KEPT_TOKENS; an engine may then return such
        log-probs for other requests, too."""
        raise NotImplementedError

    async def log_probs(self, token_ids: list[int], images: Sequence[ImageInput] = ()) -> list[float]:
        """Return the log-probs at temperature 1 of `token_ids[1:]`, each given the tokens before it."""
        raise NotImplementedError

    def build_http_app(self, settings: HttpApiSettings) -> ASGIApp:
        """Return an ASGI application that serves the model to agents and evaluation suites. By default it is vLLM's
        HTTP API, which gets its answers from `answer_http`."""
        from alphaapollo.engines.vllm.http_over_other_engine import OtherEngine  # imports vLLM

        app: ASGIApp = OtherEngine(self.spec, self.answer_http).build_http_app(settings)
        return app

    async def answer_http(self, token_ids: list[int], request: HttpSampling, request_id: str) -> HttpAnswer:
        """Sample an answer to a request to the HTTP API over this engine. The default uses `generate`, which has no
        penalties and returns only the log-probs of sampled tokens. Raises ValueError if the request needs more."""
        outputs = {"top_logprobs": request.num_top, "prompt_logprobs": request.scores_prompt}
        unsupported = [*request.penalties, *(name for name, is_requested in outputs.items() if is_requested)]
        if unsupported:
            raise ValueError(f"{', '.join(unsupported)}: this engine does not support these settings. Remove them.")
        completion = await self.generate(token_ids, request.sampling, request_id)
        pairs = zip(completion.token_ids, completion.logprobs, strict=True)
        return HttpAnswer(completion, None, [{token: logprob} for token, logprob in pairs], [])

    def has_running_requests(self) -> bool:
        """Return whether requests are running or paused."""
        return False

    async def hold_requests(self) -> None:
        """Stop sampling after the current token. Running requests keep their tokens, and new requests wait."""
        raise NotImplementedError

    async def continue_requests(self) -> None:
        """Continue sampling with the latest weights and a recomputed KV cache."""
        raise NotImplementedError

    # Weights. The trainer writes them to a folder, from which the engine loads them. An engine on GPUs with a
    # weight_sender gets them in buckets instead (engines/weight_sync/transfer.py): the trainer calls
    # init_weight_transfer_engine once. For each weight sync it calls start_weight_update, update_weights for each
    # bucket, and finish_weight_update.

    async def load_folder(self, folder: str) -> None:
        """Load the weights that the trainer wrote to a shared-memory folder, as *.safetensors files of a checkpoint.
        Copy the tensors: the files may change after the weight sync."""
        raise NotImplementedError

    async def load_adapter(self, adapter: Adapter) -> str:
        """Load a LoRA adapter in peft's format, which the trainer wrote, and return the digest of its weights."""
        raise NotImplementedError

    async def use_adapter(self, adapter: Adapter) -> None:
        """Load a LoRA adapter that new requests use by default, instead of the previous adapter."""
        raise NotImplementedError

    async def init_weight_transfer_engine(self, init_info: JsonObject) -> None:
        """Connect the engine's workers to the trainer, once. `init_info["rank_offset"]`, if it is set, is the rank of
        the first engine's first worker."""
        raise NotImplementedError

    async def begin_loading(self) -> None:
        """Prepare for new weights, from a folder or in buckets."""

    async def load_bucket(self, update_info: UpdateInfo) -> None:
        """Load a bucket of tensors: from the trainer's GPU memory, or from a broadcast."""
        raise NotImplementedError

    async def end_loading(self) -> None:
        """Finish loading after the last tensor."""

    async def apply_weights(self, version: int) -> WeightReceipt | None:
        """Clear caches computed with old weights, and return the digest of the new weights (weight_sync/digest.py).
        None: the engine has no weights that could be verified."""
        raise NotImplementedError

    # GPU memory shared with the trainer. An engine without a GPU does not implement these methods.

    async def free_memory(self, parts: frozenset[MemoryPart]) -> None:
        """Free the memory of these parts, without ending requests. An engine that serves adapters keeps its weights in
        host memory."""

    async def allocate_memory(self, part: MemoryPart) -> None:
        """Allocate the memory of a part again. The values of weights are undefined until new ones are loaded."""

    # Methods that check the order of the calls. Engines do not override them.

    def check_has_weights(self) -> None:
        """Raise EngineError if a new request would be sampled with freed weights. Engines call it in `generate`."""
        if self.awaits_weights_after_restart:
            raise EngineDied(f"{self.name}: its core process died, and its new one has no weights yet")
        if self.is_stale and not self.is_paused:
            raise EngineError(f"{self.name} cannot generate: sleep() freed its weights. Send weights first.")

    async def pause(self) -> None:
        """Pause generation between two tokens. Idempotent."""
        if not self.is_paused:
            await self.hold_requests()
            self.is_paused = True

    async def resume(self) -> None:
        """Continue generation after `pause`. Idempotent."""
        if self.is_paused:
            await self.continue_requests()
            self.is_paused = False

    async def sleep(self) -> None:
        """Free the GPU memory of weights and KV cache, if the engine shares its GPU with the trainer. To continue, call
        wake_weights, receive_weights (or the methods of a weight transfer), confirm_weights and wake_cache."""
        if self.is_colocated and WEIGHTS not in self.freed_parts:
            await self.free_memory(MEMORY_PARTS - self.freed_parts)
            self.freed_parts, self.is_stale = MEMORY_PARTS, True

    async def release_cache(self) -> None:
        """Free the GPU memory of the KV cache alone. Running requests are paused until wake_cache."""
        if self.is_colocated and not self.freed_parts:
            await self.free_memory(frozenset({KV_CACHE}))
            self.freed_parts = frozenset({KV_CACHE})

    async def wake_weights(self) -> None:
        """Allocate the memory of the weights after `sleep`."""
        await self._wake(WEIGHTS)

    async def wake_cache(self) -> None:
        """Allocate the memory of the KV cache after `sleep` or `release_cache`."""
        self._check_has_memory()
        await self._wake(KV_CACHE)

    async def _wake(self, part: MemoryPart) -> None:
        if part in self.freed_parts:
            await self.allocate_memory(part)
            self.freed_parts -= {part}

    async def receive_weights(self, folder: str, version: int) -> None:
        """Load the weights, or the LoRA adapter, that the trainer wrote to a shared-memory folder."""
        if self.serves_adapter:
            if self.has_running_requests() and not self.keeps_adapters:
                raise EngineError(
                    f"{self.name} cannot replace its LoRA adapter while requests run. Wait until they end."
                )
            await self.use_adapter(Adapter(folder, version))
            return
        await self.start_weight_update()
        await self.load_folder(folder)
        await self.finish_weight_update()

    async def start_weight_update(self) -> None:
        """Begin to load new weights."""
        self._check_no_request_runs("load weights")  # a request would mix old and new weights
        self._check_has_memory()
        await self.begin_loading()
        self.is_loading = True

    async def update_weights(self, update_info: UpdateInfo) -> None:
        """Load a bucket of tensors."""
        if not self.is_loading:
            raise EngineError(f"{self.name} cannot load a bucket of weights. Call start_weight_update() first.")
        await self.load_bucket(update_info)

    async def finish_weight_update(self) -> None:
        """Finish loading new weights."""
        await self.end_loading()
        self.is_loading = False

    async def confirm_weights(self, version: int) -> WeightReceipt | None:
        """Finish a weight sync, and return what `apply_weights` returns."""
        self._check_no_request_runs("confirm weights")
        if self.is_loading:
            raise EngineError(f"{self.name} cannot confirm weights. Call finish_weight_update() first.")
        receipt = await self.apply_weights(version)
        self.is_stale = self.awaits_weights_after_restart = False
        return receipt

    @property
    def updates_in_flight(self) -> bool:
        """Whether new weights arrive without a pause of running requests, which keep the earlier weights."""
        return self.serves_adapter and self.keeps_adapters and not self.is_colocated

    def _check_no_request_runs(self, action: str) -> None:
        if self.has_running_requests() and not self.is_paused and not self.updates_in_flight:
            raise EngineError(f"{self.name} cannot {action} while requests are running. Call pause() first.")

    def _check_has_memory(self) -> None:
        if WEIGHTS in self.freed_parts:
            raise EngineError(f"{self.name} has no memory for its weights. Call wake_weights() first.")
