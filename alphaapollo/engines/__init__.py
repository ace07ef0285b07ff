"""Inference engines behind one protocol: vLLM, Hugging Face, and a fake engine for tests."""
