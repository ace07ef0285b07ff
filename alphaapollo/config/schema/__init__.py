"""Every option of the project: name, type, default, meaning, and its rules. The only home of defaults.

One file per section (`data.py` is `data.*`) and one per command (`ppo.py` is main_ppo's configuration). The docstring
under a field is its documentation (docs/config/ is generated from it). Rules are declared beside the fields: see
base.py. Key names follow verl where the meaning is the same. No torch, Ray or Hydra here.
"""

from alphaapollo.config.schema.actor import Actor, AggregationMode, KLKind, PolicyLossOptions, Reference
from alphaapollo.config.schema.algorithm import (
    Algorithm,
    FilterGroups,
    Filtration,
    KLControl,
    LengthBudget,
    OverlongPenalty,
    ReferenceReset,
    RolloutCorrection,
)
from alphaapollo.config.schema.base import Frequency, Ratio, Scalar, Section
from alphaapollo.config.schema.critic import Critic, CriticModel
from alphaapollo.config.schema.data import Data
from alphaapollo.config.schema.dpo import DpoConfig, DpoTrainer, PairData, Preference, PreferenceData
from alphaapollo.config.schema.env import (
    Env,
    EnvRollout,
    GridWorld,
    GuessingGame,
    InformalMath,
    McpServer,
    OpenEnv,
    ReasoningGym,
    ToolLimits,
    Verifiers,
)
from alphaapollo.config.schema.eval import EvalConfig, EvalData, EvalTrainer
from alphaapollo.config.schema.evolving import (
    Evolving,
    EvolvingBudget,
    EvolvingConfig,
    EvolvingData,
    EvolvingRole,
    EvolvingRoles,
    EvolvingToolRole,
    EvolvingTrainer,
    ServedModel,
)
from alphaapollo.config.schema.export import ExportConfig
from alphaapollo.config.schema.generation import GenerationConfig, GenerationData, GenerationRollout, GenerationTrainer
from alphaapollo.config.schema.model import FrozenFsdp, Fsdp, Lora, LoraForm, Model, Optimizer, RoleFsdp
from alphaapollo.config.schema.ppo import ActorRolloutRef, Config
from alphaapollo.config.schema.reward import (
    CustomRewardFunction,
    Judge,
    Reward,
    RewardModel,
    RewardModelPath,
)
from alphaapollo.config.schema.rm import BradleyTerry, RewardData, RmConfig, RmTrainer
from alphaapollo.config.schema.rollout import EngineKwargs, Rollout, ValSampling
from alphaapollo.config.schema.sft import SftConfig, SftData, SftTrainer
from alphaapollo.config.schema.teacher import NO_TEACHER, Distance, Teacher, TeacherModel
from alphaapollo.config.schema.trainer import RunFolder, Trainer, Training
from alphaapollo.config.schema.tuning import TuningConfig, TuningData, TuningTrainer

__all__ = [
    "NO_TEACHER",
    "Actor",
    "ActorRolloutRef",
    "AggregationMode",
    "Algorithm",
    "BradleyTerry",
    "Config",
    "Critic",
    "CriticModel",
    "CustomRewardFunction",
    "Data",
    "Distance",
    "DpoConfig",
    "DpoTrainer",
    "EngineKwargs",
    "Env",
    "EnvRollout",
    "EvalConfig",
    "EvalData",
    "EvalTrainer",
    "Evolving",
    "EvolvingBudget",
    "EvolvingConfig",
    "EvolvingData",
    "EvolvingRole",
    "EvolvingRoles",
    "EvolvingToolRole",
    "EvolvingTrainer",
    "ExportConfig",
    "FilterGroups",
    "Filtration",
    "Frequency",
    "FrozenFsdp",
    "Fsdp",
    "GenerationConfig",
    "GenerationData",
    "GenerationRollout",
    "GenerationTrainer",
    "GridWorld",
    "GuessingGame",
    "InformalMath",
    "Judge",
    "KLControl",
    "KLKind",
    "LengthBudget",
    "Lora",
    "LoraForm",
    "McpServer",
    "Model",
    "OpenEnv",
    "Optimizer",
    "OverlongPenalty",
    "PairData",
    "PolicyLossOptions",
    "Preference",
    "PreferenceData",
    "Ratio",
    "ReasoningGym",
    "Reference",
    "ReferenceReset",
    "Reward",
    "RewardData",
    "RewardModel",
    "RewardModelPath",
    "RmConfig",
    "RmTrainer",
    "RoleFsdp",
    "Rollout",
    "RolloutCorrection",
    "RunFolder",
    "Scalar",
    "Section",
    "ServedModel",
    "SftConfig",
    "SftData",
    "SftTrainer",
    "Teacher",
    "TeacherModel",
    "ToolLimits",
    "Trainer",
    "Training",
    "TuningConfig",
    "TuningData",
    "TuningTrainer",
    "ValSampling",
    "Verifiers",
]
