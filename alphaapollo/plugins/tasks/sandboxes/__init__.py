"""Sandboxes: small machines in which agents work with bash, and the tests of their tasks run (docs/tasks.md)."""
