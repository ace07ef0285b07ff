"""Schema of all keys: name, type, default, meaning and rules. Defaults are defined only here.

`commands.py` has the configurations of the commands that train, `generation.py` those of the others; the other files
have their sections. The docstring under a field is its documentation (docs/config/ is generated from it). Rules are
declared beside the fields (base.py), or in config/requirements.py. Key names follow verl if the meaning is the same.
This package does not import torch, Ray or Hydra.
"""

from alphaapollo.config.schema.algorithm import (
    Actor,
    AggregationMode,
    Algorithm,
    Critic,
    KLControl,
    PolicyLossOptions,
    Reference,
    ReferenceReset,
    RolloutCorrection,
)
from alphaapollo.config.schema.commands import (
    ActorRolloutRef,
    Config,
    DpoConfig,
    PairData,
    Preference,
    PreferenceData,
    RewardData,
    RmConfig,
    SftConfig,
    SftData,
    TuningConfig,
    TuningTrainer,
)
from alphaapollo.config.schema.data import Data
from alphaapollo.config.schema.env import Agent, Env, InformalMath, McpServer
from alphaapollo.config.schema.generation import (
    EvalConfig,
    Evolving,
    EvolvingBudget,
    EvolvingConfig,
    EvolvingRole,
    EvolvingToolRole,
    ExportConfig,
    GenerationConfig,
    GenerationData,
    GenerationTrainer,
    ServedModel,
)
from alphaapollo.config.schema.model import (
    EngineKwargs,
    FrozenFsdp,
    Fsdp,
    Lora,
    LoraForm,
    Model,
    Optimizer,
    RoleFsdp,
    Rollout,
    ValSampling,
)
from alphaapollo.config.schema.reward import (
    NO_TEACHER,
    Criterion,
    CustomRewardFunction,
    Judge,
    Reward,
    RewardModel,
    Rubric,
    SelfTeacher,
    Teacher,
    TeacherModel,
)
from alphaapollo.config.schema.trainer import RunFolder, Trainer
