"""Training on given texts, without engines: supervised fine-tuning."""
