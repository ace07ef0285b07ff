"""The command skill: what assistants that write code should know about this package, as one file."""
