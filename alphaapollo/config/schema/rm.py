"""Configuration of main_rm."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import NonNegativeFloat

from alphaapollo.config.schema.base import CHANGES_DATA, CHANGES_LOSS, FolderName, Section
from alphaapollo.config.schema.dpo import PairData
from alphaapollo.config.schema.tuning import TuningConfig, TuningTrainer


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
