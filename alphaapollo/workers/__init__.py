"""The training ranks: policy with reference, critic; and how weights travel to the engines (weight_sync/)."""
