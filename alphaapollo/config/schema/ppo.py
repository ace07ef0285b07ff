"""Configuration of main_ppo."""

from __future__ import annotations

import math
from collections.abc import Iterator

from alphaapollo.config.schema.actor import Actor, Reference
from alphaapollo.config.schema.algorithm import Algorithm
from alphaapollo.config.schema.base import Section
from alphaapollo.config.schema.critic import Critic
from alphaapollo.config.schema.data import Data
from alphaapollo.config.schema.env import Env
from alphaapollo.config.schema.model import Model
from alphaapollo.config.schema.reward import CustomRewardFunction, Reward, RewardModel
from alphaapollo.config.schema.rollout import Rollout
from alphaapollo.config.schema.sizes import (
    find_batch_token_errors,
    find_ep_size_errors,
    find_group_size_errors,
)
from alphaapollo.config.schema.teacher import Teacher
from alphaapollo.config.schema.trainer import Trainer

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MAX_TRAJECTORIES = 10_000_000  # per iteration: the driver holds all of them in memory


class ActorRolloutRef(Section):
    model: Model = Model()
    actor: Actor = Actor()
    ref: Reference = Reference()
    rollout: Rollout = Rollout()


class Config(Section):
    """Configuration of main_ppo."""

    data: Data = Data()
    actor_rollout_ref: ActorRolloutRef = ActorRolloutRef()
    critic: Critic = Critic()
    teacher: Teacher = Teacher()
    algorithm: Algorithm = Algorithm()
    env: Env = Env()
    reward: Reward = Reward()
    reward_model: RewardModel = RewardModel()
    custom_reward_function: CustomRewardFunction = CustomRewardFunction()
    trainer: Trainer = Trainer()

    @property
    def validates(self) -> bool:
        """Whether there is anything to validate on."""
        return bool(self.data.val_files or self.trainer.val_suites)

    @property
    def validates_on_rows(self) -> bool:
        """Whether rows of data.val_files are answered and graded during the run."""
        return bool(self.data.val_files) and self.trainer.test_freq > 0

    @property
    def group_size(self) -> int:
        """Trajectories per prompt."""
        return self.env.rollout.n

    @property
    def trajectories_per_batch(self) -> int:
        """Trajectories of a full batch."""
        return self.data.train_batch_size * self.group_size

    @property
    def trajectories_per_update(self) -> int:
        """Trajectories that an iteration trains on: those of a full batch, and of reused groups."""
        return (self.data.train_batch_size + self.data.reuse.groups) * self.group_size

    @property
    def num_mini_batches(self) -> int:
        """Mini-batches of an update with a full batch."""
        return math.ceil(self.trajectories_per_update / self.actor_rollout_ref.actor.ppo_mini_batch_size)

    @property
    def steps_per_iteration(self) -> int:
        """The policy's optimizer steps per iteration with a full batch."""
        return self.num_mini_batches * self.actor_rollout_ref.actor.ppo_epochs

    @property
    def engine_staleness(self) -> int:
        """How many weight updates old a token may be when it is trained on."""
        return self.trainer.max_staleness if self.trainer.async_mode else 0

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term compares the policy with a reference model."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss

    @property
    def needs_ref_log_probs(self) -> bool:
        """Whether a KL term needs the reference model's log-probs of the sampled tokens."""
        actor = self.actor_rollout_ref.actor
        return self.algorithm.use_kl_in_reward or (actor.use_kl_loss and not actor.uses_full_kl)

    @property
    def max_teacher_length(self) -> int:
        """Maximum number of tokens of a row that the teacher reads."""
        prompt = self.teacher.self_teacher.max_prompt_length or self.data.max_length
        return prompt + self.data.max_response_length if self.teacher.uses_self_teacher else self.data.max_length

    def count_policy_optimizer_steps(self, iterations: int) -> int:
        """Return the policy's optimizer steps in the first `iterations` iterations; critic warmup has none."""
        return max(0, iterations - self.trainer.critic_warmup) * self.steps_per_iteration

    def count_critic_optimizer_steps(self, iterations: int) -> int:
        """Return the critic's optimizer steps in the first `iterations` iterations."""
        return iterations * self.num_mini_batches * self.critic.ppo_epochs

    def find_problems(self) -> Iterator[str]:
        yield from self._find_batch_problems()
        yield from self._find_algorithm_problems()
        yield from find_batch_token_errors(ROLLOUT, self.actor_rollout_ref.rollout, self.data.max_length)
        yield from self._find_rank_problems()

    def _find_batch_problems(self) -> Iterator[str]:
        prompts, size = (
            self.data.train_batch_size + self.data.reuse.groups,
            self.actor_rollout_ref.actor.ppo_mini_batch_size,
        )
        if self.trajectories_per_update > MAX_TRAJECTORIES:
            sizes = f"data.train_batch_size={self.data.train_batch_size} x env.rollout.n={self.group_size}"
            yield f"{sizes} exceeds the limit of {MAX_TRAJECTORIES} trajectories per iteration. Lower one of them."
        elif size < self.trajectories_per_update and self.trajectories_per_update % size:
            divisor = next(d for d in range(size, 0, -1) if self.trajectories_per_update % d == 0)
            yield (
                f"{ACTOR}.ppo_mini_batch_size={size} must divide the {self.trajectories_per_update} trajectories of an "
                f"iteration ({prompts} prompts x {self.group_size}). Set {divisor} or another divisor."
            )
        gates = [stage.metric for stage in self.data.curriculum.stages[:-1] if stage.metric != "pass_rate"]
        if gates and not self.validates_on_rows:
            yield f"data.curriculum.stages wait for {gates[0]}. Set data.val_files, and trainer.test_freq=10."

    def _find_algorithm_problems(self) -> Iterator[str]:
        penalty, longest = self.algorithm.overlong_penalty, self.data.max_response_length
        if penalty.enable and (cache := penalty.cache or 0) > longest:
            yield f"algorithm.overlong_penalty.cache={cache} exceeds data.max_response_length={longest}. Lower it."
        if self.teacher.uses_full_vocabulary and self.actor_rollout_ref.actor.uses_full_kl:
            teacher = f"teacher.divergence={self.teacher.divergence}"
            yield f"{teacher} does not work with {ACTOR}.kl_loss_type=full. Set kl_loss_type=low_var_kl+."
        if self.teacher.servers and (temperature := self.actor_rollout_ref.rollout.temperature) != 1.0:
            yield (
                f"{ROLLOUT}.temperature={temperature:g}, but the server of {next(iter(self.teacher.servers))} returns "
                "log-probs at temperature 1. Set it to 1."
            )

    def _find_rank_problems(self) -> Iterator[str]:
        actor, trainer, name = self.actor_rollout_ref.actor, self.trainer, "ulysses_sequence_parallel_size"
        sizes = {
            f"{ACTOR}.{name}": actor.ulysses_sequence_parallel_size,
            f"{ACTOR}.fsdp_config.fsdp_size": actor.fsdp_config.fsdp_size,
            "critic.fsdp_config.fsdp_size": self.critic.fsdp_config.fsdp_size,
        }
        yield from find_group_size_errors(sizes, trainer)
        sections = {f"{ACTOR}.fsdp_config": actor.fsdp_config, "critic.fsdp_config": self.critic.fsdp_config}
        yield from find_ep_size_errors(sections, trainer)
