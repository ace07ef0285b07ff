"""The mathematics of the project: pure functions on response-aligned matrices `[B, L]` with a 0/1 action mask.

advantages/        token rewards, scores, values -> advantages        picked by algorithm.adv_estimator
policy_losses/     log-probs, advantages -> loss per token or row     picked by policy_loss.loss_mode
end_to_end         the rows of a trajectory as one: what looks beyond single tokens works on that
aggregation        loss per token -> one number, with global weights
kl                 estimators of the KL, the KL in the reward, and who steers its coefficient
correction         weights for the gap between rollout engine and trainer
groups, masked, log_ratio: what several of them share
value_loss, reward_shaping, pf_ppo, dynamic_sampling, mismatch
accuracy_estimates: pass@k, majorities, intervals of an evaluation
try_user_functions: a user's estimator and loss, called once before a run
preference         losses on pairs of answers
"""
