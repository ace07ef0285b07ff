"""`python -m alphaapollo` is the command `alphaapollo`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("alphaapollo.cli.main", run_name="__main__", alter_sys=True)
