"""The whole configuration of main_rm."""

from __future__ import annotations

from pydantic import NonNegativeFloat

from alphaapollo.config.schema.base import Section
from alphaapollo.config.schema.dpo import PairData
from alphaapollo.config.schema.tuning import TuningConfig, TuningTrainer


class RewardData(PairData):
    margin_key: str = "margin"
    """Column that says by how much the chosen answer is better, at least 0: its score has to be higher by that (arXiv
    2307.09288, Eq. 2). Without the column: 0."""


class BradleyTerry(Section):
    centring_coef: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's scores, which keeps scores near zero (arXiv 2312.09244: 0.01)."""


class RmTrainer(TuningTrainer):
    experiment_name: str = "rm"
    """Second folder of the run under output_dir."""


class RmConfig(TuningConfig):
    """The whole configuration of main_rm."""

    data: RewardData = RewardData()
    bradley_terry: BradleyTerry = BradleyTerry()
    trainer: RmTrainer = RmTrainer()
