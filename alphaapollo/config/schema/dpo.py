"""The whole configuration of main_dpo, and the data that main_rm reads, too."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat

from alphaapollo.config.schema.base import Ratio, Section
from alphaapollo.config.schema.model import Optimizer
from alphaapollo.config.schema.tuning import TuningConfig, TuningData, TuningTrainer


class PairData(TuningData):
    prompt_key: str = "prompt"
    """Column with the prompt, a chat or a text; not needed where the answers are whole chats."""
    chosen_key: str = "chosen"
    """Column with the better answer: a text, or messages."""
    rejected_key: str = "rejected"
    """Column with the worse one."""
    use_prefix_grouper: bool | Literal["auto"] = "auto"
    """Compute what a pair has in common once for both answers (docs/shared_prompts.md). auto = where the model allows
    it, and where it saves enough."""


class PreferenceData(PairData):
    response_key: str = "response"
    """kto: column with a single answer, where there are no pairs: a text, or messages."""
    label_key: str = "label"
    """kto: column that says of a single answer whether it is desirable: true or false."""


class Preference(Section):
    loss: str = "sigmoid"
    """The preference loss, by name in the registry: sigmoid (DPO; cDPO with label_smoothing), robust, ipo, ipo_mean,
    hinge, slic, exo_pair, nca_pair, sppo_hard, apo_zero, apo_down, kto, orpo or simpo (docs/preferences.md)."""
    beta: PositiveFloat | None = None
    """How strongly the loss holds to the reference: DPO's beta, IPO's tau, ORPO's lambda, SimPO's beta; null = the
    loss's own (0.1; simpo 2, sppo_hard 0.001)."""
    label_smoothing: Ratio | None = None
    """Share of pairs that are labelled the wrong way round: cDPO (sigmoid), robust, exo_pair; null = the loss's own (0;
    exo_pair 0.001)."""
    simpo_gamma: NonNegativeFloat = 1.0
    """simpo: by how much the chosen answer's reward has to be higher."""
    slic_delta: PositiveFloat = 1.0
    """slic: by how much the chosen answer's log-prob has to be higher."""
    kto_desirable_weight: NonNegativeFloat = 1.0
    """kto: weight of desirable answers."""
    kto_undesirable_weight: NonNegativeFloat = 1.0
    """kto: weight of the others."""
    sft_coef: NonNegativeFloat = 0.0
    """Weight of the next-token loss on the chosen answer, added to the loss of pairs: a mean over its tokens (RPO,
    arXiv 2404.19733); with slic their sum (SLiC-HF's lambda)."""
    reference: Literal["kept", "live"] = "kept"
    """Where the reference's log-probs come from: kept = computed once, before training, by the model that is trained,
    and kept in <run>/reference.npz; live = by a frozen second model in every step (with LoRA: by the model without its
    adapters)."""
    custom_module: str = ""
    """Python file that registers your own losses (docs/preferences.md)."""


class DpoTrainer(TuningTrainer):
    experiment_name: str = "dpo"
    """Second folder of the run under output_dir."""


class DpoConfig(TuningConfig):
    """The whole configuration of main_dpo."""

    data: PreferenceData = PreferenceData()
    preference: Preference = Preference()
    optim: Optimizer = Optimizer(lr=5e-7)
    trainer: DpoTrainer = DpoTrainer()
