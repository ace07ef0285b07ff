"""Convert scripts of verl, TRL, OpenRLHF and ms-swift to shell scripts that run alphaapollo."""
