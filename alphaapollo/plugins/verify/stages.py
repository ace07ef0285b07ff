"""Compare each stage of a recorded update with the reference.

Each stage gets the run's own inputs of this stage, so a fault is found in the stage that has it:

    samples, rewards -> advantages -> mini-batches -> loss and gradient of each step -> weights -> engine
    weights -> log-probs, values
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn

from alphaapollo.algorithms.surprise import NUM_SUMS, compute_z, sum_surprises
from alphaapollo.observability.sampling_metrics import MAX_TOKENS, compare_samples, draw_rows, list_free_rows
from alphaapollo.plugins.verify.reference import advantages, losses, models, optimizers
from alphaapollo.plugins.verify.reference.samples import NotCovered, Recorded, Sample
from alphaapollo.plugins.verify.steps import OptimizerChain, compare_tensors, move_average, set_weights, take_gradients
from alphaapollo.plugins.verify.update import ALL, RecordedUpdate
from alphaapollo.runs.update_checks import Check
from alphaapollo.trainer.replay.recording import read_complete_recording, read_tensors
from alphaapollo.utils.kept_tokens import KEPT_TOKENS


def verify_recording(folder: Path) -> list[Check]:
    """Return the checks of all stages of a recorded update."""
    return [*Verification(read_complete_recording(folder)).run()]


class Verification(RecordedUpdate):
    """Comparison of a recorded update with the reference."""

    def run(self) -> Iterator[Check]:
        """Yield the checks of all stages."""
        sizes = {name: abs(len(column) - self.batch.num_tokens) for name, column in self.columns.items()}
        if any(sizes.values()):
            name = max(sizes, key=lambda one: sizes[one])
            yield Check("tokens", name, sizes[name], 0.0, "a value for each token that the model sampled")
            return
        self.add_teacher_column()
        yield from self.check_batch()
        yield from self.check_kl_coefficient()
        yield from self.check_selected_tokens()
        policy = self.load("policy")
        if self.sample is not None:
            with suppress(NotCovered):  # check_sample says why
                self.accumulate(policy, self.list_samples(0), self.load_full_reference(), is_first=True)
        yield from self.check_logprobs(policy)
        yield from self.check_sampling(policy)
        yield from self.check_policy_steps(policy)
        yield from self.check_published(policy)
        if "values" in self.columns:
            yield from self.check_critic()

    def add_teacher_column(self) -> None:
        """Compute the teacher's log-probs of the sampled tokens, if the advantages contain them."""
        if self.config.teacher.divergence != "sampled":
            return
        with suppress(NotCovered), torch.no_grad():
            self.load_teacher()
            column = np.zeros(self.batch.num_tokens)
            for row, tokens in self.iterate_rows(ALL):
                column[tokens] = self.of_sampled(self.of_teacher(row), row).numpy()
            self.columns["target_logprobs"] = column

    def check_batch(self) -> Iterator[Check]:
        """Check rewards to advantages, and that each row is in one mini-batch."""
        rows = [row for step in self.mini_batches for row in step]
        expected = [number for sample in self.batch.samples for number in sample.row_numbers]
        planned = self.count_mini_batches()
        wrong = float(sorted(rows) != expected or len(self.mini_batches) not in planned)
        where = f"{len(self.mini_batches)} of {len(expected)} rows"
        yield Check("mini-batches", where, wrong, 0.0, f"{min(planned)}, and each row is in one")
        try:
            given = self.inputs.kl_coef, self.inputs.baseline or 0.0, self.mini_batches
            mine = advantages.compute_advantages(self.batch, self.config, self.columns, *given)
        except NotCovered as why:
            yield self.not_covered("advantages", why)
            return
        reason = "computed in float64, stored as float32"
        for name, reference in zip(("advantages", "returns"), mine, strict=True):
            if name in self.columns:
                scale = max(float(np.abs(reference).max()), 1e-3)
                where, deviation = self.worst(self.columns[name] - reference)
                yield Check(name, f"{self.algorithm.adv_estimator}, {where}", deviation / scale, 1e-6, reason)

    def check_kl_coefficient(self) -> Iterator[Check]:
        """Check the coefficient of the KL in the reward of the next iteration."""
        control, used = self.algorithm.kl_ctrl, self.algorithm.use_kl_in_reward
        if not used or control.type == "fixed" or self.recording.steps.trained_rows is None:
            return
        kl = advantages.kl_estimate(
            self.columns["old_logprobs"] - self.columns["ref_logprobs"], self.algorithm.kl_penalty
        )
        mean = float(np.mean([kl[sample.tokens].sum() for sample in self.batch.samples]))
        expected = advantages.next_kl_coef(control, self.inputs.kl_coef, mean, len(self.batch.samples))
        gap = abs(self.metric("kl/next_coef") - expected)
        yield Check("next KL coefficient", control.type, gap / (expected or 1.0), 1e-6, "relative; computed in float64")

    def check_selected_tokens(self) -> Iterator[Check]:
        """Check which tokens the loss treats differently."""
        if "selected_tokens" not in self.columns:
            return
        columns = [torch.from_numpy(self.columns[name]) for name in ("old_logprobs", "advantages", "selected_tokens")]
        wrong, mode = 0, self.role.actor.loss_agg_mode
        for step in range(len(self.mini_batches)):
            samples = self.list_samples(step)
            weights = losses.weigh(samples, self.config, mode)
            counted = [sample for sample, weight in zip(samples, weights, strict=True) if weight]
            logp, advantages, selected = (torch.cat([x[sample.tokens] for sample in counted]) for x in columns)
            options = self.role.actor.policy_loss
            wrong += losses.count_wrongly_selected(logp, advantages, selected.bool(), options)
        yield Check(
            "selected tokens", f"{int(columns[2].sum())} tokens", float(wrong), 0.0, "tokens; computed in float64"
        )

    def check_logprobs(self, policy: nn.Module) -> Iterator[Check]:
        """Check the log-probs of the policy before the update, and of the reference model."""
        limit, reason = self.limits[0], f"nats; the run computes in {self.dtype}"
        kept = self.trained if self.sample is None else self.sample
        mine = self.compute_rows(policy, kept)
        if "old_logprobs" in self.columns:
            old = self.columns["old_logprobs"]
            if self.uses_engine_logprobs:
                where, deviation = self.worst(old - self.engine)
                yield Check("old log-probs", where, deviation, 1e-6, "those of the engine, stored as float32")
            else:
                where, deviation = self.worst(np.where(np.isnan(mine), 0.0, old - mine))
                yield Check("old log-probs", where, deviation, limit, reason)
        yield from self.check_engine_logprobs(mine)
        if "ref_logprobs" in self.columns:
            others = self.compute_rows(self.load("policy/reference"), self.compared, is_reference=True)
            differences = np.where(np.isnan(others), 0.0, self.columns["ref_logprobs"] - others)
            where, deviation = self.worst(differences)
            yield Check("reference log-probs", where, deviation, limit, reason)

    def compute_rows(self, model: nn.Module, rows: Container[int], is_reference: bool = False) -> np.ndarray:
        """Return the log-probs of the sampled tokens of some rows, and NaN for other rows. [n]"""
        column = np.full(self.batch.num_tokens, np.nan)
        with torch.no_grad():
            for row, tokens in self.iterate_rows(rows):
                known = self.before.get(tokens.start)
                if known is None or is_reference:
                    kept = {name: row.columns[name] for name in (KEPT_TOKENS,) if name in row.columns}
                    row = replace(row, columns=kept) if is_reference else row  # it chooses its own experts
                    known = self.of_sampled(self.of_row(model, row), row).numpy()
                column[tokens] = known
        return column

    def check_engine_logprobs(self, mine: np.ndarray) -> Iterator[Check]:
        """Check the log-probs with which the engine sampled, of rows that the weights before the update sampled."""
        if self.role.rollout.name == "fake":
            return
        gaps = [np.zeros(0)]
        for row, tokens in self.iterate_rows(ALL):
            is_newest = all(version == self.inputs.step - 1 for version, _ in row.weight_versions)
            if is_newest and row.temperature != 0 and not np.isnan(mine[tokens]).any():
                gaps.append(np.abs(self.engine[tokens] - mine[tokens]))
        gap = np.concatenate(gaps)
        if len(gap):
            reason = f"nats, mean of {len(gap)} tokens; engine in {self.inputs.engine_dtype}"
            yield Check("engine log-probs", f"{len(gaps) - 1} rows", float(gap.mean()), self.engine_limit, reason)

    @torch.no_grad()
    def check_sampling(self, policy: nn.Module) -> Iterator[Check]:
        """Check that the engine's tokens are samples of the weights before the update, among the tokens that its
        sampler should have kept."""
        rollout = self.role.rollout
        if rollout.name == "fake":
            return
        free = [list_free_rows(group, self.inputs.step - 1, rollout.temperature) for group in self.inputs.groups]
        rows = draw_rows(free, 0, MAX_TOKENS if self.sample is None else MAX_TOKENS // 8)
        truncation = rollout.top_p, rollout.top_k, getattr(rollout, "min_p", 0.0)
        is_truncated = truncation[0] < 1 or max(truncation[1:]) > 0
        if is_truncated and all(KEPT_TOKENS in row.columns for row in rows):
            yield self.check_kept_tokens(policy, rows, truncation)
            is_truncated = False
        is_truncated |= rollout.temperature == 0
        if is_truncated or self.algorithm.filter_groups.enable or self.config.trainer.async_mode:
            reason = "tokens or groups were selected: top_p, top_k, min_p, filter_groups, async_mode"
            yield self.not_covered("sampling", reason)
            return
        surprises = np.zeros(NUM_SUMS)
        for row in rows:
            logp, mask = self.among_kept(self.of_row(policy, row), row), np.asarray(row.action_mask) != 0
            mean = (logp.exp() * logp).sum(1, keepdim=True)
            variance = (logp.exp() * (logp - mean).square()).sum(1)
            stats = torch.stack([models.of_sampled(logp, row), -mean[:, 0], variance], 1)
            surprises += sum_surprises(stats.numpy(), np.asarray(row.logprobs)[mask])
        z = [compute_z(surprises), compute_z(np.sum([*map(compare_samples, free), np.zeros(NUM_SUMS)], axis=0))]
        where = f"{len(rows)} rows: {z[0]:+.1f}, equal samples: {z[1]:+.1f}"
        yield Check("sampling", where, max(map(abs, z)), 5.0, "standard deviations")

    def check_kept_tokens(
        self, policy: nn.Module, rows: Sequence[Recorded], truncation: tuple[float, int, float]
    ) -> Check:
        """Check that the engine kept the tokens that top_p, top_k and min_p keep."""
        masses = [torch.zeros(0)]
        for row in rows:
            logp = self.of_row(policy, row)
            is_kept = self.among_kept(logp, row).exp() > 0
            masses.append((logp.exp() * (models.find_kept(logp, *truncation) != is_kept)).sum(1))
        mass = torch.cat(masses)
        where, limit = f"{len(rows)} rows", max(self.engine_limit, 1e-3)
        reason = f"probability of tokens of only one of both sets, mean of {len(mass)} positions"
        return Check("kept tokens", where, float(mass.mean()) if len(mass) else 0.0, limit, reason)

    def check_policy_steps(self, policy: nn.Module) -> Iterator[Check]:
        """Check the gradient of each optimizer step, and the weights after the last one."""
        files, found = self.recording.read_gradients("policy"), list[float]()
        if not files:
            return
        optim, actor = self.role.actor.optim, self.role.actor
        yield self.check_number_of_steps("optimizer steps", len(files), actor.ppo_epochs)
        chain = self.make_chain("policy", policy, actor)
        yield self.check_earlier_steps("earlier steps", chain.num_steps, actor.ppo_epochs)
        reference = self.load_full_reference()
        limit, reason = self.limits[2], f"relative; the run computes in {self.dtype}"
        is_covered, has_gradient = self.sample is None, False
        if self.sample is not None:
            yield self.check_sample(policy, reference)
        for number, file in enumerate(files):
            recorded, samples = read_tensors(file), self.list_samples(number)
            try:
                if is_covered:
                    found.append(self.accumulate(policy, samples, reference, is_first=number == 0))
                    mine, name = take_gradients(policy, "model."), f"gradient of step {number + 1}"
                    yield (check := compare_tensors(name, recorded, mine, limit, reason, self.small))
                    has_gradient |= check.covered
            except NotCovered as why:
                is_covered = False
                yield self.not_covered("gradient", why)
            try:
                if optim.name == "trpo":
                    self.take_trpo_step(policy, samples, recorded)
                else:
                    chain.step(recorded)
            except NotCovered as why:
                yield self.not_covered("weights", why)
                return
            if self.teacher is not None and self.config.teacher.self_teacher.context:
                move_average(self.teacher, policy, self.config.teacher.self_teacher.ema_rate)
            if number == 0 and len(files) > 1:
                yield chain.compare("weights_1")
            if chain.limit > limit:
                limit, reason = chain.limit, f"{reason}, from the weights of the step before"
        if is_covered and has_gradient:
            loss = sum(found) / len(files)
            deviation = abs(self.metric("actor/loss") - loss) / max(abs(loss), 1e-2)
            yield Check("loss", f"mean of {len(files)} steps", deviation, limit, reason)
        yield chain.compare()

    def check_sample(self, policy: nn.Module, reference: nn.Module | None) -> Check:
        """Check the gradient of a few rows of the first mini-batch, at the weights before the update."""
        mine = take_gradients(policy, "model.")
        try:
            if not mine:
                self.accumulate(policy, self.list_samples(0), reference, is_first=True)
                mine = take_gradients(policy, "model.")
        except NotCovered as why:
            return self.not_covered("gradient", why)
        name, reason = f"gradient of {len(self.sample or ())} rows", f"relative; the run computes in {self.dtype}"
        return compare_tensors(name, self.recording.read_sample_gradients(), mine, self.limits[2], reason, self.small)

    def accumulate(
        self, policy: nn.Module, samples: list[Sample], reference: nn.Module | None, is_first: bool
    ) -> float:
        """Add the gradients of a mini-batch. Returns its loss. is_first: the weights are those of the old policy."""
        has_experts = any("expert" in name for name, _ in policy.named_parameters())
        if self.role.model.router_aux_loss_coef and has_experts:
            raise NotCovered("the load-balancing loss of experts, which depends on the micro-batches")
        self.load_teacher()
        total = 0.0
        for sample, weights in zip(samples, self.weigh(samples), strict=True):
            if sample.row_numbers[0] not in self.compared:
                continue
            x = self.make_terms(policy, sample, reference)
            if is_first and not self.uses_engine_logprobs:
                x.old = x.logp.detach()  # exactly, because |log pi - log pi_old| has no gradient at 0
            if is_first:
                starts = np.cumsum([sample.tokens.start, *(int(np.asarray(r.action_mask).sum()) for r in sample.rows)])
                parts = np.split(x.logp.detach().numpy(), starts[1:-1] - starts[0])
                self.before |= dict(zip(starts[:-1].tolist(), parts, strict=True))
            of_token, of_sample, of_teacher = weights
            loss = losses.loss_of_sample(x, of_token, of_sample, self.config, self.inputs.policy_kl_coef, of_teacher)
            if loss.requires_grad:
                loss.backward()
            total += loss.item()
        return total

    def take_trpo_step(self, policy: nn.Module, samples: list[Sample], recorded: dict[str, Tensor]) -> None:
        """Take TRPO's step with the run's gradient."""
        if self.sample is not None:
            raise NotCovered("TRPO's step, which only alphaapollo verify computes")
        vector, trained = models.WeightVector(policy), self.recording.steps.trained_rows
        gradient = torch.cat([recorded["model." + name].double().flatten() for name in vector.trained])
        assert trained is not None
        rows = [row for s in samples for number, row in zip(s.row_numbers, s.rows, strict=True) if trained[number]]
        with torch.no_grad():
            old = [self.of_row(policy, row) for row in rows]

        def evaluate(weights: Tensor) -> tuple[float, Tensor]:
            vector.set(weights)
            new = [self.of_row(policy, row) for row in rows]
            kl = torch.stack([(p.exp() * (p - q)).sum() for p, q in zip(old, new, strict=True)]).sum()
            with torch.no_grad():
                terms = [self.make_terms(policy, sample, None) for sample in samples]
                parts = zip(terms, self.weigh(samples), strict=True)
                loss = sum(losses.loss_of_sample(x, w[0], w[1], self.config, None).item() for x, w in parts)
            return loss, kl / sum(map(len, old))

        vector.restore(optimizers.trpo(vector.start, gradient, evaluate, self.role.actor.optim))

    def check_published(self, policy: nn.Module) -> Iterator[Check]:
        """Check the engines' log-probs of a fixed text after the weight sync."""
        published = self.recording.read_published()
        if not published or not published["engine_logprobs"]:
            return
        if len(published["token_ids"]) != len(published["engine_logprobs"][0]) + 1:
            yield self.not_covered("published weights", "the text of the check contains an image")
            return
        set_weights(policy, self.recording.read_weights("policy"), "model.")
        tokens = published["token_ids"]
        mask = [0] + [1] * (len(tokens) - 1)
        row = SimpleNamespace(token_ids=tokens, action_mask=mask, images=(), columns={})
        with torch.no_grad():
            logprobs = models.token_logprobs(policy, row, 1.0, self.inputs.excluded_ids)
            mine = models.of_sampled(logprobs, row).numpy()
        for number, engine in enumerate(published["engine_logprobs"]):
            gap = float(np.abs(mine - np.array(engine)).mean())
            reason = f"nats, mean of {len(mine)} tokens; engine in {self.inputs.engine_dtype}"
            yield Check("published weights", f"engine {number}", gap, self.engine_limit, reason)

    def check_critic(self) -> Iterator[Check]:
        """Check values, gradients and weights of the critic."""
        critic, options = self.load("critic"), self.config.critic
        limit, reason = self.limits[1], f"the run computes in {self.dtype}"
        differences = np.zeros(self.batch.num_tokens)
        with torch.no_grad():
            for row, tokens in self.iterate_rows(self.compared):
                differences[tokens] = self.columns["values"][tokens] - models.values(critic, row).numpy()
        where, deviation = self.worst(differences)
        yield Check("values", where, deviation, limit, reason)
        steps = self.recording.read_gradients("critic")
        chain = self.make_chain("critic", critic, options)
        yield self.check_number_of_steps("critic: optimizer steps", len(steps), options.ppo_epochs)
        yield self.check_earlier_steps("critic: earlier steps", chain.num_steps, options.ppo_epochs)
        limit, reason = self.limits[2], f"relative; the run computes in {self.dtype}"
        if self.sample is not None:
            yield self.not_covered("critic: gradient", "only alphaapollo verify computes it")
            return
        for number, file in enumerate(steps):
            samples = self.list_samples(number)
            weights = losses.weigh(samples, self.config, "token-mean", of_loss=False)
            factors = losses.further_factors(samples, self.config, self.rewards_by_group(), len(samples))
            for sample, weight, factor in zip(samples, weights, factors, strict=True):
                values = torch.cat([models.values(critic, row) for row in sample.rows])
                old, returns = (torch.from_numpy(self.columns[n][sample.tokens]) for n in ("values", "returns"))
                (factor * weight * losses.value_loss(values, old, returns, options.cliprange_value).sum()).backward()
            recorded, name = read_tensors(file), f"critic: gradient of step {number + 1}"
            yield compare_tensors(name, recorded, take_gradients(critic, ""), limit, reason, self.small)
            chain.step(recorded)
            if number == 0 and len(steps) > 1:
                yield chain.compare("weights_1")
        yield chain.compare()

    def make_chain(self, role: str, model: nn.Module, options: SimpleNamespace) -> OptimizerChain:
        """Make the reference's optimizer steps of a role, whose recorded state is then forgotten to free its memory."""
        return OptimizerChain(self.recording, role, model, *self.states.pop(role), options, self.count_steps(role))

    def check_number_of_steps(self, quantity: str, found: int, epochs: int) -> Check:
        expected = len(self.mini_batches) * epochs
        return Check(quantity, f"{found} of {expected}", abs(found - expected), 0.0, "one per mini-batch and epoch")

    def check_earlier_steps(self, quantity: str, found: int, epochs: int) -> Check:
        """Check the position in the learning rate schedule. Iterations without all groups may have fewer steps, which
        only the metrics of the run tell."""
        is_critic = quantity.startswith("critic")
        before = self.inputs.step - 1 - (0 if is_critic else self.config.trainer.critic_warmup)
        planned = max(0, before) * self.count_planned()[1] * epochs
        logged = None if is_critic else self.recording.count_logged_steps()
        if logged is None and found != planned:
            return self.not_covered(quantity, f"{found}, but {planned} are planned before iteration {self.inputs.step}")
        expected = planned if logged is None else logged
        return Check(quantity, f"{found} of {expected}", abs(found - expected), 0.0, "position in the schedule")

    def not_covered(self, quantity: str, reason: object) -> Check:
        return Check(quantity, "", 0.0, 0.0, str(reason), covered=False)
