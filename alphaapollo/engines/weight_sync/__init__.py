"""Weight sync: send the trainer's weights to the inference engines and verify them."""
