"""An estimator and a loss, which `algorithm.adv_estimator` and `policy_loss.loss_mode` find by their entry points."""
