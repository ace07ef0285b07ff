"""Placement of processes and remote calls. The only package that imports Ray."""
