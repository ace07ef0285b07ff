"""What a run settles before its first iteration: inputs, plan, worker roles."""
