"""Teachers for on-policy distillation: frozen models on the policy's ranks, applied to the policy's samples.

Several teachers are used one after the other. Each teacher reads only the rows for which its weight is not 0.
A self-teacher is a moving average of the policy's weights, which reads a longer prompt before the same response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from alphaapollo.algorithms.kl import Divergence, truncated_ratios, update_moving_average
from alphaapollo.batching.batch import MiniBatch, RankBatch, Rows
from alphaapollo.config.schema import FrozenFsdp, Model, Teacher
from alphaapollo.config.schema.reward import TEACHER_SHARES
from alphaapollo.models.lm_head import DivergenceTarget, LmHeadInput, TokenStats, TopTokens, WeightedModel
from alphaapollo.models.micro_batch import MicroBatch
from alphaapollo.models.policy import check_forward_vs_hf, load_policy
from alphaapollo.models.sharding import ModelMesh, local_tensor, reshard
from alphaapollo.models.ulysses import gather_token_values
from alphaapollo.workers.model_worker import compute_token_outputs
from alphaapollo.workers.policy_learner import PolicyLearner
from alphaapollo.workers.policy_objective import ObjectiveInputs
from alphaapollo.workers.policy_plugins import FrozenModel, PolicyPlugin
from alphaapollo.workers.shared_prompt_check import SharedPromptCheck

TEACHER = "teacher"  # role, and folder of a self-teacher in the policy's checkpoint


def make_divergence(teacher: Teacher) -> Divergence:
    """Create the Divergence that the config section `teacher` selects. Not for divergence=sampled."""
    assert teacher.divergence is not None and teacher.divergence != "sampled"
    return Divergence(teacher.divergence, teacher.beta)


class FrozenTeacher(FrozenModel):
    """One rank of the teacher model. All methods are collectives, called while the policy uses the GPU.

    model: model section after `resolve_model`, with the teacher's path and the policy's dtype and attention.
    """

    def __init__(self, worker: PolicyLearner, model: Model, fsdp: FrozenFsdp):
        self.builder, dtype = worker.builder, worker.dtype
        self.vocabulary_size = worker.policy.model.get_output_embeddings().weight.shape[0]  # at most the teacher's size
        loaded = load_policy(model, ModelMesh(worker.mesh.dense), dtype, fsdp.offload_policy)
        check_forward_vs_hf(loaded, self.builder, dtype)
        self.compute_logprobs = loaded.make_logprobs_function(worker.temperature)
        self.shared_prompts = SharedPromptCheck(loaded, self.compute_logprobs, self.builder, dtype)
        super().__init__(loaded, fsdp.param_offload)

    def compute_log_probs_of_rows(self, batch: RankBatch, mini_batches: Sequence[MiniBatch]) -> np.ndarray:
        """Compute log-probs of the response tokens of the rows in `mini_batches`, and 0 for other rows. Then offload
        the teacher. float32 [response tokens]"""
        self.begin_update(batch)
        column = compute_token_outputs(self.model, self.compute_logprobs, batch.rows, mini_batches, self.builder)
        self.offload()
        return column

    def begin_update(self, batch: RankBatch) -> None:
        """Reload the parameters, and check that the teacher supports the shared prompts of the batch."""
        self.offloader.reload()
        self.shared_prompts.begin_update(batch)

    @torch.no_grad()
    def compute_lm_head_input(self, micro: MicroBatch) -> LmHeadInput:
        """Compute the hidden states of a micro-batch's response tokens, with the head for the policy's vocabulary."""
        hidden: LmHeadInput = self.model.compute_lm_head_input(micro)
        head, size = hidden.head, self.vocabulary_size  # rows beyond the policy's vocabulary are padding
        bias = None if head.bias is None else head.bias[:size]
        return LmHeadInput(hidden.states, replace(head, weight=head.weight[:size], bias=bias))

    @torch.no_grad()
    def compute_lm_head_input_of_rows(self, micro: MicroBatch, is_used: np.ndarray) -> LmHeadInput:
        """Compute the hidden states of some rows, and 0 for the tokens of other rows. is_used: bool [b].

        With sequence parallelism, all rows are computed, because a smaller micro-batch is split at other tokens.
        """
        if is_used.all() or micro.sequence is not None:
            return self.compute_lm_head_input(micro)
        used = self.builder.build(micro.rows, np.flatnonzero(is_used).tolist())
        hidden = self.compute_lm_head_input(used)
        tokens = np.flatnonzero(np.repeat(is_used, micro.rows.response_lengths))
        states = hidden.states.new_zeros(len(micro.targets), hidden.states.shape[1])
        states[torch.from_numpy(tokens).to(states.device)] = used.drop_dummy_row(hidden.states)
        return replace(hidden, states=states)


def compute_distillation_loss(inputs: ObjectiveInputs, teacher: Teacher) -> Tensor:
    """Compute teacher.coef * D, with the divergence D summed over tokens and rows with their weights."""
    assert inputs.divergence is not None
    divergence, max_ratio = inputs.divergence, teacher.self_teacher.max_ratio
    if teacher.uses_self_teacher and max_ratio is not None:
        divergence = divergence * truncated_ratios(inputs.logp, inputs.old_logp, inputs.mask, max_ratio)
    return teacher.coef * inputs.sum_tokens(divergence, inputs.divergence_weights)


class TeacherGroup(PolicyPlugin):
    """The teachers of one rank: frozen models, and the distributions that servers returned.

    Args:
        teacher: section `teacher` with a divergence.
        models: the frozen models by their configuration key.
    """

    role = TEACHER

    def __init__(self, teacher: Teacher, models: dict[str, FrozenTeacher]):
        self.teacher, self.models = teacher, models
        self.keys, self.servers = list(teacher.models_by_key), list(teacher.servers)

    def compute_log_probs(self, batch: RankBatch) -> np.ndarray:
        """Compute log-probs of the response tokens: a sum over the frozen models, weighted by each row's shares."""
        rows, total = batch.rows, np.zeros(batch.rows.response_offsets[-1], np.float32)
        for key, model in self.models.items():
            shares = self._get_weights(rows, key)
            used_mini_batches = [
                MiniBatch([[row for row in micro if shares[row]] for micro in mini_batch.micro_batches])
                for mini_batch in batch.mini_batches
            ]
            log_probs = model.compute_log_probs_of_rows(batch, used_mini_batches)
            total = total + np.repeat(shares, rows.response_lengths) * log_probs
        return total

    def begin_update(self, batch: RankBatch) -> None:
        if self.teacher.uses_full_vocabulary:
            for model in self.models.values():
                model.begin_update(batch)

    def make_divergence_target(
        self, batch: RankBatch, row_indices: list[int], micro: MicroBatch
    ) -> DivergenceTarget | None:
        if not self.teacher.uses_full_vocabulary:
            return None
        models, lengths = [], micro.rows.response_lengths
        local = micro.predicting_tokens.selection_indices  # this rank's tokens with sequence parallelism; None: all
        for key in self.keys:
            weights = np.zeros(len(micro.rows), np.float32) if micro.is_dummy else self._get_weights(micro.rows, key)
            token_weights = torch.from_numpy(np.repeat(weights, lengths))
            token_weights = token_weights if local is None else token_weights[local.cpu()]
            if key in self.models:
                output: LmHeadInput | TopTokens = self.models[key].compute_lm_head_input_of_rows(micro, weights > 0)
            else:
                output = self._get_top_tokens(micro, self.servers.index(key), local)
            models.append(WeightedModel(output, token_weights))
        return DivergenceTarget(models, make_divergence(self.teacher), with_statistics=True, top_k=self.teacher.top_k)

    def compute_loss(
        self, micro: MicroBatch, stats: TokenStats, inputs: ObjectiveInputs
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        if not self.teacher.uses_full_vocabulary:
            return None
        return compute_distillation_loss(inputs, self.teacher), sum_distillation_metrics(stats, micro.mask)

    def offload(self) -> None:
        for model in self.models.values():
            model.offload()

    def _get_weights(self, rows: Rows, key: str) -> np.ndarray:
        """Return the weight of a teacher in the loss of each row. float32 [R]"""
        index = self.keys.index(key)
        shares = rows.columns.get(TEACHER_SHARES)
        return np.array([1.0] * len(rows) if shares is None else [weights[index] for weights in shares], np.float32)

    def _get_top_tokens(self, micro: MicroBatch, server: int, local: Tensor | None) -> TopTokens:
        tokens, logprobs = micro.columns.top_tokens, micro.columns.top_token_logprobs
        assert tokens is not None and logprobs is not None
        tokens, logprobs = tokens[:, server].long(), logprobs[:, server]
        if local is not None:
            tokens, logprobs = tokens[local], logprobs[local]
        return TopTokens(tokens, logprobs[:, :-1], logprobs[:, -1])


def sum_distillation_metrics(stats: TokenStats, mask: Tensor) -> dict[str, Tensor]:
    """Sum divergences etc. over the tokens in `mask` [n]."""
    names = ("divergence", "reverse_kl", "forward_kl", "agreement")
    sums = {f"distill/{name}": (mask * getattr(stats, name).detach()).sum() for name in names}
    return sums | {"distilled_tokens": mask.sum()}


class MovingAverageTeacher(FrozenModel):
    """One rank of a self-teacher, a moving average of the policy.

    It is loaded and sharded like the policy, so its weights are float32 and, with LoRA, it has adapters.
    """

    role = TEACHER

    def __init__(self, worker: PolicyLearner, teacher: Teacher):
        self.teacher, self.worker, fsdp = teacher, worker, worker.actor.fsdp_config
        loaded = load_policy(worker.config, worker.mesh, worker.dtype, fsdp.offload_policy, worker.seed)
        super().__init__(loaded, fsdp.param_offload)

    def make_divergence_target(self, batch: RankBatch, row_indices: list[int], micro: MicroBatch) -> DivergenceTarget:
        longer_micro = self.worker.builder.build(batch.rows.rows_with_longer_prompts, row_indices)
        self.offloader.reload()
        hidden = self.model.compute_lm_head_input(longer_micro)
        if (sequence := micro.sequence) is not None:  # a longer prompt moves tokens to other ranks
            states = gather_token_values(hidden.states.t(), longer_micro.predicting_tokens, sequence).t()
            hidden = replace(hidden, states=states[micro.predicting_tokens.selection_indices].contiguous())
        divergence, top_k = make_divergence(self.teacher), self.teacher.top_k
        return DivergenceTarget(hidden, divergence, with_statistics=True, top_k=top_k, selects_policy_tokens=True)

    def compute_loss(
        self, micro: MicroBatch, stats: TokenStats, inputs: ObjectiveInputs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        has_longer_prompt = np.repeat(micro.rows.has_longer_prompt, micro.rows.response_lengths)
        mask = micro.mask * torch.from_numpy(has_longer_prompt).to(micro.mask.device)
        return compute_distillation_loss(inputs, self.teacher), sum_distillation_metrics(stats, mask)

    def end_step(self) -> None:
        self._move_towards_policy(self.teacher.self_teacher.ema_rate)

    @torch.no_grad()
    def _move_towards_policy(self, rate: float) -> None:
        """Move the weights towards the policy's: teacher = (1 - rate) teacher + rate policy."""
        self.offloader.reload()
        reshard(self.model)  # the gathered copies of the weights become invalid
        for averaged, trained in zip(self.model.parameters(), self.worker.policy.parameters(), strict=True):
            if averaged.requires_grad:
                update_moving_average(local_tensor(averaged), local_tensor(trained), rate)

    def load(self, checkpoint_folder: str) -> None:
        """Load the weights, or copy those of the policy if the run that saved the checkpoint had no self-teacher."""
        super().load(checkpoint_folder)
        if not Path(checkpoint_folder, TEACHER).is_dir():
            self._move_towards_policy(1.0)


def load_teacher(worker: PolicyLearner, teacher: Teacher, models: Mapping[str, Model]) -> PolicyPlugin:
    """Load a self-teacher, or the frozen teachers on the ranks. models: `model` sections by configuration key."""
    if teacher.uses_self_teacher:
        return MovingAverageTeacher(worker, teacher)
    loaded = {key: FrozenTeacher(worker, models[key], local.fsdp_config) for key, local in teacher.local_models.items()}
    checks = [worker.shared_prompts, *(model.shared_prompts for model in loaded.values())]
    worker.shared_prompts.unsupported_reason = next(filter(None, (check.unsupported_reason for check in checks)), None)
    return TeacherGroup(teacher, loaded)
