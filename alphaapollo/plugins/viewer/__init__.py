"""Web viewer of run folders. It only reads files, so it never slows down or locks a run."""
