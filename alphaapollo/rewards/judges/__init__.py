"""Judges: language models that score completions, by a question, a rubric or a comparison."""
