"""Workers, each one training rank: policy (with its reference), critic, reward model, and fine-tuning."""
