"""Engine on Hugging Face transformers: slow but simple, a reference for testing vLLM.

Waiting requests are sampled as one left-padded batch, one token per step.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from alphaapollo.algorithms.sampling import Cache, PendingCompletion, decode_batch, next_logits
from alphaapollo.config.resolve import get_resolved
from alphaapollo.data.images import EXCLUDED_LOGIT
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.engines.protocol import WEIGHTS, Engine, MemoryPart
from alphaapollo.engines.types import EngineError, EngineSpec
from alphaapollo.engines.weight_sync.digest import compute_joint_digest, format_digest
from alphaapollo.engines.weight_sync.shared_memory import read_safetensors
from alphaapollo.engines.weight_sync.transport import WeightReceipt
from alphaapollo.types import Completion, ImageInput, Sampling
from alphaapollo.utils.kept_tokens import KEPT_TOKENS, KeptTokens, TooManyTokensError


@dataclass
class _WaitingRequest(PendingCompletion):
    answer: asyncio.Future[Completion] = field(kw_only=True)
    earlier_version_token_counts: list[tuple[int, int]] = field(default_factory=list)  # as in Completion

    def record_weight_version(self, version: int) -> None:
        """Record that the tokens sampled since the last call of this method come from this weight version."""
        if count := len(self.sampled) - sum(count for _, count in self.earlier_version_token_counts):
            self.earlier_version_token_counts.append((version, count))


class HFEngine(Engine):
    """Engine with one transformers model, which a thread of this process samples from.

    A weight sync replaces the model, and a KV cache exists only during a batch, so waking allocates nothing.
    """

    reads_images = False
    returns_kept_tokens = True

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        self.version = 0
        self._model: Any = None
        self._decode: Callable[[list[int]], str] | None = None  # for stop strings
        self._excluded_ids: list[int] = []
        self._waiting: list[_WaitingRequest] = []
        self._serving: asyncio.Task[None] | None = None
        self._is_held = False

    async def preload_libraries(self) -> None:
        await asyncio.to_thread(importlib.import_module, "transformers")

    async def start(self) -> None:
        self._model = await asyncio.to_thread(self._load_model)

    def _load_model(self) -> Any:
        from transformers import AutoModelForCausalLM

        if self.spec.rollout.stop_strings:
            tokenizer = load_tokenizer(self.spec.tokenizer_path, self.spec.trust_remote_code)
            self._decode = partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if self.spec.tokenizer_path:
            self._excluded_ids = list(self.spec.find_excluded_ids())
        options = {"dtype": getattr(torch, self.spec.dtype), "trust_remote_code": self.spec.trust_remote_code}
        model = AutoModelForCausalLM.from_pretrained(self.spec.model_path, **options)
        return model.to(self.spec.device).eval()

    async def generate(
        self, token_ids: list[int], sampling: Sampling, request_id: str, images: Sequence[ImageInput] = ()
    ) -> Completion:
        self.check_has_weights()
        self.spec.check_request_length(len(token_ids), sampling.max_tokens)
        future = asyncio.get_running_loop().create_future()
        request = _WaitingRequest(token_ids, sampling, decode=self._decode, answer=future)
        self._waiting.append(request)
        self._start_serving()
        return await request.answer

    def _start_serving(self) -> None:
        if not self._is_held and (self._serving is None or self._serving.done()):
            self._serving = asyncio.ensure_future(self._serve_waiting_requests())

    async def _serve_waiting_requests(self) -> None:
        while self._waiting and not self._is_held:
            await asyncio.sleep(0)  # collect requests that arrive at the same time
            size = get_resolved(self.spec.rollout.max_num_seqs)
            batch, self._waiting = self._waiting[:size], self._waiting[size:]
            try:
                await asyncio.to_thread(self._sample_batch, batch)
            except Exception as error:  # noqa: BLE001  the requests raise it
                for request in batch:
                    if not request.answer.cancelled():
                        request.answer.set_exception(EngineError(f"{self.name}: {error}"))
                continue
            for request in batch:
                if request.is_done and not request.answer.cancelled():
                    self._finish(request)
                request.record_weight_version(self.version)
            unfinished = [request for request in batch if not (request.is_done or request.answer.cancelled())]
            self._waiting = unfinished + self._waiting

    def _finish(self, request: _WaitingRequest) -> None:
        completion = request.to_completion(self.version, request.earlier_version_token_counts)
        try:
            if request.sampling.returns_kept_tokens:
                self.spec.check_kept_tokens(request.kept, request.sampled)
                kept = KeptTokens.of_completion(request.kept, len(request.prompt_ids))
                completion = replace(completion, columns={KEPT_TOKENS: kept})
            request.answer.set_result(completion)
        except (EngineError, TooManyTokensError) as error:
            request.answer.set_exception(error)

    async def hold_requests(self) -> None:
        self._is_held = True  # sampling stops after the current token
        if self._serving is not None:
            await asyncio.wait((self._serving,))

    async def continue_requests(self) -> None:
        self._is_held = False
        self._start_serving()

    @torch.inference_mode()
    def _sample_batch(self, batch: list[_WaitingRequest]) -> None:
        decode_batch(self._compute_next_logits, batch, self._model.device, lambda all_done: all_done or self._is_held)

    def _compute_next_logits(self, *arguments: Any) -> tuple[torch.Tensor, Cache]:
        logits, cache = next_logits(self._model, *arguments)
        logits[:, self._excluded_ids] = EXCLUDED_LOGIT
        return logits, cache

    async def log_probs(self, token_ids: list[int], images: Sequence[ImageInput] = ()) -> list[float]:
        return await asyncio.to_thread(self._compute_log_probs, token_ids)

    @torch.inference_mode()
    def _compute_log_probs(self, token_ids: list[int]) -> list[float]:
        tokens = torch.tensor([token_ids], device=self._model.device)
        logits = self._model(tokens).logits[0, :-1].float()
        logits[:, self._excluded_ids] = EXCLUDED_LOGIT
        logprobs = logits.log_softmax(dim=-1)
        return logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist()

    async def load_folder(self, folder: str) -> None:
        await asyncio.to_thread(self._load_weights, Path(folder))

    async def apply_weights(self, version: int) -> WeightReceipt:
        self.version = version
        return WeightReceipt(version, format_digest(compute_joint_digest(self._model.parameters())))

    def _load_weights(self, folder: Path) -> None:
        tensors = {name: tensor.clone() for name, tensor in read_safetensors(folder)}  # the files may change
        dtype = getattr(torch, self.spec.dtype)
        model = type(self._model).from_pretrained(None, config=self._model.config, state_dict=tensors, dtype=dtype)
        self._model = model.to(self.spec.device).eval()

    async def free_memory(self, parts: frozenset[MemoryPart]) -> None:
        if WEIGHTS in parts:
            self._model = self._model.to("meta")  # load_folder needs only the shapes
            torch.cuda.empty_cache()

    async def close(self) -> None:
        self._model = None
