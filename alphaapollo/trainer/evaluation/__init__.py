"""Evaluation: generate responses (main_generation), grade existing ones (main_eval), and report their metrics."""
