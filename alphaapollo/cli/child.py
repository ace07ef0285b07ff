"""A run's driver, for the program that asked for it: python -m alphaapollo.cli.child PARENT_PID MODULE WORD..."""

from __future__ import annotations

import importlib
import sys

from alphaapollo.utils.entry_point import Main
from alphaapollo.utils.watchdog import die_with, ends_when_told

if __name__ == "__main__":
    die_with(int(sys.argv[1]))  # a kernel that is killed leaves no run behind
    with ends_when_told():
        main: Main = importlib.import_module(sys.argv[2]).main
        sys.exit(main(sys.argv[3:]))
