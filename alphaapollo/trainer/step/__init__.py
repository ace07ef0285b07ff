"""Parts of one iteration: collect groups, build the batch, assign credit, update the models."""
