"""Reward functions by data source, and the processes that isolate them.

base, registry                  result of a reward function; built-in reward functions by `data_source`
exact_match, gsm8k, math/, ...  built-in reward functions
accepted_answers                the answers that a ground truth accepts
judges/                         a language model as judge: its requests, retries and verdicts
custom, contracts               the user's reward function, written for this project, verl, TRL, OpenRLHF or ms-swift
components                      extra rewards, weighted and added
grader_processes/               isolation: client (slots, retries) -> process (time limits) -> worker (child process)
audit                           agreement of the graders with labelled answers
"""
