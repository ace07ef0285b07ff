"""Recorded update: its inputs, and the models of the reference that compute with them."""

from __future__ import annotations

from collections.abc import Container, Iterator
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn

from alphaapollo.plugins.verify.reference import losses, models
from alphaapollo.plugins.verify.reference.samples import NotCovered, Recorded, Sample, build_batch, to_namespace
from alphaapollo.plugins.verify.steps import SMALL, SMALL_IN_BFLOAT16
from alphaapollo.trainer.replay.recording import Recording
from alphaapollo.utils.kept_tokens import KEPT_TOKENS, KeptTokens

TOLERANCES = {  # by dtype of the model: of a log-prob (nats), a value, and a gradient (relative)
    "float64": (1e-9, 1e-9, 1e-9),
    "float32": (1e-3, 1e-3, 1e-3),
    "bfloat16": (1.0, 0.5, 0.2),
}
LONGER_PROMPT = "longer_prompt_ids"  # column of rows for a self-teacher
ALL = range(2**62)  # all rows


class RecordedUpdate:
    """Inputs of a recorded update. If it has a sample of rows, only their log-probs and gradients are compared."""

    def __init__(self, recording: Recording):
        self.recording, self.config = recording, to_namespace(recording.config)
        self.inputs, self.outcome = recording.inputs, recording.outcome
        self.role, self.algorithm = self.config.actor_rollout_ref, self.config.algorithm
        self.dtype: str = self.inputs.model["dtype"]
        self.limits = TOLERANCES[self.dtype]
        self.small = SMALL_IN_BFLOAT16 if self.dtype == "bfloat16" else SMALL
        self.batch = build_batch(self.inputs.groups, self.config)
        self.mini_batches: list[list[int]] = recording.steps.mini_batches
        self.sample: list[int] | None = recording.steps.sample
        self.compared: Container[int] = ALL if self.sample is None else self.sample
        self.before: dict[int, np.ndarray] = {}  # first token of a row -> its log-probs before the update
        trained = recording.steps.trained_rows  # None: only the critic was trained
        self.trained = ALL if trained is None else [row for row, is_trained in enumerate(trained) if is_trained]
        engine = [np.asarray(r.logprobs)[np.asarray(r.action_mask) != 0] for s in self.batch.samples for r in s.rows]
        self.engine = np.concatenate(engine)
        arrays = {name: value for name, value in self.outcome.items() if isinstance(value, np.ndarray)}
        self.teacher: nn.Module | None = None
        self.states: dict[str, tuple[dict[str, Tensor], int]] = {}  # as read_state returns them, until they are used
        self.columns = {name: array.astype(np.float64) for name, array in arrays.items()}

    @property
    def uses_engine_logprobs(self) -> bool:
        """Whether the old log-probs are those of the engine."""
        bypass: bool = self.algorithm.rollout_correction.bypass
        return bypass or self.role.actor.policy_loss.loss_mode in losses.OF_ENGINE

    @property
    def engine_limit(self) -> float:
        """Tolerance of the mean difference of log-probs of the engine, in nats."""
        return 1e-4 if self.dtype == self.inputs.engine_dtype == "float32" else 0.1

    def list_samples(self, step: int) -> list[Sample]:
        """Return the samples of the mini-batch of an optimizer step."""
        rows = self.mini_batches[step % len(self.mini_batches)]
        return [sample for sample in self.batch.samples if sample.row_numbers[0] in rows]

    def load_full_reference(self) -> nn.Module | None:
        """Load the reference model if the loss needs its distributions."""
        actor = self.role.actor
        return self.load("policy/reference") if actor.use_kl_loss and actor.kl_loss_type == "full" else None

    def load(self, role: str) -> nn.Module:
        """Load the policy, its reference or the critic with the weights before the update."""
        model, path = self.role.model, self.role.model.path
        prefix = "model.model."
        if role == "critic":
            model, path, prefix = self.config.critic.model, self.config.critic.model.path or path, "model."
            model.trust_remote_code = self.role.model.trust_remote_code
        state: dict[str, Tensor] = {}
        if (self.recording.folder / role / "model").is_dir():
            state, num_steps = self.recording.read_state(role)
            if role in ("policy", "critic"):
                self.states[role] = state, num_steps
        return models.load_model(model, path, self.dtype, state, prefix)

    def load_teacher(self) -> None:
        """Load the teacher, if there is one and it is not loaded."""
        teacher = self.config.teacher
        if not teacher.divergence or self.teacher is not None:
            return
        if vars(teacher.models) or teacher.model.base_url:
            raise NotCovered("several teachers, or a teacher behind a server")
        if teacher.self_teacher.context:
            self.teacher = self.load("policy/teacher")
        else:
            self.teacher = models.load_model(self.role.model, teacher.model.path, self.dtype, {}, "")

    def of_teacher(self, row: Recorded) -> Tensor:
        """Return the teacher's log-probs of a row, which it may read after a longer prompt. [T, V]"""
        assert self.teacher is not None
        if longer := row.columns.get(LONGER_PROMPT):
            start = list(row.action_mask).index(1)
            tokens, mask = [*longer, *row.token_ids[start:]], [0] * len(longer) + list(row.action_mask[start:])
            row = SimpleNamespace(
                token_ids=tokens, action_mask=mask, images=(), columns={}, temperature=row.temperature
            )
        return self.of_row(self.teacher, row)

    def metric(self, name: str) -> float:
        """Return a metric of the update."""
        value = self.outcome[name]
        assert isinstance(value, float)
        return value

    def iterate_rows(self, rows: Container[int]) -> Iterator[tuple[Recorded, slice]]:
        """Yield the rows with these numbers, and the positions of their tokens."""
        for sample in self.batch.samples:
            start = sample.tokens.start
            for number, row in zip(sample.row_numbers, sample.rows, strict=True):
                end = start + int(np.asarray(row.action_mask).sum())
                if number in rows:
                    yield row, slice(start, end)
                start = end

    def of_row(self, model: nn.Module, row: Recorded) -> Tensor:
        temperature = self.role.rollout.temperature if row.temperature is None else row.temperature
        return models.token_logprobs(model, row, temperature, self.inputs.excluded_ids)

    def of_sampled(self, logprobs: Tensor, row: Recorded) -> Tensor:
        """Return the log-probs of a row's sampled tokens among those that the sampler kept. logprobs: [T, V] -> [T]"""
        return models.of_sampled(self.among_kept(logprobs, row), row)

    def among_kept(self, logprobs: Tensor, row: Recorded) -> Tensor:
        """Renormalize log-probs over the tokens that the sampler kept, if a row has them. [T, V] -> [T, V]"""
        if KEPT_TOKENS not in row.columns:
            return logprobs
        kept = KeptTokens.decode(row.columns[KEPT_TOKENS])
        sampled = np.flatnonzero(np.asarray(row.action_mask))
        return models.among_kept(logprobs, [kept[token - 1 : token].ids.tolist() for token in sampled])

    def worst(self, differences: np.ndarray) -> tuple[str, float]:
        """Return where the largest difference of n tokens is, and its size."""
        token = int(np.abs(differences).argmax())
        tokens = next(span for _, span in self.iterate_rows(ALL) if span.start <= token < span.stop)
        owner = next(s for s in self.batch.samples if s.tokens.start <= token < s.tokens.stop)
        where = f"prompt {owner.trajectory.prompt_id}, sample {owner.trajectory.sample}, token {token - tokens.start}"
        return where, float(np.abs(differences[token]))

    def rewards_by_group(self) -> dict[int, list[float]]:
        rewards: dict[int, list[float]] = {}
        for sample in self.batch.samples:
            rewards.setdefault(sample.group, []).append(sample.total)
        return rewards

    def count_planned(self) -> tuple[int, int]:
        """Return the samples of a full batch, and its mini-batches."""
        filtration, size = self.algorithm.filtration, self.config.env.rollout.n
        selected = filtration.size if filtration.method in ("max_variance", "extremes", "random") else size
        samples = (self.config.data.train_batch_size + self.config.data.reuse.groups) * min(selected, size)
        return samples, -(-samples // self.role.actor.ppo_mini_batch_size)

    def count_mini_batches(self) -> set[int]:
        """Return how many mini-batches the samples may have: fewer if there are fewer samples, or groups to keep."""
        filters, samples = self.algorithm.filter_groups, self.batch.samples
        count = -(-len(samples) // self.role.actor.ppo_mini_batch_size)
        if filters.enable and filters.mode == "reweight":
            count = self.count_planned()[1]
        return {min(count, len(samples)), min(count, len({sample.group for sample in samples}))}

    def count_steps(self, role: str) -> int:
        """Optimizer steps of the complete run, for the learning rate schedule."""
        _, per_epoch = self.count_planned()
        warmup = self.config.trainer.critic_warmup if role == "policy" else 0
        epochs = self.role.actor.ppo_epochs if role == "policy" else self.config.critic.ppo_epochs
        return max(0, self.inputs.iterations - warmup) * per_epoch * epochs

    def make_terms(self, policy: nn.Module, sample: Sample, reference: nn.Module | None) -> losses.Terms:
        rows = [self.of_row(policy, row) for row in sample.rows]
        pairs = list(zip(rows, sample.rows, strict=True))
        logp = torch.cat([self.of_sampled(full, row) for full, row in pairs])
        column = {n: torch.from_numpy(values[sample.tokens]) for n, values in self.columns.items()}
        full_kl = None
        if reference is not None:
            with torch.no_grad():
                others = [self.of_row(reference, row) for row in sample.rows]
            full_kl = torch.cat([(p.exp() * (p - q)).sum(1) for p, q in zip(rows, others, strict=True)])
        kept = [self.among_kept(full, row) for full, row in pairs] if self.role.actor.entropy_coeff else []
        entropy = torch.cat([-(p.exp() * p).sum(1) for p in kept]) if kept else None
        divergence = None
        if self.teacher is not None and self.config.teacher.divergence != "sampled":
            with torch.no_grad():
                taught = [self.of_teacher(row)[:, : rows[0].shape[1]] for row in sample.rows]
            both = zip(rows, taught, strict=True)
            divergence = torch.cat([losses.divergence(p, q, self.config.teacher) for p, q in both])
        selected = column["selected_tokens"].bool() if "selected_tokens" in column else None
        engine = torch.from_numpy(self.engine[sample.tokens])
        return losses.Terms(
            sample,
            logp,
            column["old_logprobs"],
            engine,
            column["advantages"],
            column.get("ref_logprobs"),
            selected,
            entropy,
            full_kl,
            divergence,
        )

    def weigh(self, samples: list[Sample]) -> list[tuple[float, float, float]]:
        """Return for each sample of a mini-batch the weight of its tokens, of a loss of the sample, and of its
        divergences from a teacher."""
        actor = self.role.actor
        modes = actor.loss_agg_mode, "seq-mean-token-sum"
        of_tokens, of_samples = (losses.weigh(samples, self.config, mode) for mode in modes)
        planned, steps = self.count_planned()
        factors = losses.further_factors(samples, self.config, self.rewards_by_group(), planned / steps)
        is_self = self.config.teacher.divergence and self.config.teacher.self_teacher.context
        taught = [s for s in samples if not is_self or any(LONGER_PROMPT in row.columns for row in s.rows)]
        of_teacher = dict(zip(map(id, taught), losses.weigh(taught, self.config, actor.loss_agg_mode), strict=True))
        parts = zip(samples, factors, of_tokens, of_samples, strict=True)
        return [(f * token, f * one, f * of_teacher.get(id(s), 0.0)) for s, f, token, one in parts]
