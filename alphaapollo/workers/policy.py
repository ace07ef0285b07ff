"""Policy worker, one per training rank, with the companions that the run needs, e.g. a frozen reference model.

    load_batch -> [log-probs of policy and companions] -> update(columns) -> send_weights -> offload

Computing methods are collectives and reload offloaded tensors. `offload` frees the GPU for the next worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alphaapollo.algorithms.mismatch import MismatchSums, sum_mismatch
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.algorithms.policy_losses.ppo import old_policy_penalty
from alphaapollo.algorithms.statistics import clamp_log_ratio
from alphaapollo.batching.batch import Columns, MiniBatch
from alphaapollo.config.schema import NO_TEACHER, Actor, LoraForm, Model, Reference, RolloutCorrection, Teacher
from alphaapollo.models.export import gather_parameters
from alphaapollo.models.lora import gather_scaled_adapter
from alphaapollo.models.micro_batch import make_rows
from alphaapollo.models.policy import check_policy, load_policy
from alphaapollo.models.sharding import reshard
from alphaapollo.models.train_state import OptimizerStep, TrainState
from alphaapollo.types import ImageInput, WeightUpdate
from alphaapollo.weight_sync.transport import WeightSender
from alphaapollo.workers.companion import (
    REFERENCE,
    Companion,
    FrozenReference,
    MfuMeter,
    ReferenceModel,
    SharedPromptCheck,
)
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
from alphaapollo.workers.teacher import load_teacher
from alphaapollo.workers.trust_region import TrustRegion


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
        self.temperature, self.correction, self.seed = setup.temperature, setup.correction, setup.seed
        self.policy_loss = get_policy_loss(actor.policy_loss.loss_mode)
        self.policy = load_policy(model, self.mesh, self.dtype, fsdp.offload_policy, setup.seed)
        self.hf_model = self.policy.model
        self.logprob_check_warnings = check_policy(self.policy, self.builder, self.dtype)
        self.sample_logprobs = self.policy.make_logprobs_function(self.temperature)
        self.shared_prompts = SharedPromptCheck(self.policy, self.sample_logprobs, self.builder, self.dtype)
        self.state = TrainState(self.policy, actor, setup.optimizer_steps, "policy", "actor_rollout_ref.actor.optim")
        self.companions: list[Companion] = [self.shared_prompts, MfuMeter(self)]
        self.trust_region = TrustRegion(self) if actor.optim.name == "trpo" else None
        if self.trust_region:
            self.companions.append(self.trust_region)
        self.offload()  # while the companions are loaded
        if setup.teacher.divergence:
            self.companions.append(load_teacher(self, setup.teacher, setup.teacher_models))
        if setup.needs_reference:
            reference = ReferenceModel(self) if model.lora_rank else FrozenReference(self, setup.ref.fsdp_config)
            self.companions.append(reference)
        self.last_old_logprobs: np.ndarray | None = None
        self.offload()

    def find(self, role: str) -> Any:
        """Return the companion with this role; None if the run has none."""
        return next((one for one in self.companions if one.role == role), None)

    def compute_log_probs(self, role: str = "policy") -> np.ndarray:
        """Compute log-probs of the response tokens at the rollout temperature. float32 [response tokens]. role: that of
        a companion with a model, e.g. "reference", or "policy"."""
        if role != "policy":
            column: np.ndarray = self.find(role).compute_log_probs(self.batch)
            return column
        self.state.reload()
        self.shared_prompts.begin_update(self.batch)
        return self._compute_log_probs(self.batch.mini_batches)

    def update(
        self,
        columns: Columns[np.ndarray],
        mini_batches: Sequence[MiniBatch] | None = None,
        skip_bad_step: bool = False,
        measures_entropy: bool = True,
        kl_coef: float | None = None,
    ) -> dict[str, float]:
        """Train on the loaded batch and return metrics over all ranks.

        If `columns` has no old log-probs, the policy's log-probs before the first optimizer step are used. For the
        first mini-batch, they are taken from its training forward pass.

        Args:
            columns: advantages etc. of all rows of the batch.
            mini_batches: mini-batches to train on, if some rows are left out; None: those of the loaded batch.
            skip_bad_step: skip an optimizer step with a non-finite gradient instead of raising FloatingPointError.
            measures_entropy: compute the entropy also if the loss does not need it.
            kl_coef: coefficient of ppo_kl; None: the configured one.

        Raises ValueError if the first batch shares prompts and the model does not support shared prompts.
        """
        batch, sums, self.kl_coef = self.batch, MetricSums(self.data_group), kl_coef
        mini_batches = batch.mini_batches if mini_batches is None else mini_batches
        self.state.reload()
        self.shared_prompts.begin_update(batch)
        self.balancer = self.make_expert_load_balancer(self.policy.routers)
        needs_entropy = measures_entropy or self.actor.entropy_coeff > 0
        region, old = self.trust_region, columns.old_logprobs
        records_old = old is None and region is None  # the line search also needs those of the first mini-batch
        if old is None:
            old = self._compute_log_probs(mini_batches[records_old:])
        for companion in self.companions:
            companion.begin_update(batch)
        done: list[OptimizerStep] = []
        for epoch in range(self.actor.ppo_epochs):
            for index, mini_batch in enumerate(mini_batches):
                recorded_logprobs: TokenParts | None = [] if records_old and epoch == index == 0 else None
                inputs = replace(columns, old_logprobs=old, returns=None, values=None)
                compute_loss = partial(self._compute_loss, inputs, recorded_logprobs, needs_entropy, sums)
                evaluate_loss = partial(self._compute_loss, inputs, None, self.actor.entropy_coeff > 0)
                self.state.take_step = partial(region.take_step, mini_batch, evaluate_loss) if region else None
                done.append(self.run_step(batch.rows, mini_batch, compute_loss, skip_bad_step))
                for companion in self.companions:
                    companion.end_step(batch.rows, mini_batch)
                if recorded_logprobs is not None:
                    old = merge_token_values(batch.rows, recorded_logprobs, old)
        self.last_old_logprobs, self.last_mini_batches = old, mini_batches
        self.last_trajectory_ids = columns.trajectory_ids
        totals = sums.reduce(self.device)
        metrics = normalize_metrics(totals, len(done)) | compute_optimizer_metrics(done, self.actor.grad_clip)
        metrics |= {"optimizer_steps": float(len(done)), "tokens": totals["tokens"]}
        metrics |= self.balancer.compute_metrics() if self.balancer else {}
        if self.actor.policy_loss.adapts_kl_coef:
            metrics |= self._measure_policy_kl(columns.loss_weights)
        for companion in self.companions:
            metrics |= companion.pop_metrics()
        return {name if "/" in name else f"actor/{name}": value for name, value in metrics.items()}

    def get_old_log_probs(self) -> np.ndarray:
        """Return the old log-probs that the last `update` used. float32 [response tokens]"""
        assert self.last_old_logprobs is not None, "call update first"
        return self.last_old_logprobs

    def sum_logprob_mismatch(self) -> MismatchSums:
        """Compare these log-probs with those of the engine, for the action tokens that the last `update` trained on."""
        rows, tokens = self.batch.rows, self._find_trained_tokens()
        row = np.repeat(np.arange(len(rows)), rows.response_lengths)[tokens]
        assert self.last_trajectory_ids is not None
        return sum_mismatch(
            self.get_old_log_probs()[tokens],
            rows.rollout_logprobs[tokens],
            self.last_trajectory_ids[row],
            tokens - rows.response_offsets[row],
        )

    def _find_trained_tokens(self) -> np.ndarray:
        """Return the positions of the action tokens that the last `update` trained on, among all response tokens."""
        rows, trained = self.batch.rows, np.zeros(len(self.batch.rows), dtype=bool)
        trained[[row for mini_batch in self.last_mini_batches for row in mini_batch.row_indices]] = True
        return np.flatnonzero(rows.action_mask & np.repeat(trained, rows.response_lengths))

    def _measure_policy_kl(self, loss_weights: np.ndarray | None) -> dict[str, float]:
        """Estimate KL(old||new) of this update in nats per token, weighted as in the loss (a collective)."""
        assert loss_weights is not None
        new, tokens = self._compute_log_probs(self.last_mini_batches), self._find_trained_tokens()
        d = torch.from_numpy((new - self.get_old_log_probs())[tokens].astype(np.float64))
        weights = torch.from_numpy(np.repeat(loss_weights, self.batch.rows.response_lengths)[tokens].astype(np.float64))
        sums = MetricSums(self.data_group)
        sums.add({"kl": (weights * old_policy_penalty(clamp_log_ratio(d))).sum(), "weights": weights.sum()})
        totals = sums.reduce(self.device)
        return {"policy_kl": totals["kl"] / (totals["weights"] or 1.0)}

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
        for companion in self.companions:
            companion.offload()
        super().offload()

    @torch.no_grad()
    def compute_probe_log_probs(self, token_ids: list[int], images: tuple[ImageInput, ...] = ()) -> list[float]:
        """Compute log-probs (temperature 1) of all tokens but the first, to verify engines. Then offload the policy."""
        self.state.reload()
        rows = make_rows([np.array(token_ids)], [1], images=[images])
        logprobs = self.policy(self.builder.build(rows, [0]), 1.0).logprobs.tolist()
        reshard(self.policy)
        self.offload()
        return logprobs

    def reset_reference_and_optimizer(self) -> None:
        """Copy the policy's weights into the reference model and reset the optimizer (arXiv 2505.24864, section 2.3.1).

        The learning rate schedule continues.
        """
        self.find(REFERENCE).copy_policy()
        self.state.reset_optimizer()

    def save(self, checkpoint_folder: str) -> None:
        parts = [one for companion in self.companions for one in companion.snapshot(checkpoint_folder)]
        self.writer.start([self.state.snapshot(checkpoint_folder), *parts])

    def load(self, checkpoint_folder: str) -> None:
        super().load(checkpoint_folder)
        self.state.reload()
        for companion in self.companions:
            companion.load(checkpoint_folder)
        self.offload()

    def _compute_log_probs(self, mini_batches: Sequence[MiniBatch]) -> np.ndarray:
        """Compute log-probs of the rows in `mini_batches`, and 0 for other rows. float32 [response tokens]"""
        return compute_token_outputs(self.policy, self.sample_logprobs, self.batch.rows, mini_batches, self.builder)

    def _compute_loss(
        self,
        columns: Columns[np.ndarray],
        recorded_logprobs: TokenParts | None,
        needs_entropy: bool,
        metric_sums: MetricSums,
        row_indices: list[int],
    ) -> Tensor:
        """Compute the loss of one micro-batch.

        recorded_logprobs: if not None, this pass's log-probs are appended to this list and used as old log-probs.
        """
        micro = self.builder.build(self.batch.rows, row_indices, columns)
        with torch.no_grad():
            made = (one.make_divergence_target(self.batch, row_indices, micro, self.actor) for one in self.companions)
            target = next((one for one in made if one is not None), None)
        stats = self.policy(micro, self.temperature, needs_entropy, target)
        old = None
        if recorded_logprobs is not None:
            old = stats.logprobs.detach()
            recorded_logprobs.append((row_indices, micro.drop_dummy_row(old)))
        inputs = build_objective_inputs(micro, stats, old, self.kl_coef)
        loss, metrics = compute_policy_objective(inputs, self.actor, self.policy_loss, self.correction)
        for companion in self.companions:
            if (found := companion.compute_loss(micro, stats, inputs)) is not None:
                loss = loss + found[0]
                metrics |= found[1]
        metric_sums.add(metrics | {"loss": loss})
        return loss
