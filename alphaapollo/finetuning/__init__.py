"""Fine-tuning on texts without engines: a common loop, and one module per task (sft.py, dpo.py, reward_model.py)."""
