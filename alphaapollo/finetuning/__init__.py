"""Fine-tuning: SFT (sft.py), preference losses (dpo.py) and reward models (reward_model.py) share one training loop."""
