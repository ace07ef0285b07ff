"""Playing prompts on engines, scoring, counting: generation, evaluation, and the figures that validation shares."""
