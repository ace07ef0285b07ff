"""Configuration of main_export."""

from __future__ import annotations

from typing import Annotated, Literal

from alphaapollo.config.schema.base import FilePath, Section
from alphaapollo.config.schema.model import LoraForm


class ExportConfig(Section):
    checkpoint: Annotated[str, FilePath("folder", required=True)] = ""
    """Checkpoint folder, or a run folder for its newest checkpoint (required)."""
    output: str = ""
    """Folder to write; empty = <run>/exported/<checkpoint>."""
    model_path: Annotated[str, FilePath("model")] = ""
    """Model that the run started from, if it has moved; its configuration and tokenizer are used."""
    role: Literal["policy", "critic"] = "policy"
    """Model to export. A critic becomes a token classifier with one label."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights; auto = the run's model.dtype or, if that is auto, the type of the model it started from."""
    export_lora: LoraForm = "merged"
    """With LoRA: full weights with the adapters merged in, or the policy's adapters alone (peft's format)."""
    push_to: str = ""
    """Hub repository OWNER/NAME to upload the folder to, with your own token (hf auth login, or HF_TOKEN); a new
    repository is private. Empty = no upload."""
