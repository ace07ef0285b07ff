"""Fine-tuning: SFT (sft.py), preference losses and reward models (dpo.py) share one training loop (task.py)."""
