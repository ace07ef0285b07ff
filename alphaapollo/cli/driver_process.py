"""Driver process of a run started from Python: python -m alphaapollo.cli.driver_process PARENT_PID MODULE WORD..."""

from __future__ import annotations

import importlib
import sys

from alphaapollo.utils.entry_point import Main
from alphaapollo.utils.watchdog import exit_with_process, stop_on_signals

if __name__ == "__main__":
    exit_with_process(int(sys.argv[1]))  # ends the run if the parent, e.g. a notebook kernel, is killed
    with stop_on_signals():
        main: Main = importlib.import_module(sys.argv[2]).main
        sys.exit(main(sys.argv[3:]))
