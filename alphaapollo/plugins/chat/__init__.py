"""Chat with a run's model in the terminal, with its environment and tools: `alphaapollo chat`."""
