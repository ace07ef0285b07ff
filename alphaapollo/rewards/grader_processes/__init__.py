"""Processes that isolate reward functions: client -> pool -> protocol -> worker."""
