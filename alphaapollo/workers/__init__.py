"""Worker classes for one training rank: policy with its companions, critic, reward model, fine-tuning."""
