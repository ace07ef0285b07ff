"""Where processes are placed and called: the only room that knows Ray."""
