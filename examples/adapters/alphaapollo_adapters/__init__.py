"""Environments of OpenEnv servers and of the verifiers library, as a package that extends alphaapollo."""
