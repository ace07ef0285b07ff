"""Reward functions by data source, and the processes that isolate them.

base, registry                  result of a reward function; built-in reward functions by `data_source`
short_answers, math/            built-in reward functions; answers reads ground truths and final answers
judges                          a language model as judge: its requests, retries and verdicts
custom                          the user's reward function, written for this project, verl, TRL, OpenRLHF or ms-swift
components                      extra rewards, weighted and added
grader_processes/               isolation: client (slots, retries) -> process (time limits) -> worker (child process)
audit                           `python -m alphaapollo.rewards.audit`, which calls the plug-in grader_audit

The grader of code is the plug-in code_grader.
"""
