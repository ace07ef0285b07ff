"""The policy on one training rank: the model that is trained and, where the algorithm asks, its frozen reference and
a teacher.

    load_batch -> [compute_log_probs, and the reference's, the teacher's] -> update(columns) -> send_weights -> rest

Methods that compute are collectives: every rank calls them, in the same order. They reload what rests; `rest` ends the
policy's phase on the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from alphaapollo.algorithms.divergence import REVERSE
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.config.resolve import chosen_attention
from alphaapollo.config.schema import NO_TEACHER, Actor, LoraForm, Model, Reference, RolloutCorrection, Teacher
from alphaapollo.data.batch import Columns, MiniBatch, RankBatch, Rows
from alphaapollo.models.checkpoint.snapshot import load_snapshot, take_snapshot
from alphaapollo.models.decoder import decoder_layers
from alphaapollo.models.export.hf_folder import export, full_parameters
from alphaapollo.models.flops import FlopsEstimator, peak_flops
from alphaapollo.models.lm_head import Other
from alphaapollo.models.load import load_causal_lm
from alphaapollo.models.lora import adapters_off, load_trainable_lm, scaled_adapter
from alphaapollo.models.micro_batch import MicroBatch, build_micro_batch
from alphaapollo.models.policy import PolicyModel, check_logprobs, self_check_warnings
from alphaapollo.models.sharding import local_tensor, reshard, shard
from alphaapollo.models.training.offload import parameter_offload
from alphaapollo.models.training.train_state import OptimizerStep, Trained, TrainState
from alphaapollo.types import WeightUpdate
from alphaapollo.weight_sync.transport import WeightSender
from alphaapollo.workers.moe_load_balancing import ExpertLoadBalancer
from alphaapollo.workers.policy_objective import normalise, policy_matrices, policy_objective
from alphaapollo.workers.process_group import (
    ColumnBuilder,
    MetricSums,
    RankPlacement,
    compute_column,
    inexact,
    optimizer_step_metrics,
    torch_dtype,
)
from alphaapollo.workers.shared_prompt_check import SharedPromptCheck
from alphaapollo.workers.teacher import TeacherModel, teaching_figures
from alphaapollo.workers.training_worker import TrainingWorker


class PolicyWorker(TrainingWorker):
    """One rank of the policy.

    Args:
        needs_reference: load the reference model.
        optimizer_steps: optimizer steps of the whole run, for the learning rate's schedule.
        temperature: of the rollouts: log-probs are those of the distribution that was sampled.
        correction: of the gap between engine and trainer; None: no correction.
        sender: how weights reach the engines; None: they never do.
        seed: of fresh adapters (LoRA).
        engine_form: what the sender takes: whole weights, or the adapters alone.
        saves_in_background: checkpoints are copied, and written while the worker goes on.
        teacher: what to learn from a teacher.
        teacher_model: how it is loaded; None: there is none.
    """

    def __init__(
        self,
        model: Model,
        actor: Actor,
        ref: Reference,
        needs_reference: bool,
        placement: RankPlacement,
        optimizer_steps: int,
        temperature: float,
        correction: RolloutCorrection | None = None,
        sender: WeightSender | None = None,
        seed: int = 0,
        engine_form: LoraForm = "merged",
        saves_in_background: bool = False,
        teacher: Teacher = NO_TEACHER,
        teacher_model: Model | None = None,
    ):
        super().__init__(placement, actor.fsdp_config.fsdp_size, saves_in_background)
        self.config, self.actor, self.engine_form = model, actor, engine_form
        self.temperature, self.sender = temperature, sender
        self.correction, self.teaching = correction or RolloutCorrection(), teacher
        self.dtype = torch_dtype(model)
        self.policy_loss = get_policy_loss(actor.policy_loss.loss_mode)
        fsdp = actor.fsdp_config
        self.policy = self._load_policy(seed)
        gap = check_logprobs(self.policy, self.padded, self.dtype, self.device, self.groups.sequence)
        self.self_check_warnings = self_check_warnings(gap)
        self.sharing = SharedPromptCheck(
            self.policy,
            self.policy.model,
            self._logprobs_of,
            self.dtype,
            self.padded,
            self.device,
            self.groups.sequence,
        )
        who = Trained("policy", "actor_rollout_ref.actor.optim", inexact(self.dtype, "actor_rollout_ref.model"))
        self.state = TrainState(
            self.policy, actor.optim, actor.grad_clip, optimizer_steps, fsdp, who, fsdp.param_offload
        )
        self.reference: PolicyModel | None = None
        if needs_reference and not model.lora_rank:  # with LoRA it is the policy with its adapters off
            self.state.offload()  # while the reference is loaded
            self.reference = self._load_reference(ref.fsdp_config.offload_policy)
        self.frozen = parameter_offload(self.reference, ref.fsdp_config.param_offload)
        self.teacher = None if teacher_model is None else self._load_teacher(teacher_model)
        self.size = FlopsEstimator.of(self.policy.model)
        self.peak = peak_flops(torch.cuda.get_device_name()) if self.device.type == "cuda" else None
        self.reference_was_reset = False
        self.batch: RankBatch | None = None
        self.last_old_logprobs: np.ndarray | None = None
        self.offload()

    @property
    def padded(self) -> bool:
        return self.config.attention == "padded"

    def load_batch(self, batch: RankBatch) -> None:
        """The rows of this iteration."""
        self.batch = batch

    def compute_log_probs(self) -> np.ndarray:
        """Of the response tokens, at the rollouts' temperature. float32 [sum responses]"""
        self.state.reload()
        self.sharing.check_batch(self._batch)
        return self._log_probs(self.policy, self._batch.rows, self._batch.mini_batches)

    def compute_ref_log_probs(self, batch: RankBatch | None = None) -> np.ndarray:
        """The same by the reference. batch: other rows than those loaded, which stay."""
        batch = batch or self._batch
        with self._as_reference() as reference:
            column = self._log_probs(reference, batch.rows, batch.mini_batches)
        self.frozen.offload()
        return column

    def compute_teacher_log_probs(self) -> np.ndarray:
        """The same by the teacher."""
        assert self.teacher is not None, "this worker was built without a teacher"
        return self.teacher.log_probs(self._batch)

    def update(
        self, columns: Columns[np.ndarray], steps: Sequence[MiniBatch] | None = None, skip_bad: bool = False
    ) -> dict[str, float]:
        """The optimizer steps of one iteration; figures are over all ranks.

        Where `columns` hold no old log-probs they are those of the policy before its first step; the first mini-batch
        takes them from its own forward pass.

        Args:
            columns: of all rows.
            steps: the mini-batches, where some rows are left out; None: those of the batch.

        ValueError: the first batch shares prompts, which this model cannot compute.
        """
        batch, sums = self._batch, MetricSums(self.groups.data)
        mini_batches = batch.mini_batches if steps is None else steps
        self.state.reload()
        self.sharing.check_batch(batch)
        if self.teacher is not None and self.teaching.whole:
            self.teacher.begin(batch)
        load = self._expert_load()
        takes_own = columns.old_logprobs is None
        old = self._old_log_probs(columns, mini_batches[1:])
        started = time.perf_counter()
        done: list[OptimizerStep] = []
        for epoch in range(self.actor.ppo_epochs):
            for index, mini_batch in enumerate(mini_batches):
                noted = ColumnBuilder(batch.rows) if takes_own and epoch == index == 0 else None
                if load:
                    load.begin_step(batch.rows, mini_batch.positions)
                for positions in self.state.accumulate(mini_batch.micro_batches):
                    self._accumulate(positions, replace(columns, old_logprobs=old), noted, sums, load)
                done.append(self.state.step(skip_bad))
                if noted:
                    old = noted.reload(old)
        self.last_old_logprobs = old
        totals = sums.reduce(self.device)
        figures = normalise(totals, len(done)) | optimizer_step_metrics(done, self.actor.grad_clip)
        figures |= {"optimizer_steps": float(len(done)), "tokens": totals["tokens"]}
        figures |= self.sharing.figures() | (load.figures() if load else {})
        if self.peak is not None and self.size is not None:
            micros = [micro for mini_batch in mini_batches for micro in mini_batch.micro_batches]
            flops = sum(self.size.training_flops(*batch.rows.segments(micro)) for micro in micros)
            own_flops = self.actor.ppo_epochs * flops / self.placement.sequence_parallel
            figures["mfu"] = own_flops / (time.perf_counter() - started) / self.peak
        return {name if "/" in name else f"actor/{name}": value for name, value in figures.items()}

    def old_log_probs(self) -> np.ndarray:
        """Those that the last update took as old, for measuring the gap to the engine's. float32 [sum responses]"""
        assert self.last_old_logprobs is not None, "update comes first"
        return self.last_old_logprobs

    def send_weights(self, version: int) -> WeightUpdate | None:
        """Publish the weights; the update on each rank that writes it, None on the others."""
        assert self.sender is not None, "this worker was built without a sender"
        self.state.reload()
        model = self.policy.model
        adapter = self.engine_form == "adapter"
        return self.sender.send(scaled_adapter(model) if adapter else full_parameters(model, self.dtype), version)

    def release_weights(self) -> None:
        """Every engine has confirmed the last update."""
        if self.sender is not None:
            self.sender.release()

    def offload(self) -> None:
        if self.reference is not None:
            reshard(self.reference)
            self.frozen.offload()
        if self.teacher is not None:
            self.teacher.offload()
        super().offload()

    @torch.no_grad()
    def probe(self, token_ids: list[int]) -> list[float]:
        """Log-prob of each token after the first, at temperature 1."""
        self.state.reload()
        num_scored = len(token_ids) - 1
        rows = Rows(
            token_ids=np.array(token_ids),
            lengths=np.array([len(token_ids)]),
            response_starts=np.array([1]),
            action_mask=np.ones(num_scored, dtype=np.uint8),
            rollout_logprobs=np.zeros(num_scored, dtype=np.float32),
        )
        logprobs = self.policy(self._micro_batch(rows, [0]), 1.0).logprobs
        reshard(self.policy)
        return logprobs.tolist()

    @torch.no_grad()
    def hard_reset(self) -> None:
        """Make the present policy the reference and let the optimizer start anew (arXiv 2505.24864, section 2.3.1);
        the learning rate's schedule goes on."""
        assert self.reference is not None, "this worker was built without a reference"
        self.state.reload()
        self.frozen.reload()
        pairs = zip(self.reference.parameters(), self.policy.parameters(), strict=True)
        for frozen, trained in pairs:
            local_tensor(frozen).copy_(local_tensor(trained))
        self.reference_was_reset = True
        self.state.reset_optimizer()

    def save(self, folder: str) -> None:
        parts = [self.state.snapshot(folder)]
        if self.reference is not None and self.reference_was_reset:
            self.frozen.reload()
            parts.append(take_snapshot(f"{folder}/reference", self.reference, None, {}))
        self.writer.start(parts)

    def load(self, folder: str) -> None:
        super().load(folder)
        self.reference_was_reset = self.reference is not None and Path(folder, "reference").is_dir()
        if self.reference is not None and self.reference_was_reset:
            self.frozen.reload()
            load_snapshot(f"{folder}/reference", self.reference, None)

    def export(self, folder: str, form: LoraForm = "merged") -> None:
        """Write a Hugging Face folder in the dtype of the arithmetic; see models.export. FloatingPointError: ruined
        weights."""
        self.state.reload()
        self.state.check_finite()
        export(folder, self.policy.model, self.config, self.dtype, form)

    def _load_policy(self, seed: int) -> PolicyModel:
        is_first = self.placement.rank == 0
        loaded = load_trainable_lm(self.config, chosen_attention(self.config), self.dtype, is_first, seed)
        return self._sharded(PolicyModel(loaded), self.actor.fsdp_config.offload_policy)

    def _load_reference(self, offload_policy: bool) -> PolicyModel:
        is_first = self.placement.rank == 0
        loaded = load_causal_lm(self.config, chosen_attention(self.config), self.dtype, is_first)
        return self._sharded(PolicyModel(loaded).requires_grad_(False), offload_policy)

    def _load_teacher(self, model: Model) -> TeacherModel:
        self.state.offload()  # while it is loaded
        self.frozen.offload()
        vocabulary = self.policy.model.get_output_embeddings().weight.shape[0]
        loaded = TeacherModel(
            model, self.teaching.model.fsdp_config, self.groups, self.placement, self.temperature, vocabulary
        )
        self.sharing.problem = self.sharing.problem or loaded.sharing.problem
        return loaded

    def _sharded(self, policy: PolicyModel, offload_policy: bool) -> PolicyModel:
        layers = decoder_layers(policy.model)
        shard(policy, layers, self.groups.shards, self.dtype, offload_policy, PolicyModel.forward_methods)
        return policy

    @property
    def _batch(self) -> RankBatch:
        assert self.batch is not None, "load_batch comes first"
        return self.batch

    @contextmanager
    def _as_reference(self) -> Iterator[PolicyModel]:
        """The model that computes as the reference, fetched, within."""
        if self.reference is not None:
            self.frozen.reload()
            yield self.reference
            return
        assert self.config.lora_rank, "this worker was built without a reference"
        self.state.reload()
        with adapters_off(self.policy):
            yield self.policy

    def _logprobs_of(self, micro: MicroBatch) -> torch.Tensor:
        logprobs: torch.Tensor = self.policy(micro, self.temperature).logprobs
        return logprobs

    def _log_probs(self, model: PolicyModel, rows: Rows, mini_batches: Sequence[MiniBatch]) -> np.ndarray:
        """Log-probs of those rows that are in `mini_batches`, zero elsewhere. float32 [sum responses]"""
        of = (rows, mini_batches, self.padded, self.device, self.groups.sequence)
        return compute_column(model, lambda micro: model(micro, self.temperature).logprobs, *of)

    def _expert_load(self) -> ExpertLoadBalancer | None:
        routers = self.policy.routers
        if routers is None:
            return None
        return ExpertLoadBalancer(routers, self.config.router_aux_loss_coef, self.device, self.groups.data)

    def _micro_batch(
        self, rows: Rows, positions: Sequence[int], columns: Columns[np.ndarray] | None = None
    ) -> MicroBatch:
        return build_micro_batch(rows, positions, self.padded, self.device, columns, self.groups.sequence)

    def _old_log_probs(self, columns: Columns[np.ndarray], later: Sequence[MiniBatch]) -> np.ndarray:
        """As given, or computed for all mini-batches but the first. float32 [sum responses]"""
        given = columns.old_logprobs
        return self._log_probs(self.policy, self._batch.rows, later) if given is None else given

    def _accumulate(
        self,
        positions: list[int],
        columns: Columns[np.ndarray],
        noted: ColumnBuilder | None,
        sums: MetricSums,
        load: ExpertLoadBalancer | None,
    ) -> None:
        """Forward and backward of one micro-batch. noted: take the old log-probs from this forward, and note them."""
        micro = self._micro_batch(self._batch.rows, positions, replace(columns, returns=None, values=None))
        stats = self.policy(micro, self.temperature, need_entropy=True, other=self._compared_with(micro))
        if noted is not None:
            noted.add(positions, micro.values(stats.logprobs))
        matrices = policy_matrices(micro, stats, old_logprobs=None if noted is None else stats.logprobs.detach())
        loss, figures = policy_objective(matrices, self.actor, self.policy_loss, self.correction, self.teaching)
        figures |= teaching_figures(stats, micro.mask)
        if load:
            loss = loss + load.note()
        (loss * self.placement.world_size).backward()  # FSDP averages over the ranks; the weights are global
        sums.add(figures)

    @torch.no_grad()
    def _compared_with(self, micro: MicroBatch) -> Other | None:
        """The teacher, or the other side of a full KL: config/check_teacher.py refuses both at once."""
        if self.teacher is not None and self.teaching.whole:
            return self.teacher.distribution(micro, self.teaching)
        if not self.actor.full_kl:
            return None
        with self._as_reference() as reference:
            return Other(reference.hidden(micro), REVERSE)
