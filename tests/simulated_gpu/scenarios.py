"""Scenarios on a fake GPU: the worker methods that a run calls, for each kind of model and setting.

    python -m tests.simulated_gpu.scenarios MODELS NAME ...     # started by `run_preloaded`

Prints {scenario: {part: {"kind in place": number of host synchronizations}}} as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from alphaapollo.algorithms import policy_losses, sampling
from alphaapollo.batching.batch import MiniBatch, RankBatch, Rows
from alphaapollo.batching.packing import PreferenceBatch, build_batch_layout
from alphaapollo.config.schema import Actor, Critic, DpoConfig, RmConfig, RolloutCorrection, SftConfig, Teacher
from alphaapollo.models import sharding
from alphaapollo.models.lora import gather_scaled_adapter
from alphaapollo.types import Sampling, SamplingRequest
from alphaapollo.workers.builders import make_teacher_model_sections
from alphaapollo.workers.critic import CriticWorker
from alphaapollo.workers.finetuning_worker import SftWorker
from alphaapollo.workers.preference import PreferenceWorker, RewardTrainingWorker
from tests.simulated_gpu.fake_cuda import FakeGpu
from tests.simulated_gpu.workers import (
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
SCENARIOS: dict[str, Scenario] = {}
SMALL = {"prompt": 10, "vocabulary": 48}  # for models with a vocabulary of 48 tokens


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


@scenario
def dense(run: Recorder) -> None:
    with fake_rank():
        worker = make_policy(run.models / "qwen3", {"entropy_coeff": 0.01}, {"enable_gradient_checkpointing": True})
        update(run, worker, make_batch(worker))
        with run.record("log-probs"):
            worker.compute_log_probs()
        with run.record("log-prob mismatch"):
            worker.sum_logprob_mismatch()
        assert all(parameter.device.type == "cuda" for parameter in worker.policy.parameters())
        assert all(parameter.grad is None for parameter in worker.policy.parameters())


@scenario
def reference(run: Recorder) -> None:
    with fake_rank():
        worker = make_policy(run.models / "qwen3", {"use_kl_loss": True}, needs_reference=True)
        batch = make_batch(worker, mini_batch_size=2)
        worker.load_batch(batch.rank_batches[0])
        with run.record("reference log-probs"):
            worker.compute_log_probs("reference")
        update(run, worker, batch)


@scenario
def full_kl(run: Recorder) -> None:
    with fake_rank():
        actor = {"use_kl_loss": True, "kl_loss_type": "full"}
        worker = make_policy(run.models / "qwen3", actor, needs_reference=True)
        update(run, worker, make_batch(worker))


@scenario
def shared_prompts(run: Recorder) -> None:
    with fake_rank():
        worker = make_policy(run.models / "qwen3")
        batch = make_batch(worker, shares_prompts=True, max_tokens=400)
        update(run, worker, batch, "first update")  # with the check of shared prompts
        update(run, worker, batch, "second update")


@scenario
def offloads(run: Recorder) -> None:
    with fake_rank():
        offload = {"fsdp_config": {"param_offload": True, "optimizer_offload": True}}
        worker = make_policy(run.models / "qwen3", offload)
        batch = make_batch(worker)
        update(run, worker, batch, "first update")
        with run.record("offload"):
            worker.offload()
        update(run, worker, batch, "second update")
        worker.compute_probe_log_probs(list(range(5, 15)))


@scenario
def cpu_offload(run: Recorder) -> None:
    with fake_rank():
        worker = make_policy(run.models / "qwen3", {"fsdp_config": {"offload_policy": True}})
        assert all(parameter.device.type == "cpu" for parameter in worker.policy.parameters())
        update(run, worker, make_batch(worker))


@scenario
def lora(run: Recorder) -> None:
    with fake_rank(2):
        actor, model = {"use_kl_loss": True}, {"lora_rank": 8}
        worker = make_policy(run.models / "qwen3", actor, model, world_size=2, needs_reference=True)
        batch = make_batch(worker, world_size=2)
        worker.load_batch(batch.rank_batches[0])
        worker.compute_log_probs("reference")
        update(run, worker, batch)
        assert publish(run, worker) == 3 * 11 + 2
        with run.record("publish adapters"):
            assert len(list(gather_scaled_adapter(worker.policy.model))) == 2 * 3 * 7


@scenario
def publish_dense(run: Recorder) -> None:
    with fake_rank(8):
        assert publish(run, make_policy(run.models / "qwen3", world_size=8)) == 3 * 11 + 2


@scenario
def ulysses(run: Recorder) -> None:
    with fake_rank(2):
        actor, model = {"use_kl_loss": True, "kl_loss_type": "full"}, {"enable_gradient_checkpointing": True}
        worker = make_policy(run.models / "qwen3", actor, model, 2, 2, needs_reference=True)
        update(run, worker, make_batch(worker))


@scenario
def hsdp(run: Recorder) -> None:
    with fake_rank(4):
        actor = {"fsdp_config": {"fsdp_size": 2, "sync_each_micro_batch": False}}
        worker = make_policy(run.models / "qwen3", actor, world_size=4)
        update(run, worker, make_batch(worker, world_size=4))


@scenario
def untied_head(run: Recorder) -> None:
    with fake_rank(8):
        worker = make_policy(run.models / "llama", world_size=8)
        events = record_calls(worker.policy, "post_backward")
        update(run, worker, make_batch(worker, make_rows([20] * 16, **SMALL), 8))
        assert events[0] == "model.lm_head" and events[-1] == "", events  # the root has the embedding


def record_calls(model: torch.nn.Module, method: str) -> list[str]:
    """Record the names of FSDP's units in the order in which they are gathered (`unshard`), or in which their gradients
    are reduced (`post_backward`)."""
    events: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            group: Any = module._get_fsdp_state()._fsdp_param_group
            call = getattr(group, method)
            setattr(group, method, lambda *args, name=name, call=call: (events.append(name), call(*args)))
    return events


@scenario
def full_determinism(run: Recorder) -> None:
    with fake_rank():
        try:
            worker = make_policy(run.models / "qwen3", {"fsdp_config": {"full_determinism": True}})
            assert torch.are_deterministic_algorithms_enabled()
            update(run, worker, make_batch(worker))
        finally:
            torch.use_deterministic_algorithms(False)


@scenario
def experts(run: Recorder) -> None:
    with fake_rank(2):
        model = {"router_aux_loss_coef": 0.01, "enable_gradient_checkpointing": True}
        worker = make_policy(run.models / "qwen3_moe", {}, model, world_size=2)
        update(run, worker, make_batch(worker, make_rows([20] * 6, **SMALL), 2))


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
    with balance_experts(sharding), fake_rank(4):
        actor, model = {"fsdp_config": {"ep_size": 2}}, {"enable_gradient_checkpointing": True}
        worker = make_policy(run.models / "qwen3_moe", actor, model, world_size=4)
        events = record_calls(worker.policy, "unshard")
        FakeGpu.hints.insert(0, lambda sizes: events.append("wait") if tuple(sizes.shape) == (2, 2) else None)
        update(run, worker, make_batch(worker, make_rows([20] * 8, **SMALL), 4))
        # The second layer is gathered before the host waits for sizes of the first one.
        assert events[events.index("wait") - 1] == "model.model.layers.1.mlp.experts", events
        FakeGpu.hints.pop(0)
        publish(run, worker)


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
    with fake_rank(8), mock.patch.object(sampling, "sample_token", lambda *_: (1, -1.0)):
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
            with run.record(f"{loss}: {len(batch.mini_batches[0].micro_batches)} micro-batches"):
                worker.step(batch)


@scenario
def reward_models(run: Recorder) -> None:
    path = run.models / "qwen3"
    with fake_rank():
        worker = RewardTrainingWorker(RmConfig(model={"path": str(path)}), resolve(path), place(), 10)
        batch = make_preference_batch()
        with run.record(f"training: {len(batch.mini_batches[0].micro_batches)} micro-batches"):
            worker.step(batch)


@scenario
def losses(run: Recorder) -> None:
    with fake_rank():
        worker = make_policy(run.models / "qwen3")
        batch = make_batch(worker)
        tokens = np.zeros(int(batch.rank_batches[0].rows.response_lengths.sum()), np.uint8)
        for name in policy_losses.policy_loss_names():
            worker.actor = Actor(policy_loss={"loss_mode": name})
            worker.policy_loss = policy_losses.get_policy_loss(name)
            update(
                run, worker, batch, name, **({"selected_tokens": tokens} if worker.policy_loss.select_tokens else {})
            )
        worker.actor, worker.policy_loss = Actor(), policy_losses.get_policy_loss("ppo")
        for correction in (
            {"method": "tis"},
            {"method": "mask", "level": "sequence"},
            {"off_policy_mask_threshold": 0.1},
        ):
            worker.correction = RolloutCorrection(**correction)
            update(run, worker, batch, str(correction))


@scenario
def optimizers(run: Recorder) -> None:
    for name in ("muon", "adamw"):
        with fake_rank(4):
            worker = make_policy(run.models / "qwen3", {"optim": {"name": name}}, world_size=4)
            update(run, worker, make_batch(worker, world_size=4), name)
            worker.state.check_weights_finite = lambda: None
            with run.record(f"snapshot of {name}"):
                worker.state.snapshot("checkpoint")


@scenario
def teacher(run: Recorder) -> None:
    path = run.models / "qwen3"
    with fake_rank():
        section = Teacher(model={"path": str(path)}, divergence="reverse")
        models = make_teacher_model_sections(resolve(path), section)
        worker = make_policy(path, teacher=section, teacher_models=models)
        update(run, worker, make_batch(worker))


def train_vision(run: Recorder, name: str, **model: Any) -> None:
    from tests.vision.rows import make_row, prepare_encoded_images

    first, second, third = prepare_encoded_images(run.models / name)
    rows = [
        make_row(images, seed=i) for i, images in enumerate([(first,), (second, first), (), (third, first, second)])
    ]
    with fake_rank():
        worker = make_policy(run.models / name, {}, model)
        update(run, worker, make_batch(worker, rows, max_tokens=150))
        publish(run, worker)


@scenario
def qwen2_5_vl(run: Recorder) -> None:
    train_vision(run, "qwen2_5_vl")


@scenario
def qwen2_5_vl_with_trained_tower(run: Recorder) -> None:
    train_vision(run, "qwen2_5_vl", freeze_vision=False, enable_gradient_checkpointing=True)


@scenario
def qwen3_vl(run: Recorder) -> None:
    train_vision(run, "qwen3_vl")


@scenario
def internvl(run: Recorder) -> None:
    train_vision(run, "internvl")


@scenario
def other_models(run: Recorder) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("llama", {}),
        ("qwen2", {}),
        ("granite", {}),
        ("gemma2", {"attention": "sdpa"}),
        ("qwen2", {"attention": "padded"}),
        ("qwen2", {"dtype": "float32"}),
    ]
    for name, model in cases:
        with fake_rank():
            worker = make_policy(run.models / name, {}, model)
            update(run, worker, make_batch(worker, make_rows([20] * 6, **SMALL)), f"{name} {model}")


def main() -> None:
    models, *names = sys.argv[1:]
    found = {}
    for name in names or SCENARIOS:
        run = Recorder(Path(models))
        SCENARIOS[name](run)
        found[name] = run.parts
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
