"""Reward functions by data source, and the processes that hold them in.

base                                   the names of reward functions: exact, gsm8k, maths, code, search, ...
custom, verl_signature                 a user's function from a file of his own; judge: a model behind a server
components                             several functions, weighted into one reward
client -> grader_pool -> grader_process  a score is asked for; processes that can be killed; what runs in one of them
extract, latex, plain_answers          the answer in a text, and whether two answers are the same
code_tests -> code_inside              a program's tests, and what runs them inside the sandbox
audit                                  how graders do on texts whose label is known
"""
