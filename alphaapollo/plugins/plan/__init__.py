"""The command plan: what a training needs and how long it takes, before it starts."""
