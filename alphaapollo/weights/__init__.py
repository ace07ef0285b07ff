"""The way of weights from the trainer to the engines: buckets, transports with both ends, digest, proof."""
