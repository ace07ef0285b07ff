"""Training calls of one model, an adapter of `alphaapollo.Trainer`: gradients, steps, checkpoints and samplers."""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from alphaapollo.own_loop.rows import GradientResult
from alphaapollo.own_loop.trainer import AsyncVerbs
from alphaapollo.plugins.tinker.budget import Budget
from alphaapollo.plugins.tinker.calls import Call, CallQueue, Futures
from alphaapollo.plugins.tinker.json_requests import AdamParams, LoadWeights, SaveWeights, SaveWeightsForSampler
from alphaapollo.plugins.tinker.losses import evaluate_loss, make_loss, make_rows
from alphaapollo.plugins.tinker.store import SNAPSHOTS, Checkpoint, CheckpointStore, ModelRecord, get_partial
from alphaapollo.plugins.tinker.wire import MAX_TARGETS, RequestError, read_forward_backward, write_forward_backward
from alphaapollo.runs.metrics_file import JsonlTracker
from alphaapollo.types import Json, JsonObject, Row

ALPHA = 32.0  # LoRA alpha of all models; the client sends none
KEPT_SNAPSHOTS = 16  # newest weights of sampling clients per model; saved weights are kept until they are deleted
NO_TARGETS = np.zeros(0)
SHOW_SECONDS = 10.0  # between two lines about the steps of a model


@dataclass(eq=False)
class Sampler:
    """Sampling session of a client: the base model, or one version of an adapter."""

    sampler_id: str
    folder: Path | None  # of the adapter; None: the base model
    path: str | None = None  # tinker://...; None: a snapshot, or the base model


class TrainedModel:
    """Model of a training client. Its calls run one after the other, in `queue`; the first creates the adapter.

    context: most tokens of a datum. budget: of the owner.
    """

    def __init__(
        self,
        record: ModelRecord,
        futures: Futures,
        verbs: AsyncVerbs,
        store: CheckpointStore,
        context: int,
        budget: Budget,
        notify: Callable[[str], None],
    ):
        budget.add_model(record.model_id)
        self.record, self.last_request, self._budget = record, time.time(), budget
        self.queue = CallQueue(record.model_id, futures, self._refuse_step, budget)
        self._verbs, self._store, self._context, self._notify = verbs, store, context, notify
        self._tracker: JsonlTracker | None = None  # None: the adapter is not created
        self._step = self._saved_step = 0
        self._failure = ""  # error of a forward_backward since the last step; the next step is refused
        self._loss, self._num_tokens, self._shown = 0.0, 0, 0.0
        self._numbers, self._inflight = itertools.count(), list[Sampler]()

    @property
    def name(self) -> str:
        return self.record.model_id

    def put(self, number: int, call: Call, size: int = 0) -> JsonObject:
        """Add a call to the queue, and return what the client gets at once. size: see CallQueue.put."""

        async def run() -> Json:
            if number:
                self._get_tracker()
            return await call()

        return {"request_id": self.queue.put(number, run, size), "model_id": self.name}

    async def create(self, layers: Sequence[str]) -> JsonObject:
        """Create the adapter with new weights."""
        lora = self.record.lora
        seed = uuid.uuid4().int >> 65 if lora.seed is None else lora.seed
        await self._begin(self._verbs.add_adapter(self.name, lora.rank, ALPHA, layers, seed))
        return {"model_id": self.name, "type": "create_model"}

    async def create_from(self, checkpoint: Checkpoint, with_optimizer: bool) -> JsonObject:
        """Create the adapter from a training checkpoint."""
        await self._begin(self._verbs.load_adapter(self.name, checkpoint.folder, with_optimizer))
        return {"model_id": self.name, "path": checkpoint.path, "type": "load_weights"}

    async def _begin(self, creation: Awaitable[None]) -> None:
        """Wait until the adapter is created, and create the model's folder."""
        try:
            await creation
            self._begin_folder()
        except BaseException:
            self._budget.models.discard(self.name)
            with suppress(ValueError):  # there is no adapter
                await self._verbs.remove_adapter(self.name)
            raise

    def _begin_folder(self) -> None:
        self._store.add_model(self.record)
        self._tracker = JsonlTracker(self._store.get_folder(self.name) / "metrics.jsonl", 0)
        lora = self.record.lora
        parts = " and ".join(["attention"] * lora.train_attn + ["MLP"] * lora.train_mlp)
        self._notify(f"{self.name} created: rank {lora.rank}, {parts}")

    def _refuse_step(self, failure: str) -> None:
        self._failure = failure

    def _get_tracker(self) -> JsonlTracker:
        if self._tracker is None:
            raise RequestError(f"{self.name} was not created, because its first call failed. Create a new client.")
        return self._tracker

    async def forward_backward(self, body: bytes, forward_only: bool) -> bytes:
        try:
            async with self._budget.parsing:
                return await self._forward_backward(body)
        except Exception as error:
            if not forward_only:
                self._refuse_step(str(error) or repr(error))
            raise

    async def _forward_backward(self, body: bytes) -> bytes:
        request = await asyncio.to_thread(read_forward_backward, body, self._context)
        loss = make_loss(request.loss_fn, request.config)
        if not request.data:
            raise RequestError("forward_backward: there is no datum. Pass at least one.")
        if (count := sum(one.inputs.get("target_tokens", NO_TARGETS).size for one in request.data)) > MAX_TARGETS:
            raise RequestError(f"the call has {count} targets, and at most {MAX_TARGETS} are allowed. Split it.")

        def make_all_rows() -> list[list[Row]]:
            return [make_rows(datum, f"datum {i}", request.loss_fn) for i, datum in enumerate(request.data)]

        by_datum = await asyncio.to_thread(make_all_rows)
        rows = [row for made in by_datum for row in made]
        if request.forward_only:
            logprobs = await self._verbs.log_probs(rows, adapter=self.name)
            total = await asyncio.to_thread(evaluate_loss, loss, rows, logprobs)
        else:
            result: GradientResult = await self._verbs.forward_backward(rows, loss, 1.0, adapter=self.name)
            logprobs, total = result.logprobs, result.loss
            self._loss, self._num_tokens = self._loss + total, self._num_tokens + result.num_tokens
        columns = iter(logprobs)
        outputs = [np.stack([next(columns)[1:] for _ in made], axis=-1) for made in by_datum]
        shapes = [datum.inputs["target_tokens"].shape for datum in request.data]
        outputs = [one.reshape(shape) for one, shape in zip(outputs, shapes, strict=True)]
        return write_forward_backward(total, outputs, {})

    async def optim_step(self, adam: AdamParams) -> JsonObject:
        tracker, failure = self._get_tracker(), self._failure
        shown = {"train/loss": self._loss, "train/tokens": float(self._num_tokens)}
        self._failure, self._loss, self._num_tokens = "", 0.0, 0
        if failure:
            await self._verbs.clear_gradients(adapter=self.name)
            raise RequestError(
                f"the step was refused and its gradients were dropped, because a call before it failed: {failure}"
            )
        metrics = await self._verbs.optim_step(
            adam.learning_rate,
            adam.grad_clip_norm or math.inf,
            (adam.beta1, adam.beta2),
            adam.eps,
            adam.weight_decay,
            adapter=self.name,
        )
        self._step += 1
        shown |= {f"train/{name}": metrics[name] for name in ("grad_norm", "lr")}
        tracker.log(self._step, shown)
        if time.monotonic() - self._shown > SHOW_SECONDS:
            self._shown = time.monotonic()
            text = ", ".join(f"{name.removeprefix('train/')} {value:.4g}" for name, value in shown.items())
            self._notify(f"{self.name} step {self._step}: {text}")
        return {"metrics": {"grad_norm:mean": metrics["grad_norm"]}}

    async def save(self, request: SaveWeights) -> JsonObject:
        name = request.path or f"step_{self._step:06d}"
        folder = await asyncio.to_thread(self._store.reserve_folder, self.record, "weights", name, request.overwrite)
        return {"path": await self._save(folder, request.ttl_seconds, request.user_metadata), "type": "save_weights"}

    async def _save(self, folder: Path, ttl: int | None = None, metadata: dict[str, str] | None = None) -> str:
        written = get_partial(folder)
        shutil.rmtree(written, ignore_errors=True)
        await self._verbs.save_adapter(self.name, written)
        checkpoint = await asyncio.to_thread(self._store.complete, self.record, written, self._step, ttl, metadata)
        self._saved_step = self._step
        return checkpoint.path

    async def load(self, request: LoadWeights) -> JsonObject:
        """Load a training checkpoint of the same owner. Gradients are dropped."""
        own = self.record
        checkpoint = await asyncio.to_thread(find_state, self._store, request, own.owner, own.base_model)
        saved = checkpoint.model.lora
        if (saved.rank, saved.train_attn, saved.train_mlp) != (own.lora.rank, own.lora.train_attn, own.lora.train_mlp):
            raise RequestError(f"{request.path} has another rank or other layers than this model. Create a new client.")
        await self._verbs.load_adapter(self.name, checkpoint.folder, request.optimizer)
        self._failure, self._loss, self._num_tokens, self._saved_step = "", 0.0, 0, self._step
        return {"model_id": self.name, "path": request.path, "type": "load_weights"}

    async def save_for_sampler(self, request: SaveWeightsForSampler) -> str:
        name, kind = request.path or "", "sampler_weights"
        folder = await asyncio.to_thread(self._store.reserve_folder, self.record, kind, name, overwrites=False)
        shutil.rmtree(folder, ignore_errors=True)  # of a server that was killed before the folder was complete
        await self._verbs.publish(self.name, folder)
        ttl, metadata = request.ttl_seconds, request.user_metadata
        return self._store.complete(self.record, folder, self._step, ttl, metadata).path

    async def make_sampler(self, sampler_id: str, is_inflight: bool) -> Sampler:
        """Publish the weights for a sampling client. inflight: earlier clients of this kind use them, too."""
        folder = self._store.get_folder(self.name) / SNAPSHOTS / f"{next(self._numbers):06d}"
        await self._verbs.publish(self.name, folder)
        sampler = Sampler(sampler_id, folder)
        if is_inflight:
            self._inflight.append(sampler)
            for one in self._inflight:
                one.folder = folder
        for old in sorted(folder.parent.glob("[!.]*"))[:-KEPT_SNAPSHOTS]:
            self._store.remove(old)
        return sampler

    async def close(self) -> None:
        """Save steps that were not saved, and free the adapter."""
        await self.queue.close()
        self._budget.models.discard(self.name)
        if self._tracker is None:
            return
        self._tracker.close()
        folder = self._store.get_folder(self.name)
        try:
            if self._step > self._saved_step:
                path = await self._save(folder / "weights" / f"unsaved_step_{self._step:06d}")
                self._notify(f"{self.name} ended after step {self._step}; its last steps are saved as {path}")
        finally:
            await self._verbs.remove_adapter(self.name)
            snapshots = [*(folder / SNAPSHOTS).glob("*")]
            for snapshot in snapshots:
                self._store.remove(snapshot)
            if not (self._step or snapshots or self._store.list_checkpoints(self.record)):
                shutil.rmtree(folder, ignore_errors=True)  # the client has not used it


def find_state(store: CheckpointStore, request: LoadWeights, owner: str, base_model: str) -> Checkpoint:
    """Return the training checkpoint that a request names. Raises RequestError if it cannot be loaded here."""
    checkpoint = store.find(request.path, owner)
    if checkpoint.kind != "weights":
        raise RequestError(f"{request.path} is not a training checkpoint. Pass a path that save_state returned.")
    if checkpoint.model.base_model != base_model or request.base_model not in (None, base_model):
        text = f"{request.path} is an adapter of {checkpoint.model.base_model}. This server has {base_model}."
        raise RequestError(text)
    return checkpoint


def find_layers(paths: Iterable[str], attention: bool, mlp: bool) -> list[str]:
    """Return the last names of the layers that belong to attention or to the MLP, of paths of layers such as
    model.layers.0.self_attn.q_proj."""
    found = dict.fromkeys(
        path.rpartition(".")[2] for path in paths if (attention if "attn" in path or "attention" in path else mlp)
    )
    return sorted(found)
