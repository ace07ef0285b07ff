"""Improve answers at inference time: `python -m alphaapollo.evolving.main data.path=... models.policy.path=...`"""

import sys

from alphaapollo.config.schema import EvolvingConfig
from alphaapollo.launch.command import make_command

main = make_command(EvolvingConfig, "evolving", "alphaapollo.evolving.run")


if __name__ == "__main__":
    sys.exit(main())
