"""A verl command, read from its shell script and written as ours.

script text -> lexer.py: words and operators -> script.py: the commands, with variables put in -> translate.py: our command
"""
