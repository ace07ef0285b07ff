"""Convert a shell script that runs verl to a script that runs alphaapollo."""
