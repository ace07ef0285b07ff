"""Worker classes for one training rank: policy with reference and teacher, critic, reward model, fine-tuning."""
