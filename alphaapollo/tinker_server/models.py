"""Training calls of one model, an adapter of `alphaapollo.Trainer`: gradients, steps, checkpoints and samplers."""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alphaapollo.own_loop.trainer import AsyncVerbs
from alphaapollo.runs.metrics_file import JsonlTracker
from alphaapollo.session.rows import GradientResult
from alphaapollo.tinker_server.calls import CallQueue
from alphaapollo.tinker_server.json_requests import AdamParams, LoadWeights, SaveWeights, SaveWeightsForSampler
from alphaapollo.tinker_server.losses import evaluate_loss, make_loss, make_rows
from alphaapollo.tinker_server.store import SNAPSHOTS, CheckpointRecord, CheckpointStore, ModelRecord
from alphaapollo.tinker_server.wire import ForwardBackwardRequest, RequestError, write_forward_backward
from alphaapollo.types import Row

ALPHA = 32.0  # LoRA alpha of all models; the client sends none
KEPT_SNAPSHOTS = 16  # newest weights of sampling clients per model; saved weights are kept until they are deleted
SHOW_SECONDS = 10.0  # between two lines about the steps of a model


@dataclass(eq=False)
class Sampler:
    """Sampling session of a client: the base model, or one version of an adapter."""

    sampler_id: str
    folder: Path | None  # of the adapter; None: the base model
    path: str | None = None  # tinker://...; None: a snapshot, or the base model

    def check_exists(self) -> None:
        if self.folder is not None and not self.folder.is_dir():
            raise RequestError(
                f"the weights of {self.sampler_id} were removed: a model keeps those of its last {KEPT_SNAPSHOTS} "
                "sampling clients. Use save_weights_for_sampler(name) to keep them.",
                status=404,
            )


class TrainedModel:
    """Model of a training client. Its calls run one after the other, in `queue`."""

    def __init__(
        self,
        record: ModelRecord,
        queue: CallQueue,
        verbs: AsyncVerbs,
        store: CheckpointStore,
        in_use: Counter[Path | None],
        notify: Callable[[str], None],
    ):
        self.record, self.queue, self.last_request = record, queue, time.time()
        self._verbs, self._store, self._in_use, self._notify = verbs, store, in_use, notify
        self._tracker = JsonlTracker(store.get_folder(record.model_id) / "metrics.jsonl", 0)
        self._step = self._saved_step = 0
        self._failure = ""  # of a forward_backward since the last step, which must not run then
        self._loss, self._num_tokens, self._shown = 0.0, 0, 0.0
        self._numbers, self._inflight = itertools.count(), list[Sampler]()

    @property
    def name(self) -> str:
        return self.record.model_id

    async def forward_backward(self, request: ForwardBackwardRequest) -> bytes:
        try:
            return await self._forward_backward(request)
        except Exception as error:
            if not request.forward_only:
                self._failure = str(error) or repr(error)
            raise

    async def _forward_backward(self, request: ForwardBackwardRequest) -> bytes:
        loss = make_loss(request.loss_fn, request.config)
        if not request.data:
            raise RequestError("forward_backward: there is no datum. Pass at least one.")

        def make_all_rows() -> list[list[Row]]:
            return [make_rows(datum, f"datum {i}", request.loss_fn) for i, datum in enumerate(request.data)]

        by_datum = await asyncio.to_thread(make_all_rows)
        rows = [row for made in by_datum for row in made]
        if request.forward_only:
            logprobs = await self._verbs.log_probs(rows, adapter=self.name)
            total = evaluate_loss(loss, rows, logprobs)
        else:
            result: GradientResult = await self._verbs.forward_backward(rows, loss, 1.0, adapter=self.name)
            logprobs, total = result.logprobs, result.loss
            self._loss, self._num_tokens = self._loss + total, self._num_tokens + result.num_tokens
        columns = iter(logprobs)
        outputs = [np.stack([next(columns)[1:] for _ in made], axis=-1) for made in by_datum]
        shapes = [datum.inputs["target_tokens"].shape for datum in request.data]
        outputs = [one.reshape(shape) for one, shape in zip(outputs, shapes, strict=True)]
        return write_forward_backward(total, outputs, {})

    async def fail(self, error: RequestError, is_gradient: bool) -> None:
        """Fail like a call that was refused before it was in the queue."""
        self._failure = str(error) if is_gradient else self._failure
        raise error

    async def optim_step(self, adam: AdamParams) -> dict[str, Any]:
        if failure := self._failure:
            self._failure = ""
            await self._verbs.clear_gradients(adapter=self.name)
            raise RequestError(f"no step was taken, because a forward_backward before it failed: {failure}")
        metrics = await self._verbs.optim_step(
            adam.learning_rate,
            adam.grad_clip_norm or math.inf,
            (adam.beta1, adam.beta2),
            adam.eps,
            adam.weight_decay,
            adapter=self.name,
        )
        self._step += 1
        shown = {"train/loss": self._loss, "train/tokens": float(self._num_tokens)}
        shown |= {f"train/{name}": metrics[name] for name in ("grad_norm", "lr")}
        self._loss, self._num_tokens = 0.0, 0
        self._tracker.log(self._step, shown)
        if time.monotonic() - self._shown > SHOW_SECONDS:
            self._shown = time.monotonic()
            text = ", ".join(f"{name.removeprefix('train/')} {value:.4g}" for name, value in shown.items())
            self._notify(f"{self.name} step {self._step}: {text}")
        return {"metrics": {"grad_norm:mean": metrics["grad_norm"]}}

    async def save(self, request: SaveWeights) -> dict[str, Any]:
        name = request.path or f"step_{self._step:06d}"
        folder = await asyncio.to_thread(self._store.begin, self.record, "weights", name, request.overwrite)
        return {"path": await self._save(folder, request.ttl_seconds, request.user_metadata), "type": "save_weights"}

    async def _save(self, folder: Path, ttl: int | None = None, metadata: dict[str, str] | None = None) -> str:
        await self._verbs.save_adapter(self.name, folder)
        self._saved_step = self._step
        return self._complete(folder, ttl, metadata)

    def _complete(self, folder: Path, ttl: int | None, metadata: dict[str, str] | None) -> str:
        record = CheckpointRecord(self._step, None if ttl is None else time.time() + ttl, metadata)
        return self._store.complete(self.record, folder, record).path

    async def load(self, request: LoadWeights) -> dict[str, Any]:
        """Load a training checkpoint of the same owner. Gradients are dropped."""
        checkpoint = await asyncio.to_thread(self._store.find, request.path, self.record.owner)
        saved, own = checkpoint.model, self.record
        if checkpoint.kind != "weights":
            raise RequestError(f"{request.path} has no state of a training. Pass a path of save_state.")
        if saved.base_model != own.base_model or request.base_model not in (None, own.base_model):
            raise RequestError(f"{request.path} is an adapter of {saved.base_model}. This server has {own.base_model}.")
        if (saved.lora.rank, saved.lora.train_attn, saved.lora.train_mlp) != (
            own.lora.rank,
            own.lora.train_attn,
            own.lora.train_mlp,
        ):
            raise RequestError(f"{request.path} has another rank or other layers than this model. Create a new client.")
        await self._verbs.load_adapter(self.name, checkpoint.folder, request.optimizer)
        self._failure = ""
        return {"model_id": self.name, "path": request.path, "type": "load_weights"}

    async def save_for_sampler(self, request: SaveWeightsForSampler) -> str:
        folder = await asyncio.to_thread(
            self._store.begin, self.record, "sampler_weights", request.path or "", overwrites=False
        )
        await self._verbs.publish(self.name, folder)
        return self._complete(folder, request.ttl_seconds, request.user_metadata)

    async def make_sampler(self, sampler_id: str, is_inflight: bool) -> Sampler:
        """Publish the weights for a sampling client. inflight: earlier clients of this kind use them, too."""
        folder = self._store.get_folder(self.name) / SNAPSHOTS / f"{next(self._numbers):06d}"
        await self._verbs.publish(self.name, folder)
        sampler = Sampler(sampler_id, folder)
        if is_inflight:
            self._inflight.append(sampler)
            for one in self._inflight:
                one.folder = folder
        kept = {folder, *sorted(folder.parent.iterdir())[-KEPT_SNAPSHOTS:]}
        for old in folder.parent.iterdir():
            if old not in kept and not self._in_use[old]:
                shutil.rmtree(old)
        return sampler

    async def close(self) -> None:
        """Save steps that were not saved, and free the adapter."""
        await self.queue.close()
        if self._step > self._saved_step:
            path = await self._save(self._store.get_folder(self.name) / "weights" / f"unsaved_step_{self._step:06d}")
            self._notify(f"{self.name} ended after step {self._step}; its last steps are saved as {path}")
        await self._verbs.remove_adapter(self.name)
        self._tracker.close()
        shutil.rmtree(self._store.get_folder(self.name) / SNAPSHOTS, ignore_errors=True)


def find_layers(paths: Iterable[str], attention: bool, mlp: bool) -> list[str]:
    """Return the last names of the layers that belong to attention or to the MLP, of paths of layers such as
    model.layers.0.self_attn.q_proj."""
    found = dict.fromkeys(
        path.rpartition(".")[2] for path in paths if (attention if "attn" in path or "attention" in path else mlp)
    )
    return sorted(found)
