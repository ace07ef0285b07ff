"""The training ranks: policy with reference, critic; reward model; SFT."""
