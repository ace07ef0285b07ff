"""Scenarios on a fake GPU: the worker methods that a run calls, for each kind of model and setting.

    python -m tests.simulated_gpu.scenarios MODELS NAME ...     # started by `run_preloaded`

Prints {"waits": {scenario: {part: {"kind in place": number of host synchronizations}}}} as JSON, and the same for
"work": numbers of kernels, and bytes of collectives.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from alphaapollo.algorithms import policy_losses, sampling
from alphaapollo.batching.batch import BatchLayout, MiniBatch, RankBatch, Rows
from alphaapollo.batching.packing import PreferenceBatch, build_batch_layout
from alphaapollo.config.schema import Actor, Critic, DpoConfig, RmConfig, RolloutCorrection, SftConfig, Teacher
from alphaapollo.models import expert_parallel
from alphaapollo.models.lora import gather_scaled_adapter
from alphaapollo.types import Row, Sampling, SamplingRequest
from alphaapollo.workers.builders import make_teacher_model_sections
from alphaapollo.workers.critic import CriticWorker
from alphaapollo.workers.finetuning_worker import SftWorker
from alphaapollo.workers.policy import PolicyWorker
from alphaapollo.workers.preference import PreferenceWorker, RewardTrainingWorker
from tests.simulated_gpu.counts import count_update
from tests.simulated_gpu.fake_cuda import FakeGpu
from tests.simulated_gpu.workers import (
    VISION_MODELS,
    Recorder,
    fake_rank,
    make_batch,
    make_columns,
    make_policy,
    make_rows,
    place,
    publish,
    resolve,
    update,
)

Scenario = Callable[[Recorder], None]
KL, FULL_KL = {"use_kl_loss": True}, {"use_kl_loss": True, "kl_loss_type": "full"}
RECOMPUTED = {"enable_gradient_checkpointing": True}
OFFLOADED = {"fsdp_config": {"param_offload": True, "optimizer_offload": True}}


@dataclass(frozen=True)
class PolicyUpdate:
    """Update of a policy, with the host synchronizations that it needs, and what follows it (a key of PARTS)."""

    model: str = "qwen3"
    actor: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # of the model section
    world_size: int = 1
    sequence_parallel: int = 1
    needs_reference: bool = False
    has_teacher: bool = False
    num_rows: int = 0  # rows of 20 tokens, of a vocabulary of 48; 0: those of make_batch
    batch: dict[str, Any] = field(default_factory=dict)  # further arguments of make_batch
    expected: dict[str, int] | int | None = field(default_factory=count_update)  # a number: so many more than usual
    parts: tuple[str, ...] = ()

    def __call__(self, run: Recorder) -> None:
        with fake_rank(self.world_size):
            worker, batch = self.start(run)
            update(run, worker, batch)
            for part in self.parts:
                with run.record(part):
                    PARTS[part][0](worker)
                if part == "offload":
                    update(run, worker, batch, "later update")
            device = "cpu" if self.actor.get("fsdp_config", {}).get("offload_policy") else "cuda"
            assert all(parameter.device.type == device for parameter in worker.policy.parameters())
            assert all(parameter.grad is None for parameter in worker.policy.parameters())

    def start(self, run: Recorder) -> tuple[PolicyWorker, BatchLayout]:
        path, teacher = run.models / self.model, {}
        if self.has_teacher:
            section = Teacher(model={"path": str(path)}, divergence="reverse")
            models = make_teacher_model_sections(resolve(path), section)
            teacher = {"teacher": section, "teacher_models": models}
        sizes = self.world_size, self.sequence_parallel
        worker = make_policy(path, self.actor, self.settings, *sizes, needs_reference=self.needs_reference, **teacher)
        rows = make_rows([20] * self.num_rows, prompt=10, vocabulary=48) if self.num_rows else None
        rows = make_rows_with_images(path) if self.model in VISION_MODELS else rows
        return worker, make_batch(worker, rows, self.world_size // self.sequence_parallel, **self.batch)


def make_rows_with_images(folder: Path) -> list[Row]:
    from tests.vision.rows import make_row, prepare_encoded_images

    first, second, third = prepare_encoded_images(folder)
    images = [(first,), (second, first), (), (third, first, second)]
    return [make_row(images_of_row, seed=index) for index, images_of_row in enumerate(images)]


def publish_adapters(worker: PolicyWorker) -> None:
    assert len(list(gather_scaled_adapter(worker.policy.model))) == 2 * 3 * 7


def take_snapshot(worker: PolicyWorker) -> None:
    worker.state.check_weights_finite = lambda: None
    worker.state.snapshot("checkpoint")


MERGED = {"copy to cpu in workers/model_worker.py merge_token_values": 1}
BUCKET = {
    "event.synchronize in engines/weight_sync/buckets.py prefetch_buckets": 1,
    "item in engines/weight_sync/digest.py compute_joint_digest": 1,
}
PARTS: dict[str, tuple[Callable[[Any], Any], dict[str, int] | None]] = {  # calls and their expected synchronizations
    "log-probs": (lambda worker: worker.compute_log_probs(), MERGED),
    "reference log-probs": (lambda worker: worker.compute_log_probs("reference"), MERGED),
    "log-prob mismatch": (lambda worker: worker.sum_logprob_mismatch(), {}),
    "probe": (lambda worker: worker.compute_probe_log_probs(list(range(5, 15))), None),
    "offload": (lambda worker: worker.offload(), None),
    "publish": (publish, BUCKET),
    "publish adapters": (publish_adapters, {}),
    "snapshot": (take_snapshot, {}),
}

IMAGES = {"max_tokens": 150}
COPIES = {"fsdp_config": {"fsdp_size": 2, "sync_each_micro_batch": False}}
UPDATES = {
    "dense": PolicyUpdate(actor={"entropy_coeff": 0.01}, settings=RECOMPUTED, parts=("log-probs", "log-prob mismatch")),
    "reference": PolicyUpdate(
        actor=KL,
        needs_reference=True,
        batch={"mini_batch_size": 2},
        expected=count_update(3, old=2),
        parts=("reference log-probs",),
    ),
    "full KL": PolicyUpdate(actor=FULL_KL, needs_reference=True),
    "shared prompts": PolicyUpdate(  # which are checked in the first update
        batch={"shares_prompts": True, "max_tokens": 400}, expected=count_update(prompts=1), parts=("offload",)
    ),
    "selective": PolicyUpdate(settings={"enable_gradient_checkpointing": "selective"}, num_rows=6),
    "offloaded inputs": PolicyUpdate(settings=RECOMPUTED | {"activation_offload": True}, world_size=8, num_rows=16),
    "offloaded": PolicyUpdate(actor=OFFLOADED, parts=("offload", "probe")),
    "offloaded by FSDP": PolicyUpdate(actor={"fsdp_config": {"offload_policy": True}}, expected=None),
    "adapters": PolicyUpdate(
        actor=KL, settings={"lora_rank": 8}, world_size=2, needs_reference=True, parts=("publish", "publish adapters")
    ),
    "eight ranks": PolicyUpdate(world_size=8, parts=("publish",), num_rows=16),
    "five layers": PolicyUpdate("qwen3_deep", world_size=8, parts=("publish",), num_rows=16),
    "Ulysses": PolicyUpdate(
        actor=FULL_KL, settings=RECOMPUTED, world_size=2, sequence_parallel=2, needs_reference=True
    ),
    "copies": PolicyUpdate(actor=COPIES, world_size=4),
    "experts": PolicyUpdate(
        "qwen3_moe",
        {},
        RECOMPUTED | {"router_aux_loss_coef": 0.01},
        2,
        num_rows=6,
        expected=count_update(expert_metrics=1),
    ),
    "Muon": PolicyUpdate(actor={"optim": {"name": "muon"}}, world_size=4, parts=("snapshot",)),
    "AdamW": PolicyUpdate(actor={"optim": {"name": "adamw"}}, world_size=4, parts=("snapshot",)),
    "teacher": PolicyUpdate(has_teacher=True),
    "trained tower": PolicyUpdate("qwen2_5_vl", {}, RECOMPUTED | {"freeze_vision": False}, batch=IMAGES, expected=9),
    "qwen2_5_vl": PolicyUpdate("qwen2_5_vl", batch=IMAGES, expected=9, parts=("publish",)),
    "qwen3_vl": PolicyUpdate("qwen3_vl", batch=IMAGES, expected=11, parts=("publish",)),
    "internvl": PolicyUpdate("internvl", batch=IMAGES, parts=("publish",)),
    "llama": PolicyUpdate("llama", num_rows=6),
    "granite": PolicyUpdate("granite", num_rows=6),
    "gemma2": PolicyUpdate("gemma2", settings={"attention": "sdpa"}, num_rows=6),
    "qwen2": PolicyUpdate("qwen2", num_rows=6),
    "padded": PolicyUpdate("qwen2", settings={"attention": "padded"}, num_rows=6),
    "float32": PolicyUpdate("qwen2", settings={"dtype": "float32"}, num_rows=6),
}
SCENARIOS: dict[str, Scenario] = dict(UPDATES)


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


@scenario
def full_determinism(run: Recorder) -> None:
    try:
        PolicyUpdate(actor={"fsdp_config": {"full_determinism": True}})(run)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def record_gathered_units(model: torch.nn.Module) -> list[str]:
    """Record the names of FSDP's units in the order in which they are gathered."""
    events: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            group: Any = module._get_fsdp_state()._fsdp_param_group
            call = group.unshard
            group.unshard = lambda *args, name=name, call=call: (events.append(name), call(*args))
    return events


def balance_experts(module: Any) -> Any:
    """Patch `_exchange_and_compute`: half of the token-expert pairs go to each of two ranks."""
    exchange = module._exchange_and_compute

    def exchange_balanced(compute: Any, num_experts: int, group: Any, hidden: Any, chosen: Any, weights: Any) -> Any:
        half = [chosen.numel() // 2, chosen.numel() - chosen.numel() // 2]
        FakeGpu.hints.append(lambda sizes: [half, half] if tuple(sizes.shape) == (2, 2) else None)
        try:
            return exchange(compute, num_experts, group, hidden, chosen, weights)
        finally:
            FakeGpu.hints.pop()

    return mock.patch.object(module, "_exchange_and_compute", exchange_balanced)


@scenario
def expert_parallelism(run: Recorder) -> None:
    """The second layer is gathered before the host waits for sizes of the first one."""
    actor = {"fsdp_config": {"ep_size": 2}}
    with balance_experts(expert_parallel), fake_rank(4):
        worker, batch = PolicyUpdate("qwen3_moe", actor, RECOMPUTED, world_size=4, num_rows=8).start(run)
        events = record_gathered_units(worker.policy)
        FakeGpu.hints.insert(0, lambda sizes: events.append("wait") if tuple(sizes.shape) == (2, 2) else None)
        update(run, worker, batch)
        assert events[events.index("wait") - 1] == "model.model.layers.1.mlp.experts", events
        FakeGpu.hints.pop(0)
        with run.record("publish"):
            publish(worker)


@scenario
def critic(run: Recorder) -> None:
    with fake_rank():
        worker = CriticWorker(resolve(run.models / "qwen3"), Critic(), place(), 10, 0)
        batch = make_batch(worker)
        worker.load_batch(batch.rank_batches[0])
        with run.record("values"):
            worker.compute_values()
        zeros = np.zeros(int(batch.rank_batches[0].rows.response_lengths.sum()), np.float32)
        with run.record("update"):
            worker.update(make_columns(batch, returns=zeros, values=zeros))


@scenario
def sft(run: Recorder) -> None:
    path = run.models / "qwen3"
    with fake_rank(8), mock.patch.object(sampling, "sample_among_kept", lambda *_: (1, -1.0, ())):
        worker = SftWorker(SftConfig(model={"path": str(path)}), resolve(path), place(8), 10)
        batch = make_batch(worker, make_rows([20] * 16), 8).rank_batches[0]
        with run.record("step"):
            worker.step(batch)
        with run.record("evaluation"):
            worker.evaluate(batch)
        request = SamplingRequest(token_ids=[5, 6, 7], sampling=Sampling(max_tokens=3))
        with run.record("sampling of 3 tokens"):
            worker.generate([request], 0)


def make_preference_batch(is_single: bool = False) -> PreferenceBatch:
    """Four pairs, or eight single answers, of two data sources."""
    rows, group = make_rows([20] * 8, prompt=12), 1 if is_single else 2
    ids = [index // group for index in range(8)]
    layout = build_batch_layout(rows, ids, 1, 8, 200, False, needs_full_sequence=True)
    batch, places = layout.rank_batches[0], np.arange(8)
    unrelated = RankBatch(Rows.from_rows(rows if is_single else []), [MiniBatch([[0, 1], [2, 3]] if is_single else [])])
    return PreferenceBatch(
        rows=batch.rows,
        mini_batches=batch.mini_batches,
        is_good=places % 2 == 0,
        margins=np.zeros(8),
        sources=places // 2 % 2,
        source_names=["a", "b"],
        ref_logps=np.zeros(8),
        unrelated_answers=unrelated,
        unrelated_ref_logps=np.zeros(8) if is_single else None,
    )


@scenario
def preferences(run: Recorder) -> None:
    path = run.models / "qwen3"
    for loss in ("sigmoid", "kto"):
        config = DpoConfig(model={"path": str(path)}, preference={"loss": loss})
        with fake_rank():
            worker, batch = PreferenceWorker(config, resolve(path), place(), 10), make_preference_batch(loss == "kto")
            with run.record(loss):
                worker.step(batch)


@scenario
def reward_models(run: Recorder) -> None:
    path = run.models / "qwen3"
    with fake_rank():
        worker = RewardTrainingWorker(RmConfig(model={"path": str(path)}), resolve(path), place(), 10)
        batch = make_preference_batch()
        with run.record("step"):
            worker.step(batch)


CORRECTIONS: list[dict[str, Any]] = [
    {"method": "tis"},
    {"method": "mask", "level": "sequence"},
    {"off_policy_mask_threshold": 0.1},
]


@scenario
def losses(run: Recorder) -> None:
    with fake_rank():
        worker, batch = PolicyUpdate().start(run)
        tokens = int(batch.rank_batches[0].rows.response_lengths.sum())
        for name in policy_losses.policy_loss_names():
            worker.actor = Actor(policy_loss={"loss_mode": name})
            worker.policy_loss = policy_losses.get_policy_loss(name)
            chosen = {"selected_tokens": np.zeros(tokens, np.uint8)} if worker.policy_loss.select_tokens else {}
            update(run, worker, batch, name, **chosen)
        worker.actor, worker.policy_loss = Actor(), policy_losses.get_policy_loss("ppo")
        update(run, worker, batch, "given old log-probs", old_logprobs=np.zeros(tokens, np.float32))
        for correction in CORRECTIONS:
            worker.correction = RolloutCorrection(**correction)
            update(run, worker, batch, str(correction))


def main() -> None:
    models, *names = sys.argv[1:]
    found: dict[str, dict[str, Any]] = {"waits": {}, "work": {}}
    for name in names or SCENARIOS:
        run = Recorder(Path(models))
        SCENARIOS[name](run)
        found["waits"][name], found["work"][name] = run.parts, run.work
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
