"""Algorithms as pure functions on response-aligned matrices `[B, L]` with a 0/1 action mask.

advantages/        token rewards, scores, values -> advantages        selected by algorithm.adv_estimator
policy_losses/     log-probs, advantages -> loss per token or row     selected by policy_loss.loss_mode
preference_losses  log-probs of answers -> loss per pair or answer    selected by preference.loss
joined_trajectories  joins the rows of a trajectory, for computations across tokens
aggregation        loss per token -> scalar, with global weights
kl                 KL estimators, the KL in the reward, and its coefficient
correction         importance weights for the log-prob mismatch of rollout engine and trainer
group_statistics, masked: shared helpers, and the group filter of dynamic sampling
value_loss, reward_shaping, pf_ppo, mismatch
accuracy_estimates: pass@k, majority vote and confidence intervals of an evaluation
result_checks, user_function_checks: checks of results, and of user-defined functions before a run
"""
