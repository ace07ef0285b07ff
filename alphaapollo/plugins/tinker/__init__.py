"""Server for the client `tinker` (docs/tinker.md): its training clients are adapters of `alphaapollo.Trainer`."""
