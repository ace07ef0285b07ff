"""Evaluation suites of lm-eval and inspect-ai, in validations of main_ppo and with `alphaapollo eval RUN --suite`."""
