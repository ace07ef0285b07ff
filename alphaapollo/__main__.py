"""`python -m alphaapollo` is the command `alphaapollo`."""

from __future__ import annotations

import sys

from alphaapollo.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
