"""What may change when a fine-tuning goes on: model and data are what a run is. A kind adds its own keys to these."""

from __future__ import annotations

from alphaapollo.config.diff import (
    ANOTHER_MODEL,
    LENGTH,
    OTHER_ADAPTERS,
    OTHER_DATA,
    OTHER_SELECTION,
    REORDERED,
    ROUNDING,
)
from alphaapollo.launch.cpu_threads import OTHER_ROUNDING, TRAINER

OTHER_VALIDATION = "validations before and after do not compare"
IDENTITY = {
    **dict.fromkeys(("model.path", "model.tokenizer_path"), ANOTHER_MODEL),
    **dict.fromkeys(("model.lora_rank", "model.lora_alpha", "model.target_modules"), OTHER_ADAPTERS),
    "data.train_files": OTHER_DATA,
}
"""Keys that must stay as they are, and why."""
EFFECTS = {
    **dict.fromkeys(("data.seed", "data.shuffle", "data.train_max_samples", "data.source_weights"), REORDERED),
    **dict.fromkeys(("data.max_length", "data.truncation"), OTHER_SELECTION),
    **dict.fromkeys(("trainer.total_epochs", "trainer.total_training_steps"), LENGTH),
    **dict.fromkeys(("data.max_token_len_per_gpu", "fsdp_config.fsdp_size", "trainer.device"), ROUNDING),
    **dict.fromkeys((f"model.{name}" for name in ("dtype", "attention", "use_torch_compile", "use_liger")), ROUNDING),
    **dict.fromkeys(("trainer.n_gpus_per_node", "trainer.nnodes", "ulysses_sequence_parallel_size"), ROUNDING),
    **dict.fromkeys(("data.val_files", "data.val_max_samples"), OTHER_VALIDATION),
    TRAINER: OTHER_ROUNDING,
}
"""Keys whose new value counts from here on, and what follows."""
