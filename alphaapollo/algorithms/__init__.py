"""RL and preference algorithms as pure functions on tensors.

Most tensors are matrices [B, L]: B token sequences ("rows") of up to L response tokens, with a 0/1 mask that is 1 on
action tokens (the tokens sampled by the policy).

advantages/          rewards, values -> advantages                       selected by algorithm.adv_estimator
policy_losses/       log-probs, advantages -> loss per token or row      selected by policy_loss.loss_mode
preference_losses    log-probs of answers -> loss per pair or answer     selected by preference.loss
statistics           over tokens, over groups, and over trajectories of several rows
value_loss           values, returns -> loss of the critic per token
aggregation          loss per token -> scalar, selected by loss_agg_mode
kl                   KL estimators, the KL penalty in the reward, divergences
adaptive_coefficients    KL coefficients and baseline of the next iteration
mismatch             metrics of the log-prob mismatch of rollout engine and trainer, and importance weights
"""
