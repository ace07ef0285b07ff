"""Worker classes for one training rank: policy with its plug-ins, critic, reward model, fine-tuning."""
