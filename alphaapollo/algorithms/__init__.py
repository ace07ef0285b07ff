"""Algorithms as pure functions on response-aligned matrices `[B, L]` with a 0/1 action mask.

advantages/        token rewards, scores, values -> advantages        selected by algorithm.adv_estimator
policy_losses/     log-probs, advantages -> loss per token or row     selected by policy_loss.loss_mode
joined_trajectories  the rows of a trajectory joined into one, for computations across tokens
aggregation        loss per token -> scalar, with global weights
kl                 KL estimators, the KL in the reward, and controllers of its coefficient
correction         importance weights for the log-prob mismatch of rollout engine and trainer
groups, masked, log_ratio: shared helpers
value_loss, reward_shaping, pf_ppo, dynamic_sampling, mismatch
accuracy_estimates: pass@k, majority vote and confidence intervals of an evaluation
user_function_checks: checks of user-defined estimators and losses before a run
preference, preference_losses: losses on pairs of answers, and their registry
"""
