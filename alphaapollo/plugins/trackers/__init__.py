"""The packages that trainer.logger can send metrics and samples to."""
