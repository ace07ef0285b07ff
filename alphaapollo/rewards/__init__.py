"""Reward functions by data source, and the processes that isolate them.

base, registry                  result of a reward function; built-in reward functions by `data_source`
exact_match, gsm8k, math/, ...  built-in reward functions
judges/                         a language model as judge: its requests, retries and verdicts
custom                          the user's reward function, with this project's or verl's signature
components                      extra rewards, weighted and added
grader_processes/               isolation: client (slots, retries) -> process (time limits) -> worker (child process)
audit                           agreement of the graders with labelled answers
"""
