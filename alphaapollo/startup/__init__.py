"""What commands do before their work: the machine, checked inputs, from where they go on, how workers are built."""
