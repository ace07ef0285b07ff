"""Policy worker, one per training rank, with the plug-ins that the run needs, e.g. a frozen reference model.

    load_batch -> [log-probs of policy and plug-ins] -> update(columns) -> send_weights -> offload

Each iteration calls `update` once. For each mini-batch, `update` accumulates the gradients and takes an optimizer step.
A user's own loop calls these two operations itself:

    accumulate(batch, columns, loss) -> ... -> take_step() -> send_weights -> offload

Methods that compute are collectives, and reload offloaded tensors. `offload` frees the GPU for the next worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from alphaapollo.algorithms.kl import LogProbVariance
from alphaapollo.algorithms.mismatch import MismatchSums, sum_mismatch
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.batching.batch import Columns, MiniBatch
from alphaapollo.config.schema import NO_TEACHER, Actor, LoraForm, Model, Reference, RolloutCorrection, Teacher
from alphaapollo.engines.weight_sync.digest import sum_hashes
from alphaapollo.engines.weight_sync.shared_memory import SharedAdapterSender
from alphaapollo.engines.weight_sync.transport import WeightSender, WeightUpdate
from alphaapollo.models.export import gather_parameters
from alphaapollo.models.flops import MfuMeter
from alphaapollo.models.lm_head import DivergenceTarget
from alphaapollo.models.lora import gather_scaled_adapter
from alphaapollo.models.micro_batch import MicroBatch, make_rows
from alphaapollo.models.policy import check_policy, load_policy
from alphaapollo.models.quantized import iterate_codes_and_scales
from alphaapollo.models.sharding import reshard
from alphaapollo.models.train_state import OptimizerStep, TrainState
from alphaapollo.models.update_record import choose_sample
from alphaapollo.types import ImageInput
from alphaapollo.workers.adapter_slots import AdapterForm, AdapterSlots
from alphaapollo.workers.model_worker import (
    MetricSums,
    TokenParts,
    compute_optimizer_metrics,
    compute_token_outputs,
    merge_token_values,
)
from alphaapollo.workers.policy_learner import PolicyLearner, find_trained_tokens
from alphaapollo.workers.policy_objective import TrainedRows, normalize_metrics
from alphaapollo.workers.policy_plugins import REFERENCE, PolicyPlugin
from alphaapollo.workers.process_group import RankPlacement
from alphaapollo.workers.reference import FrozenReference, ReferenceModel
from alphaapollo.workers.shared_prompt_check import SharedPromptCheck
from alphaapollo.workers.teacher import load_teacher
from alphaapollo.workers.trust_region import TrustRegion

LOG_PROB_VARIANCE = DivergenceTarget(None, LogProbVariance("reverse"))  # the kind "reverse" has no effect


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


class PolicyWorker(PolicyLearner):
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
        if isinstance(sender, SharedAdapterSender):
            sender.base_digest = self._compute_base_digest(sender.dtype)
        self.logprob_check_warnings = check_policy(self.policy, self.builder, self.dtype)
        self.compute_sample_logprobs = self.policy.make_logprobs_function(self.temperature)
        self.shared_prompts = SharedPromptCheck(self.policy, self.compute_sample_logprobs, self.builder, self.dtype)
        self.state = TrainState(self.policy, actor, setup.optimizer_steps, "policy", "actor_rollout_ref.actor.optim")
        self.adapters = AdapterSlots(self, AdapterForm(model.lora_rank, model.alpha, seed=setup.seed))
        self.mfu, self.plugins = MfuMeter(self.policy.model, placement.device), list[PolicyPlugin]()
        self.accumulated: list[TrainedRows] = []
        if actor.optim.name == "trpo":
            region = TrustRegion(self)
            self.state.take_step = lambda: region.take_step(self.accumulated, self._compute_loss)
            self.plugins.append(region)
        self.offload()  # while the plug-ins are loaded
        if setup.teacher.divergence:
            self.plugins.append(load_teacher(self, setup.teacher, setup.teacher_models))
        if setup.needs_reference:
            reference = ReferenceModel(self) if model.lora_rank else FrozenReference(self, setup.ref.fsdp_config)
            self.plugins.append(reference)
        self.last_old_logprobs: np.ndarray | None = None
        self.offload()

    def _compute_base_digest(self, dtype: torch.dtype) -> int:
        """Compute the digest of the codes and scales of quantized layers (a collective). dtype: of the engine's scales.
        0 if no layer is quantized."""
        layers = [*iterate_codes_and_scales(self.policy)]
        if not layers:
            return 0
        sums = [sum_hashes([codes.float(), scale.to(dtype)]) for codes, scale in layers]  # one layer at a time
        total = torch.stack(sums).sum().to(self.device)
        dist.all_reduce(total, group=self.mesh.dense.get_group("shard"))
        return int(total)

    def compute_log_probs(self, role: str = "policy") -> np.ndarray:
        """Compute log-probs of the response tokens at the rollout temperature. float32 [response tokens]. role:
        "policy", or the role of a plug-in with a model, e.g. "reference"."""
        if role != "policy":
            column: np.ndarray = self.find_plugin(role).compute_log_probs(self.batch)
            return column
        self.state.reload()
        self.shared_prompts.begin_update(self.batch)
        return self._compute_log_probs(self.batch.rows, self.batch.mini_batches)

    def compute_surprises(self) -> np.ndarray:
        """Compute log p, entropy and Var(log p) at the response tokens. float32 [response tokens, 3]"""
        self.state.reload()

        def compute(micro: MicroBatch) -> Tensor:
            stats = self.policy(micro, self.temperature, needs_entropy=True, divergence_target=LOG_PROB_VARIANCE)
            assert stats.entropy is not None and stats.divergence is not None
            return torch.stack([stats.logprobs, stats.entropy, stats.divergence], dim=1)

        return compute_token_outputs(self.policy, compute, self.batch.rows, self.batch.mini_batches, self.builder)

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
            measures_entropy: compute the entropy even if the loss does not need it.
            kl_coef: coefficient of ppo_kl; None: the configured one.

        Raises ValueError if the first batch shares prompts and the model does not support shared prompts.
        """
        batch, sums = self.batch, MetricSums(self.data_group)
        mini_batches = batch.mini_batches if mini_batches is None else mini_batches
        columns, old = replace(columns, returns=None, values=None), columns.old_logprobs
        self.state.reload()
        self.shared_prompts.begin_update(batch)
        self.balancer = self.make_expert_load_balancer(self.policy.routers)
        # TRPO also needs the old log-probs of the first mini-batch, before its training forward pass.
        records_old = old is None and self.state.take_step is None
        if old is None:
            old = self._compute_log_probs(batch.rows, mini_batches[1 if records_old else 0 :])
        for plugin in self.plugins:
            plugin.begin_update(batch)
        self._record_sample(columns, mini_batches, kl_coef)
        self.mfu.begin_update()
        needs_entropy, steps = measures_entropy or self.actor.entropy_coeff > 0, list[OptimizerStep]()
        for epoch in range(self.actor.ppo_epochs):
            for index, mini_batch in enumerate(mini_batches):
                recorded: TokenParts | None = [] if records_old and epoch == index == 0 else None
                inputs = replace(columns, old_logprobs=None if recorded is not None else old)
                trained = TrainedRows(batch, mini_batch, self.policy_loss, inputs, kl_coef, needs_entropy, recorded)
                self._add_gradients(trained, sums)
                steps.append(self._step(skip_bad_step))
                if recorded is not None:
                    old = merge_token_values(batch.rows, recorded, old)
        self.mfu.add(batch.rows, [*mini_batches] * self.actor.ppo_epochs)
        self.last_old_logprobs, self.last_mini_batches = old, mini_batches
        self.last_trajectory_ids = columns.trajectory_ids
        totals = sums.reduce(self.device)
        metrics = normalize_metrics(totals, len(steps)) | compute_optimizer_metrics(steps, self.actor.grad_clip)
        metrics |= {"optimizer_steps": float(len(steps)), "tokens": totals["tokens"]}
        metrics |= self.balancer.compute_metrics() if self.balancer else {}
        if self.actor.policy_loss.adapts_kl_coef:
            metrics |= self._measure_policy_kl([(batch, mini_batches, replace(columns, old_logprobs=old))])
        metrics |= self.shared_prompts.pop_metrics() | self.mfu.compute_metrics(self.placement.sequence_parallel_size)
        metrics |= self._get_plugin_metrics()
        return {name if "/" in name else f"actor/{name}": value for name, value in metrics.items()}

    def _record_sample(
        self, columns: Columns[np.ndarray], mini_batches: Sequence[MiniBatch], kl_coef: float | None
    ) -> None:
        """If the update is recorded with a sample, write the gradients of the sample at the current weights."""
        record = self.state.record
        if record is None or not record.sample_tokens:
            return
        assert columns.trajectory_ids is not None
        rows = choose_sample(self.batch.rows, mini_batches, columns.trajectory_ids, record.sample_tokens)
        sample = TrainedRows(self.batch, MiniBatch([rows]), self.policy_loss, columns, kl_coef)
        self._add_gradients(sample, MetricSums(self.data_group))
        record.write_sample_gradients()
        self.clear_gradients()

    def get_old_log_probs(self) -> np.ndarray:
        """Return the old log-probs that the last `update` used. float32 [response tokens]"""
        assert self.last_old_logprobs is not None, "call update first"
        return self.last_old_logprobs

    def sum_logprob_mismatch(self) -> MismatchSums:
        """Compare the old log-probs of the last `update` with the engine's, at the action tokens that it trained on."""
        rows, tokens = self.batch.rows, find_trained_tokens(self.batch.rows, self.last_mini_batches)
        row_indices = np.repeat(np.arange(len(rows)), rows.response_lengths)[tokens]
        assert self.last_trajectory_ids is not None
        return sum_mismatch(
            self.get_old_log_probs()[tokens],
            rows.rollout_logprobs[tokens],
            self.last_trajectory_ids[row_indices],
            tokens - rows.response_offsets[row_indices],
        )

    def send_weights(self, version: int) -> WeightUpdate | None:
        """Send the weights to the inference engines. Returns None on ranks that only help to gather the weights."""
        assert self.sender is not None, "this worker has no sender"
        model = self.policy.model
        if self.engine_lora_form == "adapter":  # the base model can stay in host memory
            return self.sender.send(gather_scaled_adapter(model), version)
        self.state.reload()
        return self.sender.send(gather_parameters(model, self.dtype), version)

    def write_adapter(self, folder: str) -> str:
        """Write the current adapter for the engines (AdapterSlots.write)."""
        assert isinstance(self.sender, SharedAdapterSender), "only with rollout.lora=adapter"
        return self.adapters.write(folder, self.sender.dtype, self.config.path, self.sender.base_digest)

    def release_sent_weights(self) -> None:
        """Free the memory of the sent weights and offload the policy, after all engines have received the weights."""
        if self.sender is not None:
            self.sender.release_sent_weights()
        self.offload()

    def offload(self) -> None:
        for plugin in self.plugins:
            plugin.offload()
        super().offload()

    @torch.no_grad()
    def compute_probe_log_probs(self, token_ids: list[int], images: tuple[ImageInput, ...] = ()) -> list[float]:
        """Compute log-probs (temperature 1) of all tokens but the first, to verify engines. Then offload the policy."""
        self.state.reload()
        rows = make_rows([np.array(token_ids)], [1], images=[images])
        logprobs: list[float] = self.policy(self.builder.build(rows, [0]), 1.0).logprobs.tolist()
        reshard(self.policy)
        self.offload()
        return logprobs

    def reset_reference_and_optimizer(self) -> None:
        """Copy the policy's weights into the reference model and reset the optimizer (arXiv 2505.24864, section 2.3.1).

        The learning rate schedule continues.
        """
        self.find_plugin(REFERENCE).copy_policy()
        self.state.reset_optimizer()

    def save(self, checkpoint_folder: str) -> None:
        parts = [part for plugin in self.plugins for part in plugin.snapshot(checkpoint_folder)]
        self.writer.start([self.state.snapshot(checkpoint_folder), *parts])

    def load(self, checkpoint_folder: str) -> None:
        super().load(checkpoint_folder)
        self.state.reload()
        for plugin in self.plugins:
            plugin.load(checkpoint_folder)
        self.offload()
