"""The whole configuration of main_sft."""

from __future__ import annotations

from alphaapollo.config.schema.tuning import TuningConfig, TuningData, TuningTrainer


class SftData(TuningData):
    messages_key: str = "messages"
    """Column with the whole chat; the assistant's messages are trained on."""
    prompt_key: str = "prompt"
    """Column with the prompt, where there is no messages column."""
    response_key: str = "response"
    """Column with the response, where there is no messages column."""


class SftTrainer(TuningTrainer):
    experiment_name: str = "sft"
    """Second folder of the run under output_dir."""


class SftConfig(TuningConfig):
    """The whole configuration of main_sft."""

    data: SftData = SftData()
    trainer: SftTrainer = SftTrainer()
