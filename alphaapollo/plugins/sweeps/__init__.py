"""Several runs compared, and what a policy exploits in its reward: `alphaapollo sweep` and `alphaapollo audit`."""
