"""Configuration of main_dpo and main_rm, and `PairData`: the settings of the `data` section that they share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from alphaapollo.config.schema.base import (
    CHANGES_ALGORITHM,
    CHANGES_CODE,
    CHANGES_DATA,
    CHANGES_LOSS,
    CHANGES_ROUNDING,
    CHANGES_ROWS,
    CODE,
    FolderName,
    Ratio,
    Section,
)
from alphaapollo.config.schema.model import Optimizer
from alphaapollo.config.schema.tuning import TuningConfig, TuningData, TuningTrainer


class PairData(TuningData):
    truncation: Annotated[Literal["error", "drop"], CHANGES_ROWS] = "error"
    """For an example over data.max_length: stop the run, or drop the example (counted)."""
    prompt_key: Annotated[str, CHANGES_DATA] = "prompt"
    """Column of the prompt, a chat or a string; not needed if the answers are complete chats."""
    chosen_key: Annotated[str, CHANGES_DATA] = "chosen"
    """Column of the better answer: a string or messages."""
    rejected_key: Annotated[str, CHANGES_DATA] = "rejected"
    """Column of the worse answer."""
    use_prefix_grouper: Annotated[bool | Literal["auto"], CHANGES_ROUNDING] = "auto"
    """Compute the common prefix of a pair once (docs/parallelism.md). auto = if the model supports it
    and enough tokens are saved."""


class PreferenceData(PairData):
    response_key: Annotated[str, CHANGES_DATA] = "response"
    """kto: column of a single answer, if there are no pairs: a string or messages."""
    label_key: Annotated[str, CHANGES_DATA] = "label"
    """kto: column that says whether a single answer is desirable: true or false."""


class Preference(Section):
    loss: Annotated[str, CHANGES_ALGORITHM] = "sigmoid"
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
    """Python file that registers your own losses (docs/preferences.md)."""


class DpoConfig(TuningConfig):
    data: PreferenceData = PreferenceData()
    preference: Annotated[Preference, CHANGES_LOSS] = Preference()
    optim: Optimizer = Optimizer(lr=5e-7)
    trainer: TuningTrainer = TuningTrainer(experiment_name="dpo")


class RewardData(PairData):
    margin_key: Annotated[str, CHANGES_DATA] = "margin"
    """Column of the margin by which the chosen answer is better, at least 0 (arXiv 2307.09288, Eq. 2); 0 if there is no
    such column."""


class BradleyTerry(Section):
    centring_coef: Annotated[NonNegativeFloat, CHANGES_LOSS] = 0.0
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
