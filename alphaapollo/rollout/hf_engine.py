"""Hugging Face transformers as an engine: slow, plain, for comparison with vLLM.

Requests that wait together are sampled together, left-padded, one token a step for all of them.
"""

from __future__ import annotations

import asyncio
import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from alphaapollo.pulse import PULSE
from alphaapollo.rollout.engine import EngineError
from alphaapollo.rollout.spec import EngineSpec
from alphaapollo.types import Completion, Sampling, StopReason, WeightReceipt
from alphaapollo.weights.digest import format_digest, tensors_digest


@dataclass
class _Request:
    token_ids: list[int]
    sampling: Sampling
    answer: asyncio.Future[Completion]
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    earlier_versions: list[tuple[int, int]] = field(default_factory=list)  # as in Completion

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.sampling.seed)

    def note(self, version: int) -> None:
        """What was sampled since the last note is this version's, and another may come."""
        if count := len(self.sampled) - sum(count for _, count in self.earlier_versions):
            self.earlier_versions.append((version, count))

    @property
    def done(self) -> bool:
        stopped = bool(self.sampled) and self.sampled[-1] in self.sampling.stop_token_ids
        return stopped or len(self.sampled) == self.sampling.max_tokens


class HFEngine:
    """One model in this process, sampled in a thread."""

    holds_weights = True

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self.version = 0
        self._model: Any = None
        self._waiting: list[_Request] = []
        self._serving: asyncio.Task[None] | None = None
        self._paused = False

    async def prepare(self) -> None:
        await asyncio.to_thread(importlib.import_module, "transformers")

    async def start(self) -> None:
        self._model = await asyncio.to_thread(self._load)

    def _load(self) -> Any:
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(
                self.spec.model_path,
                dtype=getattr(torch, self.spec.dtype),
                trust_remote_code=self.spec.trust_remote_code,
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"transformers cannot load {self.spec.model_path}: {error}") from error
        return model.to(self.spec.device).eval()

    async def generate(self, token_ids: list[int], sampling: Sampling, request_id: str) -> Completion:
        self.spec.check_fits(len(token_ids), sampling.max_tokens)
        request = _Request(token_ids, sampling, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._go_on()
        return await request.answer

    def _go_on(self) -> None:
        if not self._paused and (self._serving is None or self._serving.done()):
            self._serving = asyncio.ensure_future(self._serve())

    async def _serve(self) -> None:
        while self._waiting and not self._paused:
            await asyncio.sleep(0)  # let the others of a burst arrive
            size = self.spec.rollout.max_num_seqs
            batch, self._waiting = self._waiting[:size], self._waiting[size:]
            try:
                await asyncio.to_thread(self._sample, batch)
            except RuntimeError as error:
                failure = EngineError(f"{self.spec.name}: {error}")
                for request in batch:
                    request.answer.set_exception(failure)
                continue
            for request in batch:
                if request.done and not request.answer.cancelled():
                    request.answer.set_result(self._completion(request))
                request.note(self.version)
            left = [request for request in batch if not (request.done or request.answer.cancelled())]
            self._waiting = left + self._waiting

    def _completion(self, request: _Request) -> Completion:
        stopped = request.sampled[-1] in request.sampling.stop_token_ids
        reason = StopReason.STOP if stopped else StopReason.LENGTH
        earlier = tuple(request.earlier_versions)
        return Completion(request.sampled, request.logprobs, reason, self.version, earlier_versions=earlier)

    async def pause(self, keep_cache: bool = False) -> None:
        self._paused = True  # seen after the token at hand
        if self._serving is not None:
            await asyncio.wait((self._serving,))

    async def resume(self) -> None:
        self._paused = False
        if self._waiting:
            self._go_on()

    @torch.inference_mode()
    def _sample(self, batch: list[_Request]) -> None:
        device = self._model.device
        contexts = [request.token_ids + request.sampled for request in batch]  # sampled: before a pause
        longest = max(map(len, contexts))
        padding = torch.tensor([longest - len(context) for context in contexts], device=device)
        tokens = torch.tensor([[0] * (longest - len(context)) + context for context in contexts], device=device)
        cache = None
        for length in range(longest, longest + max(request.sampling.max_tokens for request in batch)):
            places = torch.arange(length, device=device)
            mask = (places >= padding[:, None]).long()
            positions = (places - padding[:, None]).clamp(min=0)[:, -tokens.shape[1] :]
            output = self._model(
                tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            PULSE.beat()
            cache = output.past_key_values
            logits = output.logits[:, -1].float().cpu()
            chosen = [
                sample_token(row, request.sampling, request.generator)
                for row, request in zip(logits, batch, strict=True)
            ]
            for request, (token, logprob) in zip(batch, chosen, strict=True):
                if not request.done:
                    request.sampled.append(token)
                    request.logprobs.append(logprob)
            if self._paused or all(request.done for request in batch):
                return
            tokens = torch.tensor([[token] for token, _ in chosen], device=device)

    async def log_probs(self, token_ids: list[int]) -> list[float]:
        return await asyncio.to_thread(self._log_probs, token_ids)

    @torch.inference_mode()
    def _log_probs(self, token_ids: list[int]) -> list[float]:
        tokens = torch.tensor([token_ids], device=self._model.device)
        logprobs = self._model(tokens).logits[0, :-1].float().log_softmax(dim=-1)
        return logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist()

    async def receive_weights(self, folder: str) -> None:
        await asyncio.to_thread(self._receive, Path(folder))

    async def confirm_weights(self, version: int) -> WeightReceipt:
        self.version = version
        return WeightReceipt(version, format_digest(tensors_digest(self._model.parameters())))

    def _receive(self, folder: Path) -> None:
        from safetensors.torch import load_file

        tensors: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(path)
        dtype = getattr(torch, self.spec.dtype)
        model = type(self._model).from_pretrained(None, config=self._model.config, state_dict=tensors, dtype=dtype)
        self._model = model.to(self.spec.device).eval()

    async def sleep(self) -> None:
        if self.spec.shares_gpu:
            self._model = self._model.to("meta")  # its shape is all that receiving needs
            torch.cuda.empty_cache()

    async def wake_weights(self) -> None:
        pass  # they come as a model of their own

    async def release_cache(self) -> None:
        pass  # the cache lives for the length of a batch

    async def wake_cache(self) -> None:
        pass

    def pids(self) -> list[int]:
        return []

    def progress(self) -> int:
        return 0

    async def close(self) -> None:
        self._model = None


def sample_token(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[int, float]:
    """A token drawn from logits [V] (float32), and its log-prob after temperature, before top-p and top-k."""
    if sampling.temperature == 0:
        token = int(logits.argmax())
        return token, float(logits.log_softmax(dim=-1)[token])
    logprobs = (logits / sampling.temperature).log_softmax(dim=-1)
    ordered, order = logprobs.sort(descending=True)
    kept = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k > 0:
        kept[sampling.top_k :] = False
    if sampling.top_p < 1:
        before = ordered.masked_fill(~kept, -torch.inf).softmax(dim=-1).cumsum(dim=-1).roll(1)
        before[0] = 0.0
        kept &= before < sampling.top_p  # the token that crosses top_p is kept
    noise = torch.empty_like(ordered).exponential_(generator=generator)
    place = int((ordered.exp() / noise).masked_fill(~kept, -1.0).argmax())
    token = int(order[place])
    return token, float(logprobs[token])
