"""Processes that isolate reward functions: client -> process -> worker."""
