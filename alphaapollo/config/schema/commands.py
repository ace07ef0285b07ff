"""Configurations of the commands that train: main_ppo, main_sft, main_dpo and main_rm."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from alphaapollo.config.schema.algorithm import Actor, Algorithm, Critic, Reference
from alphaapollo.config.schema.base import (
    CHANGES_ALGORITHM,
    CHANGES_CODE,
    CHANGES_DATA,
    CODE,
    ActiveUnless,
    ActiveWhen,
    CountOrMinusOne,
    FilePath,
    FolderName,
    Ratio,
    RegisteredName,
    ResumeRule,
    Section,
)
from alphaapollo.config.schema.data import Data, TrainingFiles
from alphaapollo.config.schema.env import Env
from alphaapollo.config.schema.model import Fsdp, Model, NonEmptyText, Optimizer, Rollout, ValSampling
from alphaapollo.config.schema.reward import CustomRewardFunction, Reward, RewardModel, Teacher
from alphaapollo.config.schema.trainer import LOCAL_HAS_ONE_NODE, Trainer, Training


class TuningData(TrainingFiles):
    train_batch_size: PositiveInt = 32
    """Examples per optimizer step, over all ranks."""
    max_token_len_per_gpu: PositiveInt | Literal["auto"] = "auto"
    """Maximum tokens of a micro-batch per rank (times ulysses_sequence_parallel_size); auto = 16384, halved while the
    memory plan does not fit."""
    max_length: PositiveInt = 2048
    """Maximum tokens per example."""
    truncation: Literal["error", "left", "right", "drop"] = "error"
    """For an example over max_length: stop the run, cut its start, cut its end, or drop it (counted)."""


class TuningTrainer(Training):
    save_freq: CountOrMinusOne | Literal["auto"] = "auto"
    """Write a checkpoint every so many steps, and at the end; auto = every ten minutes, with keep_best also with each
    validation, and at the end; -1 = never."""
    test_freq: CountOrMinusOne = -1
    """Validate every so many steps, and at the end; -1 = never."""
    log_freq: PositiveInt = 10
    """Write metrics every so many steps."""
    controller: Annotated[Literal["auto", "ray", "local"], LOCAL_HAS_ONE_NODE] = "auto"
    """ray = a worker process per rank, on any number of nodes; local = one node without Ray: one rank in this process,
    several in forked processes (docs/scaling.md#without-ray); auto = local for one rank, unless RAY_ADDRESS is set."""


class TuningConfig(Section):
    data: TuningData = TuningData()
    model: Model = Model()
    optim: Optimizer = Optimizer(lr=1e-5)
    grad_clip: PositiveFloat = 1.0
    """Maximum gradient norm."""
    fsdp_config: Fsdp = Fsdp()
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Ranks that share every sequence (Ulysses sequence parallelism). Must divide the ranks and the attention heads."""
    trainer: TuningTrainer = TuningTrainer()


WHEN_VAL_PROMPTS = ActiveWhen("/data.val_prompts")


class SftData(TuningData):
    messages_key: Annotated[str, CHANGES_DATA] = "messages"
    """Column of the chat; the assistant's messages are trained on."""
    prompt_key: Annotated[str, CHANGES_DATA] = "prompt"
    """Column of the prompt, in files without a messages column, and in val_prompts."""
    response_key: Annotated[str, CHANGES_DATA] = "response"
    """Column of the response, in files without a messages column."""
    train_turns: Annotated[Literal["all", "last"], CHANGES_DATA] = "all"
    """Assistant messages of a chat that are trained on: all of them, or the last one. In both cases, only those without
    a weight of 0."""
    val_prompts: Annotated[str | list[str], ActiveUnless("/trainer.test_freq", -1), FilePath("data")] = ""
    """Prompts that the model answers at every validation, scored as data.val_files of main_ppo (docs/sft.md): entries
    like those of train_files; empty = none. val_max_samples and truncation apply."""
    max_prompt_length: Annotated[PositiveInt, WHEN_VAL_PROMPTS] = 512
    """Maximum tokens of a rendered prompt of val_prompts."""
    max_response_length: Annotated[PositiveInt, WHEN_VAL_PROMPTS] = 512
    """Maximum tokens after a prompt of val_prompts, over all turns."""


class SftRollout(Section):
    max_num_seqs: PositiveInt = 64
    """Answers that a rank samples at a time; their KV caches use memory."""
    val_kwargs: ValSampling = ValSampling()
    stop: str | list[NonEmptyText] = []
    """Strings that end an answer, as actor_rollout_ref.rollout.stop of main_ppo."""
    include_stop_str_in_output: Annotated[bool, ActiveWhen("stop")] = False
    """Graders and environments see the stop string at the end of the answer; false = only the text before it."""


class SftConfig(TuningConfig):
    unread_keys = {"env.rollout.n": "rollout.val_kwargs.n is the number of samples"}
    resume_rules = dict.fromkeys(("rollout", "env", "reward", "custom_reward_function"), ResumeRule("applied"))

    data: SftData = SftData()
    rollout: Annotated[SftRollout, WHEN_VAL_PROMPTS] = SftRollout()
    env: Annotated[Env, WHEN_VAL_PROMPTS] = Env()
    reward: Annotated[Reward, WHEN_VAL_PROMPTS] = Reward()
    custom_reward_function: Annotated[CustomRewardFunction, WHEN_VAL_PROMPTS] = CustomRewardFunction()
    trainer: TuningTrainer = TuningTrainer(experiment_name="sft")


class PairData(TuningData):
    truncation: Literal["error", "drop"] = "error"
    """For an example over data.max_length: stop the run, or drop the example (counted)."""
    prompt_key: Annotated[str, CHANGES_DATA] = "prompt"
    """Column of the prompt, a chat or a string; not needed if the answers are complete chats."""
    chosen_key: Annotated[str, CHANGES_DATA] = "chosen"
    """Column of the better answer: a string or messages."""
    rejected_key: Annotated[str, CHANGES_DATA] = "rejected"
    """Column of the worse answer."""
    use_prefix_grouper: bool | Literal["auto"] = "auto"
    """Compute the common prefix of a pair once (docs/parallelism.md). auto = if the model supports it
    and enough tokens are saved."""


class PreferenceData(PairData):
    response_key: Annotated[str, CHANGES_DATA] = "response"
    """kto: column of a single answer, if there are no pairs: a string or messages."""
    label_key: Annotated[str, CHANGES_DATA] = "label"
    """kto: column that says whether a single answer is desirable: true or false."""


class Preference(Section):
    loss: Annotated[str, CHANGES_ALGORITHM, RegisteredName("algorithms.preference_losses:get_preference_loss")] = (
        "sigmoid"
    )
    """Preference loss, by its registered name: sigmoid (DPO; cDPO with label_smoothing), robust, ipo, ipo_mean, hinge,
    slic, exo_pair, nca_pair, sppo_hard, apo_zero, apo_down, kto, orpo or simpo (docs/preferences.md)."""
    beta: PositiveFloat | None = None
    """Strength of the constraint to the reference: DPO's beta, IPO's tau, ORPO's lambda, SimPO's beta; null = default
    of the loss (0.1; simpo 2, sppo_hard 0.001)."""
    label_smoothing: Ratio | None = None
    """Assumed share of wrong labels, for sigmoid (cDPO), robust and exo_pair; null = default of the loss (0; exo_pair
    0.001)."""
    simpo_gamma: NonNegativeFloat = 1.0
    """simpo: target margin between the rewards of chosen and rejected answer."""
    slic_delta: PositiveFloat = 1.0
    """slic: target margin between the log-probs of chosen and rejected answer."""
    kto_desirable_weight: NonNegativeFloat = 1.0
    """kto: weight of desirable answers."""
    kto_undesirable_weight: NonNegativeFloat = 1.0
    """kto: weight of undesirable answers."""
    sft_coef: NonNegativeFloat = 0.0
    """Weight of an added next-token loss on the chosen answer: a mean over its tokens (RPO, arXiv 2404.19733); with
    slic a sum (SLiC-HF's lambda)."""
    custom_module: Annotated[str, CHANGES_CODE, CODE] = ""
    """Python file, or installed module, that registers your own losses (docs/preferences.md)."""


class DpoConfig(TuningConfig):
    data: PreferenceData = PreferenceData()
    preference: Preference = Preference()
    optim: Optimizer = Optimizer(lr=5e-7)
    trainer: TuningTrainer = TuningTrainer(experiment_name="dpo")


class RewardData(PairData):
    margin_key: Annotated[str, CHANGES_DATA] = "margin"
    """Column of the margin by which the chosen answer is better, at least 0 (arXiv 2307.09288, Eq. 2); 0 if there is no
    such column."""


class BradleyTerry(Section):
    centring_coef: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's scores, which keeps scores near zero (arXiv 2312.09244: 0.01)."""


class RmTrainer(TuningTrainer):
    experiment_name: FolderName = "rm"
    """Second folder of the run under output_dir."""
    export_lora: Literal["merged"] = "merged"
    """With LoRA: write full weights with the adapters merged in; adapters alone would lack the trained head."""


class RmConfig(TuningConfig):
    data: RewardData = RewardData()
    bradley_terry: BradleyTerry = BradleyTerry()
    trainer: RmTrainer = RmTrainer()


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
        selected = (self.algorithm.filtration.selects and self.algorithm.filtration.size) or self.group_size
        return (self.data.train_batch_size + self.data.reuse.groups) * min(selected, self.group_size)

    @property
    def loss_horizon(self) -> float:
        """Constant of loss_agg_mode=seq-mean-token-sum-norm, in tokens."""
        return self.actor_rollout_ref.actor.loss_scale_factor or float(self.data.max_response_length)

    @property
    def num_mini_batches(self) -> int:
        """Mini-batches of an update with a full batch."""
        return math.ceil(self.trajectories_per_update / self.actor_rollout_ref.actor.ppo_mini_batch_size)

    @property
    def steps_per_iteration(self) -> int:
        """The policy's optimizer steps per iteration with a full batch."""
        return self.num_mini_batches * self.actor_rollout_ref.actor.ppo_epochs

    @property
    def uses_trpo(self) -> bool:
        """Whether the policy's optimizer is TRPO."""
        return self.actor_rollout_ref.actor.optim.name == "trpo"

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
        longest_prompt = self.teacher.self_teacher.max_prompt_length or self.data.max_length
        longest_row = longest_prompt + self.data.max_response_length
        return longest_row if self.teacher.uses_self_teacher else self.data.max_length

    def count_policy_optimizer_steps(self, iterations: int) -> int:
        """Return the policy's optimizer steps in the first `iterations` iterations; critic warmup has none."""
        return max(0, iterations - self.trainer.critic_warmup) * self.steps_per_iteration

    def count_critic_optimizer_steps(self, iterations: int) -> int:
        """Return the critic's optimizer steps in the first `iterations` iterations."""
        return iterations * self.num_mini_batches * self.critic.ppo_epochs
