"""A verl command, read from its shell script and written as ours.

script -> lexer.py, grammar.py: a tree of words -> shell.py, expansion.py: commands -> translate.py: our command
"""
