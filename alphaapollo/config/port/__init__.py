"""The verl command of a shell script, written as an alphaapollo command."""
