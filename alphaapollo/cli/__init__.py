"""The command `alphaapollo` and the Python API."""
