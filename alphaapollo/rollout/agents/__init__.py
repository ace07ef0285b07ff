"""Agents: programs of the user that call the policy over HTTP (env.env_name=agent)."""
