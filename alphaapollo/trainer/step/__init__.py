"""Parts of one iteration: collect, build the batch, assign credit, learn."""
