"""Schema of all keys: name, type, default, meaning and rules. Defaults are defined only here.

Each section has a file (`data.py` is `data.*`), and so does each command (`ppo.py` is main_ppo's configuration). The
docstring under a field is its documentation (docs/config/ is generated from it). Rules are declared beside the fields
(base.py). Key names follow verl if the meaning is the same. This package does not import torch, Ray or Hydra.
"""

from alphaapollo.config.schema.actor import Actor, AggregationMode, PolicyLossOptions, Reference
from alphaapollo.config.schema.algorithm import Algorithm, KLControl, ReferenceReset, RolloutCorrection
from alphaapollo.config.schema.critic import Critic
from alphaapollo.config.schema.data import Data
from alphaapollo.config.schema.dpo import DpoConfig, PairData, Preference, PreferenceData, RewardData, RmConfig
from alphaapollo.config.schema.env import Agent, Env, InformalMath, McpServer
from alphaapollo.config.schema.evolving import (
    Evolving,
    EvolvingBudget,
    EvolvingConfig,
    EvolvingRole,
    EvolvingToolRole,
    ServedModel,
)
from alphaapollo.config.schema.generation import (
    EvalConfig,
    ExportConfig,
    GenerationConfig,
    GenerationData,
    GenerationTrainer,
)
from alphaapollo.config.schema.model import FrozenFsdp, Fsdp, Lora, LoraForm, Model, Optimizer, RoleFsdp
from alphaapollo.config.schema.ppo import ActorRolloutRef, Config
from alphaapollo.config.schema.reward import Criterion, CustomRewardFunction, Judge, Reward, RewardModel, Rubric
from alphaapollo.config.schema.rollout import EngineKwargs, Rollout, ValSampling
from alphaapollo.config.schema.sft import SftConfig, SftData
from alphaapollo.config.schema.teacher import NO_TEACHER, SelfTeacher, Teacher, TeacherModel
from alphaapollo.config.schema.trainer import RunFolder, Trainer, Training
from alphaapollo.config.schema.tuning import TuningConfig, TuningTrainer
