"""The whole configuration of main_export."""

from __future__ import annotations

from typing import Literal

from alphaapollo.config.schema.base import Section
from alphaapollo.config.schema.model import LoraForm


class ExportConfig(Section):
    """The whole configuration of main_export."""

    checkpoint: str = ""
    """A checkpoint of main_ppo or main_sft, or a run's folder, for its newest one (required)."""
    output: str = ""
    """The folder to write; empty = <run>/exported/<checkpoint>."""
    model_path: str = ""
    """The model that the run began with, if it has moved (configuration and tokenizer come from it)."""
    role: Literal["policy", "critic"] = "policy"
    """Of a run with a critic: which of the two. A critic becomes a token classifier with one label."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the weights; auto = the run's model.dtype or, where that is auto, that of the model it began with."""
    export_lora: LoraForm = "merged"
    """Of a run with LoRA: whole weights with the adapters merged into them, or a policy's adapters alone (peft's
    folder)."""
    push_to: str = ""
    """OWNER/NAME on the Hugging Face hub to upload the folder to, with your own token (hf auth login, or HF_TOKEN); a
    new repository is private. Empty = nowhere."""
