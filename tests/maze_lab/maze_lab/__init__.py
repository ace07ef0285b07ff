"""A corridor to walk through: an example of a package that extends alphaapollo."""
