"""Reference of `alphaapollo verify`: an iteration's update in float64, written from the formulas of the papers.

It uses numpy, torch, transformers and peft, and nothing of this project but the recorded iteration that it is given.

    samples.py      recorded trajectories -> samples with a reward for each turn
    advantages.py   rewards -> advantages
    models.py       weights and tokens -> log-probs and values
    losses.py       log-probs and advantages -> loss of a mini-batch
    optimizers.py   gradients -> weights
"""
