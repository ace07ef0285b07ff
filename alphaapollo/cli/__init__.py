"""The command `alphaapollo`, and those of its subcommands that are in no other package."""
