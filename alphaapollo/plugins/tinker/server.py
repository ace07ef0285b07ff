"""Sessions of clients, and their calls. app.py maps HTTP requests to these methods."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from alphaapollo.own_loop.trainer import AsyncVerbs
from alphaapollo.plugins.tinker import json_requests
from alphaapollo.plugins.tinker.budget import ENTRY, Budget
from alphaapollo.plugins.tinker.calls import Futures
from alphaapollo.plugins.tinker.models import KEPT_SNAPSHOTS, Sampler, TrainedModel, find_layers, find_state
from alphaapollo.plugins.tinker.store import CheckpointStore, ModelRecord
from alphaapollo.plugins.tinker.wire import RequestError, read_call_number, write_sample
from alphaapollo.types import Json, JsonObject, Sampling
from alphaapollo.utils.seeds import derive_seed

SESSION_SECONDS = 300.0  # without a heartbeat, which the client sends every 10 s; then a session ends
MAX_TOP = 20  # most probable tokens per position
TOKEN_BYTES, TOP_BYTES = 80, 160  # of a token in Python's lists, and of one of its most probable tokens
DIFFERENCES = (
    "This server trains no adapter of the output head: train_unembed has no effect. It computes the loss "
    "stable_reinforce as cispo, because tinker's formula is not published."
)


@dataclass(eq=False)
class Session:
    owner: str
    last_seen: float = field(default_factory=time.monotonic)
    models: dict[str, TrainedModel] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)


@dataclass(frozen=True)
class ServedModel:
    """What clients may use."""

    name: str
    tokenizer: str
    context: int  # tokens of prompt and answer
    max_rank: int
    max_models: int  # of one owner
    stop_token_ids: tuple[int, ...]
    layers: Sequence[str]  # paths of the layers that get adapters
    find_stop_ids: Callable[[Sequence[str]], tuple[int, ...]] = (
        lambda stop: ()
    )  # of stop strings that are special tokens


class Server:
    """State of the server. Its methods run on one event loop; the verbs run on that of the trainer."""

    def __init__(self, verbs: AsyncVerbs, store: CheckpointStore, served: ServedModel, notify: Callable[[str], None]):
        self.verbs, self.store, self.served, self.notify = verbs, store, served, notify
        self.futures, self.sessions = Futures(), dict[str, Session]()
        self.budgets = defaultdict[str, Budget](lambda: Budget(served.max_models))  # by owner
        self._closing = set[asyncio.Task[None]]()

    # Sessions.

    def create_session(self, owner: str) -> JsonObject:
        session_id = uuid.uuid4().hex
        self.budgets[owner].add(ENTRY)
        self.sessions[session_id] = Session(owner)
        return {"type": "create_session", "session_id": session_id, "warning_message": DIFFERENCES}

    def find_session(self, session_id: str, owner: str) -> Session:
        """Return a session, and count this as a heartbeat. Raises RequestError if the owner has no such session."""
        session = self.sessions.get(session_id.partition(":")[0])
        if session is None or session.owner != owner:
            raise RequestError(
                f"the session {session_id} has ended: the server was restarted, or got no heartbeat for "
                f"{SESSION_SECONDS:g} s. Create a new ServiceClient, and continue from the last saved state.",
                status=404,
            )
        session.last_seen = time.monotonic()
        return session

    def find_model(self, model_id: str, owner: str) -> TrainedModel:
        model = self.find_session(model_id, owner).models.get(model_id)
        if model is None:
            raise RequestError(f"there is no model {model_id}. Create it first.", status=404)
        model.last_request = time.time()
        return model

    def end_session(self, session_id: str) -> asyncio.Task[None]:
        """Save what its models have not saved, and free everything, in a task. A second call does nothing."""
        task = asyncio.create_task(self._close(session_id, self.sessions.pop(session_id, None)))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def _close(self, session_id: str, session: Session | None) -> None:
        if session is None:
            return
        for sampler_id in session.samplers:
            self.futures.drop(f"{sampler_id}:")
        for model in session.models.values():
            try:
                await model.close()
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  other models are closed, too
                self.notify(f"steps of {model.name} may be lost: {error or repr(error)}")
        self.futures.drop(f"{session_id}:")
        self.budgets[session.owner].size -= ENTRY * (1 + len(session.samplers))

    def end_silent_sessions(self) -> None:
        for session_id, session in [*self.sessions.items()]:
            if time.monotonic() - session.last_seen > SESSION_SECONDS:
                self.notify(f"session {session_id} ends: no heartbeat for {SESSION_SECONDS:g} s")
                self.end_session(session_id)

    async def end_all_sessions(self) -> None:
        for session_id in [*self.sessions]:
            self.end_session(session_id)
        await asyncio.gather(*self._closing)

    # Models.

    def create_model(self, request: json_requests.CreateModel, owner: str) -> JsonObject:
        session, lora, served = self.find_session(request.session_id, owner), request.lora_config, self.served
        self._check_base_model(request.base_model)
        if lora.rank > served.max_rank:
            raise RequestError(
                f"rank={lora.rank} is not served. Use at most {served.max_rank}, or start the server with "
                f"lora_rank={lora.rank}."
            )
        layers = find_layers(served.layers, lora.train_attn, lora.train_mlp)
        if not layers:
            raise RequestError("the adapter has no layer. Set train_attn=True or train_mlp=True.")
        model_id = f"{request.session_id}:train:{request.model_seq_id}"
        model = self._add_model(session, ModelRecord(model_id, owner, served.name, lora, time.time()))
        return model.put(0, lambda: model.create(layers))

    def _check_base_model(self, name: str) -> None:
        if name != self.served.name:
            raise RequestError(f"base_model={name} is not served. This server has {self.served.name}.")

    def _add_model(self, session: Session, record: ModelRecord) -> TrainedModel:
        """Return the model of a session with this id, which a repeated request has already made, or a new one."""
        if (model := session.models.get(record.model_id)) is None:
            budget, context = self.budgets[record.owner], self.served.context
            model = TrainedModel(record, self.futures, self.verbs, self.store, context, budget, self.notify)
            session.models[record.model_id] = model
        return model

    def load_weights(self, request: json_requests.LoadWeights, owner: str) -> JsonObject:
        if request.session_id is None:
            assert request.model_id is not None and request.seq_id is not None  # checked when it is parsed
            trained = self.find_model(request.model_id, owner)
            return trained.put(request.seq_id, lambda: trained.load(request))
        session = self.find_session(request.session_id, owner)
        model_id = f"{request.session_id}:train:{request.model_seq_id}"
        checkpoint = find_state(self.store, request, owner, self.served.name)
        record = ModelRecord(model_id, owner, self.served.name, checkpoint.model.lora, time.time())
        model = self._add_model(session, record)
        return model.put(0, lambda: model.create_from(checkpoint, request.optimizer))

    async def forward_backward(self, body: bytes, owner: str) -> JsonObject:
        model_id, number, forward_only = await asyncio.to_thread(read_call_number, body)
        model = self.find_model(model_id, owner)
        return model.put(number, lambda: model.forward_backward(body, forward_only), len(body))

    def optim_step(self, request: json_requests.OptimStep, owner: str) -> JsonObject:
        model = self.find_model(request.model_id, owner)
        return model.put(request.seq_id, lambda: model.optim_step(request.adam_params))

    def save_weights(self, request: json_requests.SaveWeights, owner: str) -> JsonObject:
        model = self.find_model(request.model_id, owner)
        return model.put(request.seq_id, lambda: model.save(request))

    def save_weights_for_sampler(self, request: json_requests.SaveWeightsForSampler, owner: str) -> JsonObject:
        model = self.find_model(request.model_id, owner)

        async def save() -> JsonObject:
            if request.path is not None:
                return {"path": await model.save_for_sampler(request), "type": "save_weights_for_sampler"}
            session = self.find_session(request.model_id, owner)
            sampler_id = f"{request.model_id.partition(':')[0]}:sample:{request.sampling_session_seq_id}"
            self._add_sampler(session, await model.make_sampler(sampler_id, request.kind == "inflight"))
            return {"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"}

        return model.put(request.seq_id, save)

    def fail_call(self, model_id: str, number: int, owner: str, error: RequestError) -> None:
        """Fail a numbered call whose request is invalid, so that later calls can run."""

        async def fail() -> None:
            raise error

        self.find_model(model_id, owner).put(number, fail)

    def _add_sampler(self, session: Session, sampler: Sampler) -> None:
        if sampler.sampler_id not in session.samplers:
            self.budgets[session.owner].add(ENTRY)
        session.samplers[sampler.sampler_id] = sampler

    # Samples.

    def create_sampling_session(self, request: json_requests.CreateSamplingSession, owner: str) -> JsonObject:
        session, folder = self.find_session(request.session_id, owner), None
        if request.model_path is not None:
            checkpoint = self.store.find(request.model_path, owner)
            if checkpoint.kind != "sampler_weights":
                raise RequestError(f"{request.model_path} has no sampler weights. Use save_weights_for_sampler.")
            if checkpoint.model.base_model != self.served.name:
                raise RequestError(f"{request.model_path} is an adapter of {checkpoint.model.base_model}.")
            folder = checkpoint.folder
        self._check_base_model(request.base_model or self.served.name)
        sampler_id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        self._add_sampler(session, Sampler(sampler_id, folder, request.model_path))
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def find_sampler(self, sampler_id: str, owner: str) -> Sampler:
        sampler = self.find_session(sampler_id, owner).samplers.get(sampler_id)
        if sampler is None:
            raise RequestError(f"there is no sampling session {sampler_id}. Create a sampling client.", status=404)
        return sampler

    def sample(self, request: json_requests.Sample, owner: str) -> JsonObject:
        sampler, budget = self.find_sampler(request.sampling_session_id, owner), self.budgets[owner]
        if sampler.folder is not None and not self.store.exists(sampler.folder):
            raise RequestError(
                f"the weights of {sampler.sampler_id} were removed: a model keeps those of its last {KEPT_SNAPSHOTS} "
                "sampling clients. Use save_weights_for_sampler(name) to keep them.",
                status=404,
            )
        token_ids = [token for chunk in request.prompt.chunks for token in chunk.tokens]
        sampling = self._make_sampling(request, len(token_ids), owner)
        request_id, folder, count = f"{sampler.sampler_id}:{request.seq_id}", sampler.folder, len(sampling)
        top_prompt, top = request.topk_prompt_logprobs, request.topk_sample_logprobs
        scores = bool(request.prompt_logprobs or top_prompt)
        size = len(token_ids) * (TOKEN_BYTES + scores * (1 + max(top_prompt, top)) * TOP_BYTES)
        size += count * sampling[0].max_tokens * (TOKEN_BYTES + top * TOP_BYTES)

        async def run() -> bytes:
            answers = await self.verbs.sample_tokens(token_ids, sampling, max(top_prompt, top), scores, folder)
            return await asyncio.to_thread(write_sample, answers, token_ids, scores, top_prompt, top)

        def end() -> None:
            budget.remove_samples(count, size)
            if folder is not None:
                self.store.release(folder)

        if request_id not in self.futures:  # not a repeated request
            budget.add_samples(count, size)
            if folder is not None:
                self.store.use(folder)
            self.futures.start(request_id, run, budget, end)
        return {"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{i}" for i in range(count)]}

    def _make_sampling(self, request: json_requests.Sample, num_prompt: int, owner: str) -> list[Sampling]:
        params, context = request.sampling_params, self.served.context
        limit = params.max_tokens or context - num_prompt
        if not num_prompt or num_prompt + limit > context or limit < 1:
            raise RequestError(
                f"a prompt of {num_prompt} tokens and max_tokens={params.max_tokens} do not fit into the context of "
                f"{context} tokens. Pass at least one token, and use shorter ones."
            )
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
            if getattr(request, name) > MAX_TOP:
                raise RequestError(f"{name}={getattr(request, name)} exceeds the limit of {MAX_TOP}. Lower it.")
        stop: Sequence[Json] = [params.stop] if isinstance(params.stop, str) else params.stop or []
        ids = tuple(one for one in stop if isinstance(one, int))
        strings = tuple(one for one in stop if isinstance(one, str))
        ids = self.served.stop_token_ids if params.stop is None else (*ids, *self.served.find_stop_ids(strings))
        first = uuid.uuid4().int if params.seed is None else params.seed
        seeds = [derive_seed("tinker", first, number) for number in range(request.num_samples)]
        sampling = Sampling(
            limit, params.temperature, params.top_p, params.top_k, 0, ids, strings, True, cache_owner=owner
        )
        return [replace(sampling, seed=seed) for seed in seeds]
