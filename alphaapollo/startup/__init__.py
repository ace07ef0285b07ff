"""What every command does before its work: the machine, checked inputs, how workers are built."""
