"""Policy worker, one per training rank. It also has the frozen reference model and teachers, if they are needed.

    load_batch -> [log-probs of policy, reference and teacher] -> update(columns) -> send_weights -> offload

Computing methods are collectives and reload offloaded tensors. `offload` frees the GPU for the next worker.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from alphaapollo.algorithms.divergence import REVERSE
from alphaapollo.algorithms.mismatch import MismatchSums, sum_mismatch
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.config.schema import NO_TEACHER, Actor, LoraForm, Model, Reference, RolloutCorrection, Teacher
from alphaapollo.data.batch import Columns, MiniBatch, RankBatch
from alphaapollo.models.checkpoint.snapshot import load_snapshot, take_snapshot
from alphaapollo.models.export.hf_folder import gather_parameters
from alphaapollo.models.flops import FlopsEstimator, find_peak_flops
from alphaapollo.models.lm_head import DivergenceTarget
from alphaapollo.models.lora import disable_adapters, gather_scaled_adapter
from alphaapollo.models.micro_batch import MicroBatch, make_rows
from alphaapollo.models.moe_routing import ExpertLoadBalancer
from alphaapollo.models.policy import PolicyModel, check_policy, load_policy
from alphaapollo.models.sharding import local_tensor, reshard
from alphaapollo.models.training.offload import make_parameter_offloader
from alphaapollo.models.training.train_state import OptimizerStep, TrainState
from alphaapollo.types import ImageInput, WeightUpdate
from alphaapollo.weight_sync.transport import WeightSender
from alphaapollo.workers.model_worker import (
    MetricSums,
    TokenParts,
    TrainingWorker,
    compute_optimizer_metrics,
    compute_token_outputs,
    merge_token_values,
)
from alphaapollo.workers.policy_objective import build_objective_inputs, compute_policy_objective, normalize_metrics
from alphaapollo.workers.process_group import RankPlacement
from alphaapollo.workers.shared_prompt_check import SharedPromptCheck
from alphaapollo.workers.teacher import (
    FrozenTeacher,
    SelfTeacher,
    TeacherGroup,
    select_taught_tokens,
    sum_distillation_metrics,
)


@dataclass(frozen=True)
class PolicyWorkerConfig:
    """Settings of the policy workers, the same on all ranks."""

    model: Model  # after `resolve_model`
    actor: Actor
    ref: Reference
    needs_reference: bool
    optimizer_steps: int  # number of optimizer steps of the run, for the learning rate schedule
    temperature: float  # temperature of the rollouts; log-probs are computed at this temperature
    correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    seed: int = 0  # random seed of new adapters (LoRA)
    engine_lora_form: LoraForm = "merged"  # what is sent to the engines: complete weights, or the adapters only
    saves_in_background: bool = False
    teacher: Teacher = NO_TEACHER
    teacher_models: Mapping[str, Model] = field(default_factory=dict)  # Teacher.local_models after `resolve_model`


class PolicyWorker(TrainingWorker):
    """Worker that trains one rank of the policy.

    Args:
        sender: sends weights to the inference engines; None: weights are never sent.
    """

    def __init__(self, setup: PolicyWorkerConfig, placement: RankPlacement, sender: WeightSender | None = None):
        actor, model, fsdp = setup.actor, setup.model, setup.actor.fsdp_config
        super().__init__(model, placement, fsdp, setup.saves_in_background)
        self.actor, self.engine_lora_form, self.sender = actor, setup.engine_lora_form, sender
        self.temperature, self.correction, self.teacher_config = setup.temperature, setup.correction, setup.teacher
        self.policy_loss = get_policy_loss(actor.policy_loss.loss_mode)
        self.policy = load_policy(model, self.mesh, self.dtype, fsdp.offload_policy, setup.seed)
        self.hf_model = self.policy.model
        self.logprob_check_warnings = check_policy(self.policy, self.builder, self.dtype)
        logprobs = self.policy.make_logprobs_function(self.temperature)
        self.sharing = SharedPromptCheck(self.policy, logprobs, self.builder, self.dtype)
        self.state = TrainState(self.policy, actor, setup.optimizer_steps, "policy", "actor_rollout_ref.actor.optim")
        self.reference: PolicyModel | None = None
        ref_fsdp = setup.ref.fsdp_config
        if setup.needs_reference and not model.lora_rank:  # with LoRA the reference is the policy without adapters
            self.state.offload()  # while the reference is loaded
            self.reference = load_policy(model, self.mesh, self.dtype, ref_fsdp.offload_policy)
        self.reference_parameters = make_parameter_offloader(self.reference, ref_fsdp.param_offload)
        self.teacher = self._load_teachers(setup.teacher_models) if setup.teacher.models_by_key else None
        self.seed = setup.seed
        self.self_teacher = self.load_self_teacher() if setup.teacher.uses_self_teacher else None
        self.flops = FlopsEstimator.from_model(self.policy.model)
        self.peak_flops = find_peak_flops(torch.cuda.get_device_name()) if self.device.type == "cuda" else None
        self.has_reset_reference = False
        self.last_old_logprobs: np.ndarray | None = None
        self.offload()

    def compute_log_probs(self) -> np.ndarray:
        """Compute log-probs of the response tokens at the rollout temperature. float32 [response tokens]"""
        self.state.reload()
        self.sharing.check_batch(self.batch)
        return self._compute_log_probs(self.policy, self.batch, self.batch.mini_batches)

    def compute_ref_log_probs(self) -> np.ndarray:
        """Compute log-probs of the response tokens under the reference model. float32 [response tokens]"""
        with self._use_reference_model() as reference:
            column = self._compute_log_probs(reference, self.batch, self.batch.mini_batches, replays_routing=False)
        self.reference_parameters.offload()
        return column

    def compute_teacher_log_probs(self) -> np.ndarray:
        """Compute log-probs of the response tokens under the teachers on the ranks. float32 [response tokens]"""
        assert self.teacher is not None, "this worker has no teacher"
        return self.teacher.compute_log_probs(self.batch)

    def update(
        self,
        columns: Columns[np.ndarray],
        mini_batches: Sequence[MiniBatch] | None = None,
        skip_bad_step: bool = False,
        measures_entropy: bool = True,
    ) -> dict[str, float]:
        """Train on the loaded batch and return metrics over all ranks.

        If `columns` has no old log-probs, the policy's log-probs before the first optimizer step are used. For the
        first mini-batch, they are taken from its training forward pass.

        Args:
            columns: advantages etc. of all rows of the batch.
            mini_batches: mini-batches to train on, if some rows are left out; None: those of the loaded batch.
            skip_bad_step: skip an optimizer step with a non-finite gradient instead of raising FloatingPointError.
            measures_entropy: compute the entropy also if the loss does not need it.

        Raises ValueError if the first batch shares prompts and the model does not support shared prompts.
        """
        batch, sums = self.batch, MetricSums(self.data_group)
        mini_batches = batch.mini_batches if mini_batches is None else mini_batches
        self.state.reload()
        self.sharing.check_batch(batch)
        if self.teacher is not None and self.teacher_config.uses_full_vocabulary:
            self.teacher.reload_and_check_batch(batch)
        balancer = self.make_expert_load_balancer(self.policy.routers)
        needs_entropy = measures_entropy or self.actor.entropy_coeff > 0
        old, records_old = columns.old_logprobs, columns.old_logprobs is None
        if old is None:
            old = self._compute_log_probs(self.policy, batch, mini_batches[1:])
        started = time.perf_counter()
        done: list[OptimizerStep] = []
        for epoch in range(self.actor.ppo_epochs):
            for index, mini_batch in enumerate(mini_batches):
                recorded_logprobs: TokenParts | None = [] if records_old and epoch == index == 0 else None
                if balancer:
                    balancer.begin_step(batch.rows, mini_batch.row_indices)
                for row_indices in self.state.iterate_micro_batches(mini_batch.micro_batches):
                    self._accumulate_gradients(
                        row_indices,
                        replace(columns, old_logprobs=old),
                        recorded_logprobs,
                        needs_entropy,
                        sums,
                        balancer,
                    )
                done.append(self.state.step(skip_bad_step))
                if self.self_teacher is not None:
                    self.self_teacher.follow(self.policy, self.teacher_config.self_teacher.ema_rate)
                if recorded_logprobs is not None:
                    old = merge_token_values(batch.rows, recorded_logprobs, old)
        self.last_old_logprobs, self.last_mini_batches = old, mini_batches
        self.last_trajectory_ids = columns.trajectory_ids
        totals = sums.reduce(self.device)
        metrics = normalize_metrics(totals, len(done)) | compute_optimizer_metrics(done, self.actor.grad_clip)
        metrics |= {"optimizer_steps": float(len(done)), "tokens": totals["tokens"]}
        metrics |= self.sharing.pop_metrics() | (balancer.compute_metrics() if balancer else {})
        metrics |= self._compute_mfu(mini_batches, time.perf_counter() - started)
        return {name if "/" in name else f"actor/{name}": value for name, value in metrics.items()}

    def get_old_log_probs(self) -> np.ndarray:
        """Return the old log-probs that the last `update` used. float32 [response tokens]"""
        assert self.last_old_logprobs is not None, "call update first"
        return self.last_old_logprobs

    def sum_logprob_mismatch(self) -> MismatchSums:
        """Compare these log-probs with those of the engine, for the action tokens that the last `update` trained on."""
        rows, trained = self.batch.rows, np.zeros(len(self.batch.rows), dtype=bool)
        trained[[row for mini_batch in self.last_mini_batches for row in mini_batch.row_indices]] = True
        tokens = np.flatnonzero(rows.action_mask & np.repeat(trained, rows.response_lengths))
        row = np.repeat(np.arange(len(rows)), rows.response_lengths)[tokens]
        assert self.last_trajectory_ids is not None
        return sum_mismatch(
            self.get_old_log_probs()[tokens],
            rows.rollout_logprobs[tokens],
            self.last_trajectory_ids[row],
            tokens - rows.response_offsets[row],
        )

    def send_weights(self, version: int) -> WeightUpdate | None:
        """Send the weights to the inference engines. Returns None on ranks that only help to gather the weights."""
        assert self.sender is not None, "this worker has no sender"
        model = self.policy.model
        if self.engine_lora_form == "adapter":  # the base model can stay in host memory
            return self.sender.send(gather_scaled_adapter(model), version)
        self.state.reload()
        return self.sender.send(gather_parameters(model, self.dtype), version)

    def release_sent_weights(self) -> None:
        """Free the memory of the sent weights and offload the policy, after all engines have received the weights."""
        if self.sender is not None:
            self.sender.release_sent_weights()
        self.offload()

    def offload(self) -> None:
        if self.reference is not None:
            reshard(self.reference)
            self.reference_parameters.offload()
        for teacher in (self.teacher, self.self_teacher):
            if teacher is not None:
                teacher.offload()
        super().offload()

    @torch.no_grad()
    def compute_probe_log_probs(self, token_ids: list[int], images: tuple[ImageInput, ...] = ()) -> list[float]:
        """Compute log-probs (temperature 1) of all tokens but the first, to verify engines. Then offload the policy.

        images: pictures whose placeholders are in `token_ids`, in order.
        """
        self.state.reload()
        rows = make_rows([np.array(token_ids)], [1], images=[images])
        logprobs = self.policy(self.builder.build(rows, [0]), 1.0).logprobs.tolist()
        reshard(self.policy)
        self.offload()
        return logprobs

    @torch.no_grad()
    def reset_reference_and_optimizer(self) -> None:
        """Copy the policy's weights into the reference model and reset the optimizer (arXiv 2505.24864, section 2.3.1).

        The learning rate schedule continues.
        """
        assert self.reference is not None, "this worker has no reference"
        self.state.reload()
        self.reference_parameters.reload()
        pairs = zip(self.reference.parameters(), self.policy.parameters(), strict=True)
        for frozen, trained in pairs:
            local_tensor(frozen).copy_(local_tensor(trained))
        self.has_reset_reference = True
        self.state.reset_optimizer()

    def save(self, checkpoint_folder: str) -> None:
        parts = [self.state.snapshot(checkpoint_folder)]
        if self.reference is not None and self.has_reset_reference:
            self.reference_parameters.reload()
            parts.append(take_snapshot(f"{checkpoint_folder}/reference", self.reference, (), {}))
        if self.self_teacher is not None:
            parts.append(self.self_teacher.snapshot(checkpoint_folder))
        self.writer.start(parts)

    def load(self, checkpoint_folder: str) -> None:
        super().load(checkpoint_folder)
        self.has_reset_reference = self.reference is not None and Path(checkpoint_folder, "reference").is_dir()
        if self.reference is not None and self.has_reset_reference:
            self.reference_parameters.reload()
            load_snapshot(f"{checkpoint_folder}/reference", self.reference, ())
        if self.self_teacher is not None:
            self.state.reload()
            self.self_teacher.load(checkpoint_folder, self.policy)
            self.offload()

    def load_self_teacher(self) -> SelfTeacher:
        """Load a self-teacher with the initial weights of the policy."""
        self.state.offload()
        self.reference_parameters.offload()
        return SelfTeacher(self.config, self.actor.fsdp_config, self.mesh, self.seed)

    def _load_teachers(self, models: Mapping[str, Model]) -> TeacherGroup:
        self.state.offload()  # while the teachers are loaded
        self.reference_parameters.offload()
        vocabulary = self.policy.model.get_output_embeddings().weight.shape[0]
        loaded = {
            key: FrozenTeacher(models[key], teacher.fsdp_config, self.mesh, self.builder, self.temperature, vocabulary)
            for key, teacher in self.teacher_config.local_models.items()
        }
        group = TeacherGroup(self.teacher_config, loaded)
        self.sharing.unsupported_reason = self.sharing.unsupported_reason or group.sharing_obstacle
        return group

    @contextmanager
    def _use_reference_model(self) -> Iterator[PolicyModel]:
        """Yield the reference model with its weights on the device; with LoRA, the policy without its adapters."""
        if self.reference is not None:
            self.reference_parameters.reload()
            yield self.reference
            return
        assert self.config.lora_rank, "this worker has no reference"
        self.state.reload()
        with disable_adapters(self.policy):
            yield self.policy

    def _compute_log_probs(
        self, model: PolicyModel, batch: RankBatch, mini_batches: Sequence[MiniBatch], replays_routing: bool = True
    ) -> np.ndarray:
        """Compute log-probs of the rows in `mini_batches`, and 0 for other rows. float32 [response tokens]"""
        compute = model.make_logprobs_function(self.temperature, replays_routing)
        return compute_token_outputs(model, compute, batch.rows, mini_batches, self.builder)

    def _accumulate_gradients(
        self,
        row_indices: list[int],
        columns: Columns[np.ndarray],
        recorded_logprobs: TokenParts | None,
        needs_entropy: bool,
        metric_sums: MetricSums,
        balancer: ExpertLoadBalancer | None,
    ) -> None:
        """Run the forward and backward pass of one micro-batch.

        recorded_logprobs: if not None, this pass's log-probs are appended to this list and used as old log-probs.
        """
        micro = self.builder.build(self.batch.rows, row_indices, replace(columns, returns=None, values=None))
        target = self._make_divergence_target(micro, row_indices)
        stats = self.policy(micro, self.temperature, needs_entropy, target)
        old = None
        if recorded_logprobs is not None:
            old = stats.logprobs.detach()
            recorded_logprobs.append((row_indices, micro.drop_dummy_row(old)))
        matrices = build_objective_inputs(micro, stats, old)
        loss, metrics = compute_policy_objective(
            matrices, self.actor, self.policy_loss, self.correction, self.teacher_config
        )
        if balancer:
            loss = loss + balancer.compute_last_pass_loss()
        (loss * self.placement.world_size).backward()  # FSDP averages over the ranks; the loss weights are global
        taught = micro.mask if self.self_teacher is None else select_taught_tokens(micro)
        metric_sums.add(metrics | sum_distillation_metrics(stats, taught))

    @torch.no_grad()
    def _make_divergence_target(self, micro: MicroBatch, row_indices: list[int]) -> DivergenceTarget | None:
        """Return the teacher's or reference's next-token distributions, if the loss compares the policy's with them."""
        if self.self_teacher is not None:
            longer = self.builder.build(self.batch.rows.teacher_rows, row_indices)
            return self.self_teacher.make_divergence_target(micro, longer, self.teacher_config)
        if self.teacher is not None and self.teacher_config.uses_full_vocabulary:
            return self.teacher.make_divergence_target(micro, self.teacher_config)
        if not self.actor.uses_full_kl:
            return None
        with self._use_reference_model() as reference:
            return DivergenceTarget(reference.compute_lm_head_input(replace(micro, routed_experts=None)), REVERSE)

    def _compute_mfu(self, mini_batches: Sequence[MiniBatch], seconds: float) -> dict[str, float]:
        """Compute the model FLOP/s utilization (MFU) of an update. {} if the peak FLOP/s of the device are unknown."""
        if self.peak_flops is None or self.flops is None:
            return {}
        micro_batches = [micro for mini_batch in mini_batches for micro in mini_batch.micro_batches]
        rows, estimate = self.batch.rows, self.flops.estimate_training_flops
        flops = sum(estimate(*rows.get_segment_and_prefix_lengths(micro)) for micro in micro_batches)
        rank_flops = self.actor.ppo_epochs * flops / self.placement.sequence_parallel_size
        return {"perf/mfu/actor": rank_flops / seconds / self.peak_flops}
