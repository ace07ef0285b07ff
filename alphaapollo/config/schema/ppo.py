"""The whole configuration of main_ppo."""

from __future__ import annotations

import math

from alphaapollo.config.schema.actor import Actor, Reference
from alphaapollo.config.schema.algorithm import Algorithm
from alphaapollo.config.schema.base import Section
from alphaapollo.config.schema.critic import Critic
from alphaapollo.config.schema.data import Data
from alphaapollo.config.schema.env import Env
from alphaapollo.config.schema.model import Model
from alphaapollo.config.schema.reward import CustomRewardFunction, Reward, RewardModel
from alphaapollo.config.schema.rollout import Rollout
from alphaapollo.config.schema.teacher import Teacher
from alphaapollo.config.schema.trainer import Trainer


class ActorRolloutRef(Section):
    model: Model = Model()
    actor: Actor = Actor()
    ref: Reference = Reference()
    rollout: Rollout = Rollout()


class Config(Section):
    """The whole configuration of main_ppo."""

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
    def group_size(self) -> int:
        """Trajectories a prompt: env.rollout.n, or actor_rollout_ref.rollout.n where only that is set."""
        return max(self.env.rollout.n, self.actor_rollout_ref.rollout.n)

    @property
    def trajectories(self) -> int:
        """An iteration's, where its batch is full."""
        return self.data.train_batch_size * self.group_size

    @property
    def mini_batches(self) -> int:
        """Of a full batch."""
        return math.ceil(self.trajectories / self.actor_rollout_ref.actor.ppo_mini_batch_size)

    @property
    def optimiser_steps(self) -> int:
        """An iteration's, where its batch is full."""
        return self.mini_batches * self.actor_rollout_ref.actor.ppo_epochs

    def policy_steps(self, iterations: int) -> int:
        """The policy's optimiser steps in so many iterations: none in those that train the critic alone."""
        return max(0, iterations - self.trainer.critic_warmup) * self.optimiser_steps

    def critic_steps(self, iterations: int) -> int:
        """The critic's optimiser steps in so many iterations."""
        return iterations * self.mini_batches * self.critic.ppo_epochs
