"""Send the policy's weights to the engines, and verify that the engines compute with them (engines/weight_sync)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from alphaapollo.controller.engine_group import EngineGroup
from alphaapollo.controller.errors import EngineCoreDied, WorkerDied
from alphaapollo.controller.handles import PolicyGroup
from alphaapollo.controller.worker_groups import WorkerGroups
from alphaapollo.data.images import make_example_image
from alphaapollo.data.rendering import Renderer
from alphaapollo.engines.weight_sync.transport import WeightReceipt, WeightUpdate
from alphaapollo.engines.weight_sync.verification import (
    PROBE_TOLERANCE_BFLOAT16,
    PROBE_TOLERANCE_FLOAT32,
    SAMPLE_TOLERANCE_BFLOAT16,
    Probe,
    check_probe_finite,
    check_probe_log_probs,
    check_weight_receipts,
    tighten_tolerance,
)
from alphaapollo.launch.plan import Plan
from alphaapollo.types import Adapter, Completion, ImageInput, Message

PROBE_TOKENS = 64
MAX_REPLACEMENTS = 3  # maximum number of times in an iteration that dead engines are replaced; then the run restarts


def make_probe(renderer: Renderer, content: list[Message] | str, max_tokens: int) -> Probe:
    """Make a probe of at most `max_tokens` tokens: a generated image if the model has vision, and the start of the
    text of a prompt. The image comes first, so that the log-probs of the text depend on it."""
    text = renderer.encode_prompt(content)
    images: tuple[ImageInput, ...] = ()
    if renderer.images is not None:
        text = [token for token in text if token != renderer.images.placeholder_id]
        image = renderer.images.prepare(make_example_image())
        images = (image,) if len(image.token_ids) < max_tokens else ()  # else prompts cannot contain images either
    token_ids = [token for image in images for token in image.token_ids]
    length = min(PROBE_TOKENS, max_tokens - len(token_ids))
    return Probe(token_ids + (text * PROBE_TOKENS)[:length], images)  # a prompt may be a single token


def make_publisher(
    workers: WorkerGroups, plan: Plan, probe: Probe, pauses_requests: bool, warn: Callable[[str], None]
) -> WeightPublisher:
    """Make the publisher of started workers. warn: shows a warning."""
    is_exact = plan.model.dtype == plan.rollout.dtype == "float32"
    tolerance = PROBE_TOLERANCE_FLOAT32 if is_exact else PROBE_TOLERANCE_BFLOAT16
    on_cpus, keeps_sent = plan.placement.device == "cpu", plan.rollout.lora == "adapter"
    groups = workers.policy, workers.engines
    return WeightPublisher(*groups, probe, tolerance, pauses_requests, on_cpus, keeps_sent, warn)


@dataclass
class WeightPublisher:
    """Sender of the policy's weights to the inference engines."""

    policy: PolicyGroup
    engines: EngineGroup
    probe: Probe
    probe_tolerance: float  # largest accepted mean difference of the probe's log-probs, in nats
    pauses_requests: bool = False  # whether requests may be running; during a publish they pause or keep their adapter
    on_cpus: bool = True  # True: weights are files, written while requests run, and dead engines are replaced
    keeps_sent_weights: bool = False  # whether sent files remain until the next version is sent (SharedAdapterSender)
    warn: Callable[[str], None] = print
    engines_hold_weights: bool = field(default=False, init=False)  # False: they sleep until the next publish
    engine_logprobs: list[list[float]] = field(default_factory=list, init=False)  # of the probe's text, per engine
    _last_logprobs: list[float] = field(default_factory=list, init=False)  # probe log-probs at the previous publish
    _sent: WeightUpdate | None = field(default=None, init=False)  # None: the current version is not sent yet
    _num_replacements: int = field(default=0, init=False)  # restarts since weights or an adapter were last loaded
    _num_replaced: int = field(default=0, init=False)  # number of engines replaced since the last publish
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def __post_init__(self) -> None:
        self.engines.replace_engine = self.replace_engine

    async def hand_over(self, pauses_requests: bool = False) -> None:
        """Let the engines free their memory, so that trainers can use the GPUs that they share. pauses_requests: first
        pause requests until the next publish."""
        self.engines_hold_weights = False
        await self.engines.sleep(pauses_requests)

    async def publish(self, version: int) -> dict[str, float]:
        """Send the weights as `version` and verify them. Shared GPUs pass from the policy to the engines.

        Engines that died are replaced. Returns `sync/probe_gap` (mean difference of the probe's log-probs between
        engine and policy, in nats), `sync/probe_moved` (mean change of the policy's log-probs since the previous
        publish), and `engines/replaced` (number of engines since the previous publish); {} with fake engines.

        Raises:
            WorkerDied: a worker died, or an engine that cannot be replaced.
            WeightSyncError: the engine's weight digests, its log-probs of the probe, or those with which it samples a
                few tokens differ from the policy's.
            FloatingPointError: the policy's weights are not finite. Nothing is sent.
        """
        async with self._lock:
            self._sent = None
            metrics = await self._publish_until_all_live(version)
            replaced, self._num_replaced, self._num_replacements = self._num_replaced, 0, 0
        return {**metrics, "engines/replaced": float(replaced)} if metrics else {}

    async def replace_engine(self, death: WorkerDied) -> None:
        """Restart an engine whose core died, and publish the version that the other engines have. The policy must not
        have changed since. Raises WorkerDied with the reason if that is not possible."""
        async with self._lock:  # several requests may report the same death
            if not isinstance(death, EngineCoreDied) or self._sent is None:
                raise death
            if await self.engines.has_dead_engine():
                await self._publish_until_all_live(self._sent.version, death)

    async def _publish_until_all_live(self, version: int, death: EngineCoreDied | None = None) -> dict[str, float]:
        """Publish a version. If engines die, restart them and publish again. death: an engine's, before the call."""
        while True:
            try:
                if death:
                    await self._restart_dead_engines(death, version)
                return await self._publish(version)
            except EngineCoreDied as error:
                death = error

    async def _restart_dead_engines(self, death: EngineCoreDied, version: int) -> None:
        cause, reason = str(death).rstrip("."), ""
        if not self.on_cpus:
            reason = "Engines on GPUs are not replaced while a run continues."
        elif self._num_replacements == MAX_REPLACEMENTS:
            reason = f"Engines were already replaced {MAX_REPLACEMENTS} times in this iteration."
        if reason:
            raise WorkerDied(f"{cause}. {reason}", death.role) from death
        self._num_replacements += 1
        self.warn(
            f"{cause}. It starts again with version {version} of the weights, and its groups are sampled again with "
            f"the same seeds (replacement {self._num_replacements} of at most {MAX_REPLACEMENTS} in this iteration)"
        )
        self._num_replaced += await self.engines.restart_dead_engines()

    async def _send_weights(self, version: int) -> WeightUpdate:
        """Send the weights. Raises WorkerDied if the same version was sent before with other weights."""
        if self._sent and self.keeps_sent_weights:
            return self._sent
        update = await self.policy.send_weights(version)
        if self._sent and update.digest != self._sent.digest:
            raise WorkerDied(
                f"an engine died, and the policy has changed since version {version} of its weights was published. "
                "Publish after each optimizer step, so that the engine can get these weights again.",
                self.engines.ranks.role,
            )
        self._sent = update
        return update

    async def _publish(self, version: int) -> dict[str, float]:
        expected = self.probe.select_text(await self.policy.compute_probe_log_probs(self.probe))
        check_probe_finite(expected, version)
        early_update = await self._send_weights(version) if self.on_cpus else None
        await self.engines.prepare_weight_sync(self.pauses_requests)  # no KV cache yet: the policy holds GPU memory
        update = early_update or await self._send_weights(version)
        receipts = await self.engines.confirm_weights(version, update.folder)
        check_weight_receipts(update, receipts)
        await self.policy.release_sent_weights()
        probe_results = await self.engines.finish_weight_sync(self.probe, self.pauses_requests)
        self.engines_hold_weights = True
        if not receipts:  # fake engines
            return {}
        last, self._last_logprobs = self._last_logprobs, expected
        moved = {"sync/probe_moved": fmean(abs(x - y) for x, y in zip(expected, last, strict=True))} if last else {}
        self.engine_logprobs = actual = [self.probe.select_text(logprobs) for logprobs, _ in probe_results]
        gap = check_probe_log_probs([expected] * len(actual), actual, self.probe_tolerance, "a fixed text")
        await self._check_samples([sample for _, sample in probe_results])
        if not last:
            self.probe_tolerance = tighten_tolerance(self.probe_tolerance, gap)
        copied = sum(receipt.copied_bytes for receipt in receipts) / 2**30
        return {"sync/probe_gap": gap, **moved, **({"sync/copied_gib": copied} if copied else {})}

    async def write_adapter(self, adapter: Adapter) -> tuple[WeightUpdate, list[float]]:
        """Write the policy's adapter to its folder. Returns its digest, and the policy's log-probs of the probe.

        Raises:
            FloatingPointError: the weights are not finite. Nothing is written.
        """
        expected = await self.compute_log_probs(adapter.version)
        return WeightUpdate(adapter.version, await self.policy.write_adapter(adapter.folder)), expected

    async def compute_log_probs(self, version: int) -> list[float]:
        """Compute the policy's log-probs of the probe's text. Raises FloatingPointError if they are not finite."""
        expected = await self.policy.compute_probe_log_probs(self._text_probe)
        check_probe_finite(expected, version)
        return expected

    async def load_adapter(self, adapter: Adapter, update: WeightUpdate, expected: Sequence[float]) -> float:
        """Load an adapter on all engines beside others, while requests run, and verify it with the result of
        write_adapter. Returns the mean difference of the probe's log-probs, in nats. Raises WeightSyncError."""
        loaded = await self.engines.load_adapter(adapter, self._text_probe.token_ids)
        check_weight_receipts(update, [WeightReceipt(adapter.version, digest) for digest, _ in loaded])
        found = [logprobs for _, logprobs in loaded]
        self._num_replacements = 0
        return check_probe_log_probs([expected] * len(found), found, self.probe_tolerance, "a fixed text")

    @property
    def _text_probe(self) -> Probe:
        placeholders = {image.placeholder_id for image in self.probe.images}
        return Probe([token for token in self.probe.token_ids if token not in placeholders])

    async def _check_samples(self, samples: list[Completion]) -> None:
        """Check that the policy's log-probs of the tokens that each engine sampled equal those of the engine."""
        start, _ = self.probe.make_sample_request()
        sampled = [tuple(sample.token_ids) for sample in samples]
        texts = {tokens: replace(self.probe, token_ids=[*start, *tokens]) for tokens in sampled}
        async with self.engines.release_kv_cache_temporarily():  # usually for one text, as all engines have one seed
            scored = {tokens: await self.policy.compute_probe_log_probs(text) for tokens, text in texts.items()}
        expected = [scored[tokens][-len(tokens) :] for tokens in sampled]
        limit = self.probe_tolerance
        allowed = limit if limit == PROBE_TOLERANCE_FLOAT32 else max(limit, SAMPLE_TOLERANCE_BFLOAT16)
        check_probe_log_probs(expected, [sample.logprobs for sample in samples], allowed, "tokens that it sampled")
